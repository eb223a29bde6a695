"""Several samplers behind one: what is asked is answered once, by the weights of now, whoever dies."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch

from temper.engine.digests import Digests, differing
from temper.engine.fleet import fleet as fleet_module
from temper.engine.fleet.fleet import Fleet, FleetSettings
from temper.engine.fleet.kept import KeptFleet
from temper.engine.fleet.member import SamplerLost
from temper.errors import BackendError
from temper.types import Completion, Finish, Publication, Request, SamplingParams


def asked(name: str) -> Request:
    return Request(id=name, prompt_ids=tuple(name.encode()), params=SamplingParams())


def weights(version: int) -> Publication:
    return Publication(version=version, tensors={"a": torch.zeros(1)})


class FakeSampler:
    """A member: answers when it is let, dies when it is told."""

    def __init__(self, place: int, number: int) -> None:
        self.place, self.number = place, number
        self.version, self.is_dead, self.is_closed, self.is_silent = -1, False, False, False
        self.refuses, self.name = "", f"sampler {number}"
        self.held: dict[str, torch.Tensor] = {}
        self.spoils: dict[str, torch.Tensor] = {}
        """What it holds in place of what was published."""
        self.waiting: dict[str, asyncio.Future[Completion]] = {}
        self.asked: dict[str, Request] = {}
        self.told: dict[str, Completion] = {}
        """Of answers that are not drawn to their end."""
        self.drawn: list[str] = []
        self.may_load, self.may_open, self.may_warm = asyncio.Event(), asyncio.Event(), asyncio.Event()
        for may in (self.may_load, self.may_open, self.may_warm):
            may.set()

    async def opened(self, silent_seconds: float) -> None:
        await self.may_open.wait()
        self._require_alive()

    async def generate(self, request: Request) -> Completion:
        self._require_alive()
        assert self.version >= 0, "asked before it was fed"
        self.waiting[request.id] = asyncio.get_running_loop().create_future()
        self.asked[request.id] = request
        try:
            return await self.waiting[request.id]
        finally:
            self.waiting.pop(request.id, None)

    def answer(self, name: str, finish: Finish = Finish.STOP) -> None:
        self.drawn.append(name)
        future = self.waiting.pop(name)
        future.set_result(
            Completion(
                prompt_ids=(1,), token_ids=[self.number], logprobs=[-1.0], versions=[self.version], finish=finish
            )
        )

    def die(self) -> None:
        self.is_dead = True
        for name, future in self.waiting.items():
            if not future.done():
                future.set_exception(SamplerLost(f"sampler {self.number} fell over", self.told.get(name)))

    async def load(self, publication: Publication, seconds: float) -> None:
        await self.may_load.wait()
        await self.ping(seconds)
        self._require_alive()
        if self.refuses:
            raise BackendError(self.refuses)
        self.version = publication.version
        self.held = {name: tensor.clone() for name, tensor in publication.tensors.items()}
        self.held |= self.spoils

    async def feed(self, publication: Publication, published: Digests, seconds: float) -> list[str]:
        await self.load(publication, seconds)
        return await self.differences(published, seconds)

    async def differences(self, published: Digests, seconds: float) -> list[str]:
        await self.ping(seconds)
        digests = Digests()
        for name, tensor in self.held.items():
            digests.add(name, tensor)
        return differing(published.read(), digests.read())

    async def ping(self, seconds: float) -> None:
        if self.is_silent:
            await asyncio.sleep(seconds)
            self.die()
        self._require_alive()

    async def rest(self, seconds: float) -> None:
        await self.ping(seconds)
        self.version = -1

    async def warm_up(self, expected: Any, tell: Callable[[int, int], None], silent_seconds: float) -> None:
        self._require_alive()
        tell(1, 2)
        await self.may_warm.wait()
        self._require_alive()
        tell(2, 2)

    async def abort(self, name: str) -> None:
        self.answer(name, Finish.ABORT)

    async def interrupt(self, name: str) -> None:
        self.answer(name, Finish.INTERRUPT)

    def stats(self) -> dict[str, float]:
        return {"decode_tokens": 10.0}

    async def close(self) -> None:
        self.is_closed = True
        self.die()

    def _require_alive(self) -> None:
        if self.is_dead:
            raise SamplerLost(f"sampler {self.number} fell over")


class World:
    def __init__(self, num: int, **settings: Any) -> None:
        self.started: list[FakeSampler] = []
        self.notes: list[str] = []
        self.num_closed = 0
        given = {"max_restarts": 3, "silent_seconds": 0.05, "feeds_late": True, **settings}
        self.fleet = Fleet(self.start, num, FleetSettings(**given), note=self.notes.append, closed=self.closed)  # type: ignore[arg-type]

    def start(self, place: int) -> FakeSampler:
        self.started.append(FakeSampler(place, len(self.started)))
        return self.started[-1]

    def closed(self) -> None:
        self.num_closed += 1

    @property
    def drawing(self) -> dict[str, FakeSampler]:
        return {name: sampler for sampler in self.started for name in sampler.waiting}


async def settle(passes: int = 20) -> None:
    for _ in range(passes):
        await asyncio.sleep(0)


def play(num: int, use: Callable[[World], Awaitable[None]], **settings: Any) -> World:
    async def run() -> World:
        world = World(num, **settings)
        async with asyncio.timeout(30):
            await use(world)
            await world.fleet.close()
        return world

    world = asyncio.run(run())
    assert all(sampler.is_closed for sampler in world.started), "whoever was started is closed"
    assert world.num_closed == 1
    return world


def test_what_a_dead_sampler_was_drawing_is_drawn_by_another_once() -> None:
    async def use(world: World) -> None:
        await world.fleet.load(weights(5))
        asking = [asyncio.create_task(world.fleet.generate(asked(f"request {n}"))) for n in range(8)]
        await settle()
        first, second = world.started
        assert (len(first.waiting), len(second.waiting)) == (4, 4), "work is shared out"
        moved = set(first.waiting)
        first.die()
        await settle()
        assert moved <= {name for name, sampler in world.drawing.items() if sampler is not first}
        for name, sampler in world.drawing.items():
            sampler.answer(name)
        drawn = await asyncio.gather(*asking)
        assert [list(completion.versions) for completion in drawn] == [[5]] * 8
        assert Counter(name for sampler in world.started for name in sampler.drawn) == {
            f"request {n}": 1 for n in range(8)
        }
        told = world.fleet.stats()
        assert (told["reissued"], told["sampler_restarts"], told["samplers"]) == (4, 1, 2)
        assert world.fleet.stats()["reissued"] == 0

    world = play(2, use)
    assert world.notes == ["sampler 0 fell over; another takes its place. 4 requests go to another"]


def piece(text: str, finish: Finish = Finish.INTERRUPT, version: int = 1) -> Completion:
    return Completion(
        prompt_ids=(1,), token_ids=[*text.encode()], logprobs=[-1.0] * len(text), versions=[version] * len(text),
        finish=finish,
    )  # fmt: skip


def test_tokens_that_a_dead_sampler_had_told_are_kept_and_the_rest_is_asked_of_another() -> None:
    async def use(world: World) -> None:
        await world.fleet.load(weights(1))
        request = Request(id="a", prompt_ids=(1, 2), params=SamplingParams(max_new_tokens=10))
        asking = asyncio.create_task(world.fleet.generate(request))
        await settle()
        for text, left in (("abc", 7), ("de", 5)):
            (sampler,) = world.drawing.values()
            sampler.told["a"] = piece(text)
            sampler.die()
            await settle(60)
            assert world.drawing["a"].asked["a"].params.max_new_tokens == left
        (sampler,) = world.drawing.values()
        assert sampler.asked["a"].prompt_ids == (1, 2, *b"abcde")
        sampler.waiting["a"].set_result(piece("f", Finish.STOP, version=2))
        drawn = await asking
        assert bytes(drawn.token_ids) == b"abcdef"
        assert (drawn.prompt_ids, drawn.finish, [*drawn.versions]) == ((1, 2), Finish.STOP, [1, 1, 1, 1, 1, 2])
        told = world.fleet.stats()
        assert (told["reissued"], told["rescued"]) == (2, 5)
        assert world.fleet.stats()["rescued"] == 0

    play(2, use)


def test_a_stop_text_that_begins_in_what_was_told_ends_the_answer() -> None:
    async def use(world: World) -> None:
        world.fleet._decode = lambda ids: bytes(ids).decode()
        await world.fleet.load(weights(1))
        request = Request(id="a", prompt_ids=(1, 2), params=SamplingParams(max_new_tokens=10, stop=("END",)))
        asking = asyncio.create_task(world.fleet.generate(request))
        await settle()
        world.drawing["a"].told["a"] = piece("abE")
        world.drawing["a"].die()
        await settle(60)
        world.drawing["a"].waiting["a"].set_result(piece("NDxyz", Finish.LENGTH))
        drawn = await asking
        assert (bytes(drawn.token_ids), drawn.finish) == (b"abEND", Finish.STOP)

    play(2, use)


def test_a_stop_text_over_two_pieces_of_dead_samplers_ends_the_answer_before_anybody_goes_on() -> None:
    async def use(world: World) -> None:
        world.fleet._decode = lambda ids: bytes(ids).decode()
        await world.fleet.load(weights(1))
        request = Request(id="a", prompt_ids=(1, 2), params=SamplingParams(max_new_tokens=20, stop=("END",)))
        asking = asyncio.create_task(world.fleet.generate(request))
        await settle()
        for told in ("abEN", "Dxyz"):
            sampler = world.drawing["a"]
            sampler.told["a"] = piece(told)
            sampler.die()
            await settle(60)
        assert "a" not in world.drawing, "nobody is asked for what comes behind the stop text"
        drawn = await asking
        assert (bytes(drawn.token_ids), drawn.finish) == (b"abEND", Finish.STOP)

    play(3, use)


@pytest.mark.parametrize("verb", ["abort", "interrupt"])
def test_a_request_that_is_ended_at_a_dying_sampler_is_not_drawn_by_another(verb: str) -> None:
    async def unheard(name: str) -> None:
        pass

    async def use(world: World) -> None:
        await world.fleet.load(weights(1))
        asking = asyncio.create_task(world.fleet.generate(asked("a")))
        await settle()
        sampler = world.drawing["a"]
        sampler.told["a"] = piece("abc")
        setattr(sampler, verb, unheard)
        await getattr(world.fleet, verb)("a")
        sampler.die()
        await settle(60)
        assert "a" not in world.drawing
        drawn = await asking
        assert (bytes(drawn.token_ids), drawn.finish) == (b"abc", Finish(verb))

    play(2, use)


def test_a_request_that_is_ended_while_nobody_draws_it_keeps_what_was_told() -> None:
    async def use(world: World) -> None:
        await world.fleet.load(weights(1))
        asking = asyncio.create_task(world.fleet.generate(asked("a")))
        await settle()
        world.fleet._start = lambda place: slow(world, place)
        (sampler,) = world.drawing.values()
        sampler.told["a"] = piece("abc")
        sampler.die()
        await settle()
        await world.fleet.interrupt("a")
        drawn = await asking
        assert (bytes(drawn.token_ids), drawn.finish) == (b"abc", Finish.INTERRUPT)
        world.started[-1].may_open.set()

    play(1, use)


def slow(world: World, place: int) -> Any:
    sampler = world.start(place)
    sampler.may_open.clear()
    return sampler


def test_one_that_comes_back_is_fed_what_the_others_have_before_it_draws() -> None:
    async def use(world: World) -> None:
        await world.fleet.load(weights(1))
        world.started[0].die()
        asking = asyncio.create_task(world.fleet.generate(asked("a")))  # goes to the first, which is found dead
        await settle()
        third = world.started[2]
        assert third.version == 1
        await world.fleet.load(weights(2))
        assert [sampler.version for sampler in world.started] == [1, 2, 2]
        for name, sampler in world.drawing.items():
            sampler.answer(name)
        await asking

    play(2, use)


def test_one_that_comes_back_and_does_not_take_what_the_others_have_is_tried_again_and_then_given_up() -> None:
    def start_refusing(world: World, place: int) -> Any:
        sampler = world.start(place)
        sampler.refuses = "no room for these weights"
        return sampler

    async def use(world: World) -> None:
        await world.fleet.load(weights(1))
        world.fleet._start = lambda place: start_refusing(world, place)  # type: ignore[return-value]
        asking = asyncio.create_task(world.fleet.generate(asked("a")))
        await settle()
        world.drawing["a"].die()
        with pytest.raises(SamplerLost, match=r"after 2 restarts each: no room for these weights"):
            await asking

    world = play(1, use, max_restarts=2)
    assert len(world.started) == 3
    assert world.notes[1:] == [f"sampler {n} was not fed, and is ended: no room for these weights" for n in (1, 2)]


def test_one_that_takes_long_to_open_its_model_keeps_nobody_waiting() -> None:
    async def use(world: World) -> None:
        await world.fleet.load(weights(1))
        start = world.fleet._start

        def start_slowly(place: int) -> Any:
            sampler: Any = start(place)
            sampler.may_open.clear()
            return sampler

        world.fleet._start = start_slowly
        world.started[0].die()
        asking = asyncio.create_task(world.fleet.generate(asked("a")))
        await settle()
        await world.fleet.load(weights(2))
        assert [sampler.version for sampler in world.started] == [1, 2, -1]
        assert list(world.drawing.values()) == [world.started[1]]
        world.started[2].may_open.set()
        await settle()
        assert world.started[2].version == 2, "fed with what is published by then"
        world.started[1].answer("a")
        await asking

    play(2, use)


@pytest.mark.parametrize("phase", ["may_open", "may_warm"])
def test_one_that_dies_before_the_first_weights_is_replaced_and_the_run_begins(phase: str) -> None:
    """While it opens its model, and while it compiles, as samplers on a GPU do."""

    async def use(world: World) -> None:
        getattr(world.started[0], phase).clear()
        told: list[tuple[int, int]] = []
        warming = asyncio.create_task(world.fleet.warm_up(None, lambda done, all: told.append((done, all))))  # type: ignore[arg-type]
        await settle()
        assert not warming.done()
        world.started[0].die()
        getattr(world.started[0], phase).set()
        await warming
        assert {(2, 3), (3, 4)} & {*told}, "the other one is ready"
        await world.fleet.load(weights(1))
        await settle()
        assert [sampler.version for sampler in world.started] == [-1, 1, 1]
        assert "another takes its place" in world.notes[0]

    assert len(play(2, use).started) == 3


def test_one_that_cannot_be_started_is_tried_again_and_given_up() -> None:
    async def use(world: World) -> None:
        await world.fleet.load(weights(1))

        def refuse(place: int) -> Any:
            raise BackendError("no room for another process")

        world.fleet._start = refuse
        world.started[0].die()
        asking = asyncio.create_task(world.fleet.generate(asked("a")))
        await settle()
        world.started[1].answer("a")
        await asking
        assert world.notes[1:] == ["no room for another process"] * 2
        assert world.fleet.stats()["samplers"] == 1

    play(2, use, max_restarts=2)


@pytest.mark.parametrize("where", ["start", "close", "feed"])
def test_an_error_of_the_system_while_one_is_replaced_is_one_more_try(where: str) -> None:
    """Unseen it would end the task that replaces it, and all would wait for a sampler that nobody starts."""
    full = OSError(24, "Too many open files")

    async def use(world: World) -> None:
        await world.fleet.load(weights(1))
        start, close = world.start, world.started[0].close
        tried: list[int] = []

        def starts(place: int) -> FakeSampler:
            tried.append(place)
            if where == "start" and len(tried) == 1:
                raise full
            sampler = start(place)
            if where == "feed" and len(tried) == 1:
                sampler.feed = closes  # type: ignore[method-assign]
            return sampler

        async def closes(*_: Any) -> Any:
            world.started[0].close = close  # type: ignore[method-assign]
            raise full

        if where == "close":
            world.started[0].close = closes  # type: ignore[method-assign]
        world.fleet._start = starts
        world.started[0].die()
        asking = asyncio.create_task(world.fleet.generate(asked("a")))
        await settle(60)
        world.drawing["a"].answer("a")
        await asking
        assert "Too many open files" in world.notes[1]
        assert world.fleet.stats()["samplers"] == 1

    play(1, use)


def test_where_the_last_weights_are_gone_one_that_comes_back_waits_for_the_next() -> None:
    async def use(world: World) -> None:
        await world.fleet.load(weights(1))
        world.started[0].die()
        first = asyncio.create_task(world.fleet.generate(asked("a")))
        await settle()
        assert world.started[2].version == -1, "the trainer may be changing them"
        later = [asyncio.create_task(world.fleet.generate(asked(f"b{n}"))) for n in range(4)]
        await settle()
        assert set(world.drawing.values()) == {world.started[1]}
        await world.fleet.load(weights(2))
        assert world.started[2].version == 2
        for name, sampler in world.drawing.items():
            sampler.answer(name)
        await asyncio.gather(first, *later)

    play(2, use, feeds_late=False)


@pytest.mark.parametrize("feeds_late", [True, False])
def test_with_none_left_the_run_ends_and_says_how_each_ended(feeds_late: bool) -> None:
    async def use(world: World) -> None:
        await world.fleet.load(weights(1))
        asking = [asyncio.create_task(world.fleet.generate(asked(f"{n}"))) for n in range(4)]
        while not all(task.done() for task in asking):
            await settle()
            for sampler in world.started:
                sampler.die()
        for task in asking:
            with pytest.raises(SamplerLost, match=r"sampler \d fell over.*go on with --resume"):
                await task
        with pytest.raises(SamplerLost):
            await world.fleet.generate(asked("later"))

    world = play(2, use, max_restarts=1, feeds_late=feeds_late)
    assert len(world.started) == 4, "each was replaced once"


def test_a_publication_that_a_living_sampler_refuses_fails() -> None:
    async def use(world: World) -> None:
        await world.fleet.load(weights(1))
        world.started[1].refuses = "one tensor too many; nothing was loaded"
        with pytest.raises(BackendError, match="one tensor too many"):
            await world.fleet.load(weights(2))
        assert world.fleet.version == 1

    play(2, use)


@pytest.mark.parametrize("spoiled", [0, 1])
def test_whichever_holds_other_numbers_than_were_published_is_named_with_the_tensor(spoiled: int) -> None:
    async def use(world: World) -> None:
        await world.fleet.load(weights(1))
        assert await world.fleet.differences() == []
        world.started[spoiled].spoils = {"a": torch.tensor([1e-9])}
        with pytest.raises(BackendError, match=f"^sampler {spoiled} holds other numbers than publication 2 in a\\."):
            await world.fleet.load(weights(2))

    play(2, use)


def test_one_that_changes_after_a_publication_is_found_when_somebody_asks() -> None:
    async def use(world: World) -> None:
        await world.fleet.load(weights(1))
        world.started[1].held["a"] += 1
        assert await world.fleet.differences() == ["a of sampler 1"]
        world.started[0].die()
        assert await world.fleet.differences() == ["a of sampler 1"], "the dead are replaced, and say nothing"

    play(2, use)


def test_one_that_comes_back_and_reads_what_the_next_step_has_made_of_them_waits_for_the_next_publication() -> None:
    async def use(world: World) -> None:
        trained = torch.zeros(1)
        await world.fleet.load(Publication(version=1, tensors={"a": trained}))
        trained += 1
        world.started[0].die()
        asking = asyncio.create_task(world.fleet.generate(asked("a")))
        await settle(60)
        assert set(world.drawing.values()) == {world.started[1]}
        assert world.fleet.stats()["samplers"] == 1
        assert world.notes[1:] == [
            "sampler 2 holds other numbers than publication 1 in a. Nothing was drawn with them; "
            "it waits for the next publication"
        ]
        await world.fleet.load(Publication(version=2, tensors={"a": trained}))
        assert world.fleet.stats()["samplers"] == 2
        world.started[1].answer("a")
        await asking

    play(2, use)


def test_nothing_is_drawn_before_the_first_publication() -> None:
    async def use(world: World) -> None:
        with pytest.raises(BackendError, match="stale: publish weights"):
            await world.fleet.generate(asked("a"))

    play(2, use)


@pytest.mark.parametrize("verb", ["abort", "interrupt"])
def test_a_request_is_ended_where_it_is_drawn_or_while_it_waits(verb: str) -> None:
    async def use(world: World) -> None:
        await world.fleet.load(weights(1))
        finish = Finish.ABORT if verb == "abort" else Finish.INTERRUPT
        asking = asyncio.create_task(world.fleet.generate(asked("a")))
        await settle()
        await getattr(world.fleet, verb)("a")
        assert (await asking).finish is finish
        await getattr(world.fleet, verb)("unknown")
        (sampler,) = world.started
        asking = asyncio.create_task(world.fleet.generate(asked("b")))
        await settle()
        start = world.fleet._start
        world.fleet._start = lambda place: gated(start(place))  # type: ignore[assignment, arg-type, return-value]
        sampler.die()
        await settle()
        await getattr(world.fleet, verb)("b")
        ended = await asking
        assert (ended.finish, list(ended.token_ids)) == (finish, [])
        world.started[-1].may_load.set()

    def gated(sampler: Any) -> Any:
        sampler.may_load.clear()
        return sampler

    play(1, use)


@pytest.mark.parametrize("verb", ["abort", "interrupt"])
def test_a_request_that_was_ended_is_not_drawn_by_another_when_its_sampler_dies_before_it_answers(verb: str) -> None:
    async def use(world: World) -> None:
        await world.fleet.load(weights(1))
        asking = asyncio.create_task(world.fleet.generate(asked("a")))
        await settle()
        (sampler,) = world.drawing.values()
        sampler.answer = lambda name, finish: None  # type: ignore[method-assign]  # it hears the end and says nothing
        await getattr(world.fleet, verb)("a")
        sampler.told["a"] = piece("abc")
        sampler.die()
        drawn = await asking
        assert (bytes(drawn.token_ids), drawn.finish) == (b"abc", Finish.ABORT if verb == "abort" else Finish.INTERRUPT)

    play(2, use)


def test_what_is_drawn_when_the_fleet_is_closed_ends() -> None:
    async def use(world: World) -> None:
        await world.fleet.load(weights(1))
        asking = asyncio.create_task(world.fleet.generate(asked("a")))
        await settle()
        await world.fleet.close()
        with pytest.raises(SamplerLost, match="were closed"):
            await asking

    play(2, use)


def test_one_that_refuses_whenever_it_comes_back_is_given_up_and_others_draw() -> None:
    async def use(world: World) -> None:
        await world.fleet.load(weights(1))
        start = world.fleet._start

        def start_refusing(place: int) -> Any:
            sampler: Any = start(place)
            sampler.refuses = "no such file"
            return sampler

        world.fleet._start = start_refusing
        world.started[0].die()
        asking = asyncio.create_task(world.fleet.generate(asked("a")))
        await settle(200)
        assert set(world.drawing.values()) == {world.started[1]}
        assert world.notes[1:] == [f"sampler {n} was not fed, and is ended: no such file" for n in (2, 3, 4)]
        await world.fleet.load(weights(2))
        assert world.fleet.stats()["samplers"] == 1
        world.started[1].answer("a")
        await asking

    play(2, use)


def test_one_that_nobody_asks_and_that_falls_silent_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "PING_SECONDS", 0.01)

    async def use(world: World) -> None:
        await world.fleet.load(weights(1))
        world.started[0].is_silent = True
        while len(world.started) < 3 or world.started[2].version < 1:
            await asyncio.sleep(0.01)

    play(2, use)


def test_one_that_falls_silent_while_it_takes_weights_holds_nobody_for_longer_than_a_silence() -> None:
    async def use(world: World) -> None:
        await world.fleet.load(weights(1))
        world.started[0].is_silent = True
        await world.fleet.load(weights(2))
        assert world.started[1].version == 2
        while len(world.started) < 3 or world.started[2].version < 2:
            await asyncio.sleep(0.01)

    play(2, use)


def test_after_a_rest_the_same_samplers_draw_nothing_before_they_were_fed_anew() -> None:
    """Also with older weights: trainers begin anew from a checkpoint."""

    async def use(world: World) -> None:
        await world.fleet.load(weights(5))
        await world.fleet.rest()
        with pytest.raises(BackendError, match="stale"):
            await world.fleet.generate(asked("early"))
        await world.fleet.load(weights(3))
        assert [sampler.version for sampler in world.started] == [3, 3]
        assert world.fleet.version == 3

    play(2, use)


def test_one_that_is_silent_when_it_shall_rest_is_replaced_and_fed_by_the_next_publication() -> None:
    async def use(world: World) -> None:
        await world.fleet.load(weights(5))
        world.started[0].is_silent = True
        await world.fleet.rest()
        await world.fleet.load(weights(3))
        while len(world.started) < 3 or world.started[2].version != 3:
            await asyncio.sleep(0.01)
        assert world.started[1].version == 3

    play(2, use)


def test_a_kept_fleet_is_taken_by_whoever_asks_for_the_same_and_closed_otherwise() -> None:
    worlds: list[World] = []

    def make() -> Fleet:
        worlds.append(World(1))
        return worlds[-1].fleet

    async def use() -> None:
        kept = KeptFleet()
        first = kept.take("orders", make)
        assert await kept.keep(first)
        assert kept.take("orders", make) is first
        assert not await kept.keep(World(1).fleet), "a stranger is its owner's to close"
        assert await kept.keep(first)
        other = kept.take("other orders", make)
        assert other is not first
        await kept.close()
        assert [world.num_closed for world in worlds] == [1, 0]
        await other.close()

    asyncio.run(use())


def test_a_fleet_is_closed_while_one_is_being_replaced() -> None:
    async def use(world: World) -> None:
        await world.fleet.load(weights(1))
        start = world.fleet._start

        def start_slowly(place: int) -> Any:
            sampler = start(place)
            sampler.may_load.clear()  # type: ignore[attr-defined]
            asyncio.get_running_loop().call_later(0.05, sampler.may_load.set)  # type: ignore[attr-defined]
            return sampler

        world.fleet._start = start_slowly  # type: ignore[assignment]
        world.started[0].die()
        asking = asyncio.create_task(world.fleet.generate(asked("a")))
        await settle()
        assert len(world.started) == 3
        asking.cancel()

    play(2, use)


def test_nobody_is_started_for_a_fleet_that_is_closed_while_a_dead_one_is_cleared_away() -> None:
    async def use(world: World) -> None:
        await world.fleet.load(weights(1))
        dead, is_cleared = world.started[0], asyncio.Event()
        close = dead.close

        async def close_slowly() -> None:
            await is_cleared.wait()
            await close()

        dead.close = close_slowly  # type: ignore[method-assign]
        dead.die()
        asking = asyncio.create_task(world.fleet.generate(asked("a")))
        await settle()
        closing = asyncio.create_task(world.fleet.close())
        await settle()
        is_cleared.set()
        await closing
        asking.cancel()
        assert len(world.started) == 2

    play(2, use)


def test_seconds_with_something_to_draw_are_those_of_a_mean_sampler() -> None:
    """One that draws the long tail alone leaves the others idle."""

    async def use(world: World) -> None:
        await world.fleet.load(weights(1))
        for sampler, seconds in zip(world.started, (8.0, 1.0, 0.0), strict=True):
            sampler.stats = lambda seconds=seconds: {"drawing_seconds": seconds}  # type: ignore[method-assign, misc]
        assert world.fleet.stats()["drawing_seconds"] == 3.0

    play(3, use)


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_deaths_answers_and_publications_answers_each_request_once(seed: int) -> None:
    chance = random.Random(seed)

    async def use(world: World) -> None:
        await world.fleet.load(weights(1))
        published, asking = 1, {}
        for number in range(60):
            name = f"request {number}"
            asking[name] = asyncio.create_task(world.fleet.generate(asked(name)))
            await settle(chance.randrange(4))
            living = [sampler for sampler in world.started if not sampler.is_dead]
            if chance.random() < 0.15:
                chance.choice(living).die()
            if chance.random() < 0.2:
                published += 1
                await world.fleet.load(weights(published))
                assert {s.version for s in world.started if not s.is_dead} <= {published, -1}
            for waiting, sampler in list(world.drawing.items()):
                if chance.random() < 0.3 and not sampler.is_dead:
                    sampler.answer(waiting)
        while not all(task.done() for task in asking.values()):
            await settle()
            for waiting, sampler in list(world.drawing.items()):
                if not sampler.is_dead:
                    sampler.answer(waiting)
        answers = await asyncio.gather(*asking.values())
        assert all(1 <= completion.versions[0] <= published for completion in answers)
        assert Counter(name for sampler in world.started for name in sampler.drawn) == dict.fromkeys(asking, 1)

    play(3, use, max_restarts=1000)
