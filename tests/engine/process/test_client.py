"""A sampler behind a socket is the sampler itself: what it draws, when it changes weights, how requests end."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from temper.engine.local.engine import LocalEngine
from temper.engine.process import client as client_module
from temper.engine.process import server as server_module
from temper.engine.process.client import ProcessSampler
from temper.engine.process.order import LocalOrder, open_engine, read_order
from temper.engine.process.server import Open, ServedSampler
from temper.errors import BackendError, ContextFull, TaskError, UserError
from temper.types import Completion, Finish, Publication, Request, SamplingParams
from tests.engine.process.conftest import publication
from tests.fakes.served import serve_in_a_thread

LONG = 30
"""Tokens of a request that something happens to."""


def asked(name: str, new: int = 12, **params: Any) -> Request:
    return Request(id=name, prompt_ids=(3, 4, 5), params=SamplingParams(max_new_tokens=new, **params))


def same(ours: Completion, theirs: Completion) -> bool:
    """To the bit, types of numbers included."""
    for field in dataclasses.fields(Completion):
        a, b = getattr(ours, field.name), getattr(theirs, field.name)
        if hasattr(a, "array"):
            a, b = (a.array.dtype, a.array.tobytes()), (b.array.dtype, b.array.tobytes())
        elif hasattr(a, "flat"):
            a, b = (
                (a.flat.dtype, a.flat.tobytes(), a.counts.tolist()),
                (b.flat.dtype, b.flat.tobytes(), b.counts.tolist()),
            )
        if a != b:
            return False
    return True


class Opener:
    """Opens an engine, and lets a test see how far it is."""

    def __init__(self) -> None:
        self.engine: LocalEngine | None = None

    async def __call__(self, text: str) -> LocalEngine:
        self.engine = open_engine(read_order(text))
        return self.engine

    async def has_drawn(self, tokens: int) -> None:
        await until(
            lambda: self.engine is not None and self.engine.utilisation()["temper_engine_decode_tokens_total"] >= tokens
        )


async def with_client(order: LocalOrder, use: Callable[[ProcessSampler], Any], **more: Any) -> Any:
    sampler = serve_in_a_thread(order.to_json(), **more)
    try:
        return await use(sampler)
    finally:
        await sampler.close()


async def until(is_true: Callable[[], bool], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not is_true():
            await asyncio.sleep(0.002)


REQUESTS = [
    asked("plain"),
    asked("greedy", temperature=0.0),
    asked("told", top_logprobs=3, entropy=True),
    asked("cut", top_p=0.7, top_k=4),
    asked("stopped", new=40, stop_ids=(6, 7)),
    Request(id="long", prompt_ids=tuple(np.arange(40) % 9), params=SamplingParams(max_new_tokens=5)),
]


def test_it_draws_what_an_engine_of_this_process_draws_to_the_bit(order: LocalOrder, folder: Path) -> None:
    weights = publication(folder, 4)

    async def draw(sampler: LocalEngine | ProcessSampler) -> list[Completion]:
        await sampler.load(weights)
        assert sampler.version == 4
        return await asyncio.gather(*(sampler.generate(request) for request in REQUESTS))

    expected = asyncio.run(draw(open_engine(order)))
    got = asyncio.run(with_client(order, draw))
    assert [same(*pair) for pair in zip(expected, got, strict=True)] == [True] * len(REQUESTS)
    assert {completion.finish for completion in got} == {Finish.STOP, Finish.LENGTH}


def test_it_is_stale_until_it_was_fed(order: LocalOrder, folder: Path) -> None:
    async def use(sampler: ProcessSampler) -> None:
        with pytest.raises(BackendError, match="stale: publish weights"):
            await sampler.generate(asked("early"))
        await sampler.load(publication(folder, 1))
        await sampler.generate(asked("late"))

    asyncio.run(with_client(order, use))


def without_one(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.norm.weight"]


def with_another(tensors: dict[str, torch.Tensor]) -> None:
    tensors["extra"] = torch.zeros(1)


def with_another_shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1]


def with_another_type(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.bfloat16)


@pytest.mark.parametrize("spoil", [without_one, with_another, with_another_shape, with_another_type])
def test_a_publication_that_does_not_fit_changes_nothing(
    spoil: Callable[[dict[str, torch.Tensor]], None], order: LocalOrder, folder: Path
) -> None:
    tensors = dict(publication(folder, 2).tensors)
    spoil(tensors)

    async def use(sampler: ProcessSampler) -> None:
        await sampler.load(publication(folder, 1))
        before = await sampler.generate(asked("a"))
        with pytest.raises(BackendError, match="nothing was loaded"):
            await sampler.load(Publication(version=2, tensors=tensors))
        assert sampler.version == 1
        assert same(before, await sampler.generate(asked("a")))

    asyncio.run(with_client(order, use))


def test_a_publication_repeated_changes_nothing_and_the_next_one_does(order: LocalOrder, folder: Path) -> None:
    async def use(sampler: ProcessSampler) -> None:
        first = publication(folder, 1)
        await sampler.load(first)
        before = await sampler.generate(asked("a"))
        await sampler.load(first)
        assert same(before, await sampler.generate(asked("a")))
        await sampler.load(publication(folder, 2))
        after = await sampler.generate(asked("a"))
        assert (sampler.version, set(after.versions)) == (2, {2})
        assert after.logprobs != before.logprobs

    asyncio.run(with_client(order, use))


@pytest.mark.parametrize("kv_after_load", ["keep", "recompute"])
def test_weights_change_between_two_tokens_and_keys_are_kept_or_computed_again(
    kv_after_load: Any, order: LocalOrder, folder: Path
) -> None:
    order = dataclasses.replace(order, settings=dataclasses.replace(order.settings, kv_after_load=kv_after_load))
    second, opener = publication(folder, 2), Opener()

    async def use(sampler: ProcessSampler) -> Completion:
        await sampler.load(publication(folder, 1))
        drawing = asyncio.create_task(sampler.generate(asked("a", new=LONG)))
        await opener.has_drawn(3)
        await sampler.load(second)
        return await drawing

    async def go_on(drawn: Completion) -> Completion:
        """The rest by an engine that has seen nothing but the new weights."""
        engine, old = open_engine(order), list(drawn.versions).count(1)
        await engine.load(second)
        prompt = (*drawn.prompt_ids, *drawn.token_ids[:old])
        return await engine.generate(
            Request(id="a", prompt_ids=prompt, params=SamplingParams(max_new_tokens=LONG - old))
        )

    drawn = asyncio.run(with_client(order, use, opener=opener))
    versions = list(drawn.versions)
    assert versions == sorted(versions)
    assert set(versions) == {1, 2}, "the change came in the middle"
    rest = asyncio.run(go_on(drawn))
    is_fresh = list(drawn.logprobs)[versions.count(1) :] == list(rest.logprobs)
    assert is_fresh == (kv_after_load == "recompute")


def test_an_interrupted_request_goes_on_as_if_nothing_had_happened(order: LocalOrder, folder: Path) -> None:
    opener = Opener()

    async def use(sampler: ProcessSampler) -> None:
        await sampler.load(publication(folder, 1))
        whole = await sampler.generate(asked("a", new=LONG))
        drawing = asyncio.create_task(sampler.generate(asked("a", new=LONG)))
        await opener.has_drawn(LONG + 3)
        await sampler.interrupt("a")
        await sampler.interrupt("nobody")
        first = await drawing
        assert first.finish is Finish.INTERRUPT
        assert 0 < len(first.token_ids) < LONG
        prompt, left = (3, 4, 5, *first.token_ids), LONG - len(first.token_ids)
        rest = await sampler.generate(Request(id="a", prompt_ids=prompt, params=SamplingParams(max_new_tokens=left)))
        assert [*first.token_ids, *rest.token_ids] == list(whole.token_ids)
        assert [*first.logprobs, *rest.logprobs] == list(whole.logprobs)

    asyncio.run(with_client(order, use, opener=opener))


def test_an_aborted_request_returns_what_was_drawn_also_when_it_was_hardly_asked(
    order: LocalOrder, folder: Path
) -> None:
    async def use(sampler: ProcessSampler) -> None:
        await sampler.load(publication(folder, 1))
        drawing = asyncio.create_task(sampler.generate(asked("a", new=LONG)))
        await asyncio.sleep(0)  # it is handed in here, and not sent yet
        await sampler.abort("a")
        assert (await drawing).finish is Finish.ABORT

    asyncio.run(with_client(order, use))


def test_a_caller_that_is_cancelled_ends_its_request(order: LocalOrder, folder: Path) -> None:
    opener = Opener()

    async def use(sampler: ProcessSampler) -> None:
        await sampler.load(publication(folder, 1))
        drawing = asyncio.create_task(sampler.generate(asked("a", new=LONG)))
        await opener.has_drawn(3)
        drawing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await drawing
        await sampler.generate(asked("b"))
        await sampler.load(publication(folder, 2))
        stats = sampler.stats()
        assert (stats["aborted"], stats["finished"]) == (1, 1)
        assert "aborted" not in sampler.stats(), "counts are told once"

    asyncio.run(with_client(order, use, opener=opener))


def test_a_mistake_of_one_request_is_that_requests_alone(order: LocalOrder, folder: Path) -> None:
    async def use(sampler: ProcessSampler) -> list[Any]:
        await sampler.load(publication(folder, 1))
        wrong = [
            Request(id="outside", prompt_ids=(10**6,), params=SamplingParams()),
            Request(id="full", prompt_ids=(3,) * 600, params=SamplingParams()),
            asked("twice"),
            asked("twice"),
            asked("text", stop=("a",)),
        ]
        return await asyncio.gather(*(sampler.generate(request) for request in wrong), return_exceptions=True)

    outside, full, once, twice, text = asyncio.run(with_client(order, use))
    assert isinstance(outside, TaskError)
    assert "outside the vocabulary" in str(outside)
    assert isinstance(full, ContextFull)
    assert isinstance(once, Completion)
    assert isinstance(twice, TaskError)
    assert isinstance(text, TaskError)
    assert "token ids only" in str(text)


def test_stop_texts_end_a_completion_where_the_order_says_so(order: LocalOrder, folder: Path) -> None:
    async def use(sampler: ProcessSampler) -> Completion:
        await sampler.load(publication(folder, 1))
        return await sampler.generate(asked("a", new=LONG, stop=("ab", "ba", "cd", "hh")))

    drawn = asyncio.run(with_client(dataclasses.replace(order, has_stop_texts=True), use))
    assert drawn.finish is Finish.STOP
    assert len(drawn.token_ids) < LONG


def test_a_model_that_cannot_be_opened_is_the_users_mistake(order: LocalOrder, tmp_path: Path, folder: Path) -> None:
    async def use(sampler: ProcessSampler) -> None:
        with pytest.raises(UserError, match="cannot be loaded"):
            await sampler.load(publication(folder, 1))

    (tmp_path / "config.json").write_text("{}")
    asyncio.run(with_client(dataclasses.replace(order, folder=str(tmp_path)), use))


def test_requests_in_flight_end_when_the_process_does_and_say_so(order: LocalOrder, folder: Path) -> None:
    opener = Opener()

    async def use(sampler: ProcessSampler) -> None:
        await sampler.load(publication(folder, 1))
        drawing = [asyncio.create_task(sampler.generate(asked(f"{n}", new=LONG))) for n in range(3)]
        await opener.has_drawn(3)
        began = time.monotonic()
        sampler._process.kill()
        for ended in await asyncio.gather(*drawing, return_exceptions=True):
            assert isinstance(ended, BackendError)
            assert "it ended" in str(ended)
            assert "--resume" in str(ended)
        assert time.monotonic() - began < client_module.END_SECONDS
        with pytest.raises(BackendError, match="it ended"):
            await sampler.generate(asked("later"))
        with pytest.raises(BackendError, match="it ended"):
            await sampler.load(publication(folder, 2))

    asyncio.run(with_client(order, use, opener=opener))


class Recorder:
    """Implements engine.process.server.ServedSampler: writes down what it is asked, in order."""

    def __init__(self, load_seconds: float = 0.0) -> None:
        self.version, self.heard, self._load_seconds = 0, list[str](), load_seconds

    async def generate(self, request: Request) -> Completion:
        self.heard.append(request.id)
        await asyncio.sleep(0)
        return Completion(prompt_ids=(0,), token_ids=[1], logprobs=[0.0], versions=[0], finish=Finish.STOP)

    async def abort(self, request_id: str) -> None:
        self.heard.append(f"abort {request_id}")

    async def interrupt(self, request_id: str) -> None:
        self.heard.append(f"interrupt {request_id}")

    async def load(self, publication: Publication) -> None:
        first = next(iter(publication.tensors.values())).clone()
        await asyncio.sleep(self._load_seconds)
        if not torch.equal(first, next(iter(publication.tensors.values()))):
            self.heard.append("written under a reader")
        self.version = publication.version

    async def warm_up(self, expected: Any, tell: Callable[[int, int], None]) -> None:
        tell(0, 2)
        self.heard.append(f"warm_up {expected.params.top_p}")

    def stats(self) -> dict[str, float]:
        return {}

    def so_far(self, least: Any) -> dict[str, Completion]:
        return {}

    async def close(self) -> None:
        self.heard.append("close")


def opens(sampler: Recorder) -> Open:
    async def opened(text: str) -> ServedSampler:
        return sampler  # type: ignore[return-value]

    return opened


def small(version: int) -> Publication:
    return Publication(version=version, tensors={"a": torch.full((3,), float(version)), "none": torch.zeros(0, 4)})


def test_requests_of_one_turn_arrive_together_and_in_order(order: LocalOrder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Together: what is admitted together is computed together, and in fast mode that decides the last bits."""
    recorder, frames = Recorder(), []
    requests_of = server_module.requests_of
    monkeypatch.setattr(server_module, "requests_of", lambda frame: frames.append(frame) or requests_of(frame))

    async def use(sampler: ProcessSampler) -> None:
        await sampler.load(small(1))
        names = [f"{number}" for number in range(200)]

        async def ask(name: str) -> None:
            for _ in range(int(name) % 2):  # half of them come a turn of the event loop later
                await asyncio.sleep(0)
            await sampler.generate(asked(name))

        names.sort(key=lambda name: int(name) % 2)
        await asyncio.gather(*map(ask, names))
        await sampler.abort("7")
        await sampler.load(small(2))
        assert recorder.heard == [*names, "abort 7"]
        assert len(frames) == 1

    asyncio.run(with_client(order, use, opener=opens(recorder)))
    assert recorder.heard[-1] == "close"


def test_a_publication_is_not_written_under_one_that_is_being_read(order: LocalOrder) -> None:
    recorder = Recorder(load_seconds=0.2)

    async def use(sampler: ProcessSampler) -> None:
        await sampler.load(small(1))
        giving_up = asyncio.create_task(sampler.load(small(2)))
        await asyncio.sleep(0.05)
        giving_up.cancel()
        await sampler.load(small(3))
        assert sampler.version == 3

    asyncio.run(with_client(order, use, opener=opens(recorder)))
    assert recorder.heard == ["close"]


def test_a_publication_that_is_not_acknowledged_ends_the_process(order: LocalOrder) -> None:
    async def use(sampler: ProcessSampler) -> None:
        with pytest.raises(BackendError, match=r"did not take over publication 1 within 0.05 s"):
            await sampler.load(small(1), 0.05)

    asyncio.run(with_client(order, use, opener=opens(Recorder(load_seconds=0.4))))


def test_an_engine_that_breaks_in_the_middle_of_a_publication_is_stale(order: LocalOrder) -> None:
    recorder = Recorder()

    async def use(sampler: ProcessSampler) -> None:
        await sampler.load(small(1))

        async def broken(publication: Publication) -> None:
            raise RuntimeError("half of it")

        whole, recorder.load = recorder.load, broken  # type: ignore[method-assign]
        with pytest.raises(BackendError, match="half of it"):
            await sampler.load(small(2))
        with pytest.raises(BackendError, match="stale"):
            await sampler.generate(asked("a"))
        recorder.load = whole  # type: ignore[method-assign]
        await sampler.load(small(2))
        await sampler.generate(asked("b"))

    asyncio.run(with_client(order, use, opener=opens(recorder)))


def test_after_a_rest_it_is_stale_with_its_model_open(order: LocalOrder) -> None:
    recorder = Recorder()

    async def use(sampler: ProcessSampler) -> None:
        await sampler.load(small(2))
        await sampler.rest(10.0)
        with pytest.raises(BackendError, match="stale"):
            await sampler.generate(asked("a"))
        await sampler.load(small(1))
        await sampler.generate(asked("b"))

    asyncio.run(with_client(order, use, opener=opens(recorder)))


def test_warming_up_over_there_tells_how_far_it_is(order: LocalOrder) -> None:
    from temper.engine.local.warming import ExpectedRequests

    recorder, told = Recorder(), []
    expected = ExpectedRequests(
        num_rows=2, num_prompts=1, prompt_tokens=4, longest=9, params=SamplingParams(top_p=1 / 3)
    )

    async def use(sampler: ProcessSampler) -> None:
        await sampler.warm_up(expected, lambda done, total: told.append((done, total)))

    asyncio.run(with_client(order, use, opener=opens(recorder)))
    assert (told, recorder.heard[0]) == ([(0, 2)], f"warm_up {1 / 3}")
