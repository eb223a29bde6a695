"""SGLang servers in a fleet: what one that is lost was asked, others answer; one that comes back is fed first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from temper.engine.fleet import fleet as fleet_module
from temper.engine.fleet.fleet import Fleet, FleetSettings
from temper.engine.fleet.member import SamplerLost
from temper.engine.sglang import checkpoints as checkpoints_module
from temper.engine.sglang import engine as engine_module
from temper.engine.sglang import member as member_module
from temper.engine.sglang.checkpoints import Checkpoints
from temper.engine.sglang.engine import SglangSettings
from temper.engine.sglang.member import SglangMember
from temper.errors import BackendError, ContextFull, TaskError, UserError
from temper.types import Completion, Publication, Request, SamplingParams


def request(name: str, prompt: tuple[int, ...], **params: Any) -> Request:
    return Request(id=name, prompt_ids=prompt, params=SamplingParams(**{"max_new_tokens": 8, **params}))


class Servers:
    """Some of them, and the fleet that asks them."""

    def __init__(self, world: Any, num: int, **options: Any) -> None:
        silent = {"silent_seconds": options.pop("silent_seconds", 10.0)}
        start = {"start_seconds": options.pop("start_seconds", 20.0)}
        self.world, self.options = world, options
        self.up = [world.Server(world.checkpoint, **options) for _ in range(num)]
        self.notes: list[str] = []
        self._settings = SglangSettings(control_seconds=silent["silent_seconds"], **start)
        self._fleet_settings = FleetSettings(max_restarts=3, feeds_late=True, **silent)

    def open(self) -> None:
        checkpoints = Checkpoints(like=self.world.checkpoint, folder=self.world.weights_folder)
        addresses = [server.address for server in self.up]
        self.fleet = Fleet(
            lambda place: SglangMember(addresses[place], self._settings, checkpoints),
            len(addresses),
            self._fleet_settings,
            note=self.notes.append,
            closed=checkpoints.close,
        )

    async def publish(self, version: int) -> None:
        await self.fleet.load(Publication(version=version, tensors=self.world.tensors(version)))

    async def start_anew(self, place: int) -> Any:
        """Another process at the same address, with the weights that it is started with."""
        port = self.up[place].port
        await self.up[place].stop()
        self.up[place] = self.world.Server(self.world.checkpoint, **self.options)
        self.up[place].port = port
        await self.up[place].__aenter__()
        return self.up[place]

    async def until(self, is_true: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not is_true():
                await asyncio.sleep(0.01)

    def drawn_by(self, place: int, prompt: tuple[int, ...]) -> list[tuple[int, ...]]:
        """What the server was asked to go on with, of all that begins with this prompt."""
        asked = [tuple(body["input_ids"]) for body in self.up[place].bodies("/generate")]
        return [ids for ids in asked if ids[: len(prompt)] == prompt]

    def has_right_logprobs(self, completion: Completion) -> bool:
        """Each token's, by the weights of its version."""
        context, found = list(completion.prompt_ids), []
        for token, version in zip(completion.token_ids, completion.versions, strict=True):
            logits = self.world.logits(self.world.tensors(version), context).astype(np.float64)
            found.append(float(logits[token] - np.logaddexp.reduce(logits)))
            context.append(token)
        return completion.logprobs == pytest.approx(found, abs=1e-5)


@asynccontextmanager
async def serving(world: Any, num: int, **options: Any) -> AsyncIterator[Servers]:
    servers = Servers(world, num, **options)
    for server in servers.up:
        await server.__aenter__()
    servers.open()
    try:
        yield servers
    finally:
        await servers.fleet.close()
        for server in servers.up:
            await server.stop()


def play(world: Any, num: int, use: Callable[[Servers], Awaitable[None]], **options: Any) -> Servers:
    async def run() -> Servers:
        async with asyncio.timeout(60), serving(world, num, **options) as servers:
            await use(servers)
        return servers

    servers = asyncio.run(run())
    assert not world.weights_folder.exists(), "nothing is left of what was published"
    return servers


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_module, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(engine_module, "END_SECONDS", 0.2)
    monkeypatch.setattr(fleet_module, "PING_SECONDS", 0.05)


PROMPTS = [(5, 9, 33, place) for place in range(2, 8)]


def test_the_requests_of_a_group_go_to_one_server_and_groups_to_all(sglang: Any) -> None:
    async def use(servers: Servers) -> None:
        await servers.publish(1)
        requests = [request(f"{prompt} {n}", prompt) for prompt in PROMPTS for n in range(4)]
        drawn = await asyncio.gather(*(servers.fleet.generate(each) for each in requests))
        assert all(servers.has_right_logprobs(completion) for completion in drawn)
        counts = [[len(servers.drawn_by(place, prompt)) for place in range(2)] for prompt in PROMPTS]
        assert {tuple(sorted(each)) for each in counts} == {(0, 4)}
        assert {each.index(4) for each in counts} == {0, 1}

    assert play(sglang, 2, use).notes == []


def test_what_a_server_that_dies_was_drawing_the_other_goes_on_with_once_behind_what_was_told(sglang: Any) -> None:
    async def use(servers: Servers) -> None:
        await servers.publish(1)
        requests = [request(str(prompt), prompt, max_new_tokens=60, top_logprobs=2) for prompt in PROMPTS]
        asking = [asyncio.create_task(servers.fleet.generate(each)) for each in requests]
        first, _ = servers.up
        await servers.until(lambda: len(first.jobs) == 3 and all(job.sent >= 32 for job in first.jobs.values()))
        moved = [prompt for prompt in PROMPTS if servers.drawn_by(0, prompt)]
        await first.stop()
        drawn = dict(zip(PROMPTS, await asyncio.gather(*asking), strict=True))
        assert len(moved) == 3
        for prompt, completion in drawn.items():
            assert (completion.prompt_ids, completion.versions) == (prompt, [1] * 60)
            assert servers.has_right_logprobs(completion)
            assert completion.top_ids is not None
            assert [len(row) for row in completion.top_ids] == [2] * 60
            (asked,) = servers.drawn_by(1, prompt)
            told = asked[len(prompt) :]
            assert bool(told) == (prompt in moved)
            assert completion.token_ids[: len(told)] == list(told)
            assert len(servers.drawn_by(0, prompt)) == (prompt in moved), "nobody asks the dead again"
        counts = servers.fleet.stats()
        assert (counts["reissued"], counts["rescued"]) == (3, 3 * 32)

    (note,) = play(sglang, 2, use, seconds_per_token=0.005).notes
    assert "dropped the connection in mid-answer" in note
    assert note.endswith("3 requests go to another")


def test_an_answer_that_had_come_to_its_end_when_the_connection_broke_is_not_asked_again(sglang: Any) -> None:
    async def use(servers: Servers) -> None:
        await servers.publish(1)
        for server in servers.up:
            server.faults.add("drops_behind_the_end")
        drawn = await servers.fleet.generate(request("a", PROMPTS[0]))
        assert len(drawn.token_ids) == 8
        assert [len(servers.drawn_by(place, PROMPTS[0])) for place in range(2)] == [1, 0]

    assert play(sglang, 2, use).notes == []


def test_a_server_that_comes_back_gets_no_request_before_it_was_fed_what_the_others_have(sglang: Any) -> None:
    async def use(servers: Servers) -> None:
        await servers.publish(1)
        await servers.up[0].stop()
        await servers.publish(2)  # which the one that is gone does not hold up
        assert servers.fleet.version == 2
        assert servers.fleet.stats()["samplers"] == 1
        again = await servers.start_anew(0)
        again.may_update.clear()
        await servers.until(lambda: bool(again.bodies("/update_weights_from_disk")))
        requests = [request(str(prompt), prompt) for prompt in PROMPTS]
        drawn = await asyncio.gather(*(servers.fleet.generate(each) for each in requests))
        assert [len(servers.drawn_by(1, prompt)) for prompt in PROMPTS] == [1] * 6
        assert not any(servers.drawn_by(0, prompt) for prompt in PROMPTS)
        again.may_update.set()
        await servers.until(lambda: servers.fleet.stats()["samplers"] == 2)
        more = [request(f"more {prompt}", (*prompt, 1)) for prompt in PROMPTS]
        drawn += await asyncio.gather(*(servers.fleet.generate(each) for each in more))
        assert any(servers.drawn_by(0, (*prompt, 1)) for prompt in PROMPTS)
        assert all(completion.versions == [2] * 8 and servers.has_right_logprobs(completion) for completion in drawn)

    play(sglang, 2, use)


def test_a_server_that_was_started_anew_while_nobody_asked_is_found_and_fed(sglang: Any) -> None:
    async def use(servers: Servers) -> None:
        await servers.publish(1)
        again = await servers.start_anew(0)
        await servers.until(lambda: again.weight_version.startswith("version-1-"))
        await servers.until(lambda: servers.fleet.stats()["samplers"] == 2)

    (note,) = play(sglang, 2, use).notes
    assert "serves 'default' in place of 'version-1-" in note


def test_a_server_of_which_a_proxy_answers_404_is_lost_while_nobody_asks_it_for_tokens(sglang: Any) -> None:
    async def use(servers: Servers) -> None:
        await servers.publish(1)
        answer = servers.up[0]._control

        async def refuse(path: str, body: Any) -> tuple[int, Any]:
            return (404, "no such upstream") if path == "/server_info" else await answer(path, body)

        servers.up[0]._control = refuse
        await servers.until(lambda: servers.fleet.stats()["samplers"] == 1)

    assert "refused (404)" in play(sglang, 2, use).notes[0]


def test_no_token_of_a_server_that_was_started_anew_counts_when_it_is_asked_before_it_is_found(
    sglang: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "PING_SECONDS", 60.0)

    async def use(servers: Servers) -> None:
        await servers.publish(1)
        await servers.start_anew(0)
        drawn = await servers.fleet.generate(request("a", PROMPTS[0]))
        assert servers.drawn_by(0, PROMPTS[0]), "it was asked first"
        assert drawn.versions == [1] * 8
        assert servers.has_right_logprobs(drawn)

    (note,) = play(sglang, 2, use).notes
    assert "drew by weights 'default'" in note
    assert "it was started anew" in note


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize(
    ("fault", "match"),
    [
        ("refuses_update", r"refused \(400\)"),
        ("no_acknowledgement", "did not acknowledge version-2"),
        ("partial_update", "arrived in part: lm_head.weight"),
        ("wrong_version", "says that it serves 'version-1"),
    ],
)
def test_a_publication_that_one_server_does_not_take_over_as_it_is_fails(
    sglang: Any, place: int, fault: str, match: str
) -> None:
    async def use(servers: Servers) -> None:
        await servers.publish(1)
        servers.up[place].faults.add(fault)
        with pytest.raises(BackendError, match=match) as raised:
            await servers.publish(2)
        assert raised.type is BackendError, "it is not lost"
        assert servers.up[place].address in str(raised.value) or fault == "partial_update"
        assert servers.fleet.version == 1

    assert play(sglang, 2, use).notes == []


def test_a_server_that_dies_while_it_takes_weights_over_is_lost_and_its_requests_wait_for_nobody(sglang: Any) -> None:
    async def use(servers: Servers) -> None:
        await servers.publish(1)
        requests = [request(str(prompt), prompt, max_new_tokens=60) for prompt in PROMPTS]
        asking = [asyncio.create_task(servers.fleet.generate(each)) for each in requests]
        first, _ = servers.up
        await servers.until(lambda: len(first.jobs) == 3)
        first.may_update.clear()
        publishing = asyncio.create_task(servers.publish(2))
        await servers.until(lambda: len(first.bodies("/update_weights_from_disk")) == 2)
        await first.stop()
        await publishing
        for completion in await asyncio.gather(*asking):
            assert len(completion.token_ids) == 60
            assert completion.versions[-1] == 2
            assert servers.has_right_logprobs(completion)
        first.may_update.set()

    play(sglang, 2, use, seconds_per_token=0.005)


def test_a_publication_is_written_once_for_all_servers_and_those_that_come_back(
    sglang: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, write = list[int](), checkpoints_module.write_checkpoint

    def count(publication: Publication, **more: Any) -> Any:
        written.append(publication.version)
        return write(publication, **more)

    monkeypatch.setattr(checkpoints_module, "write_checkpoint", count)

    async def use(servers: Servers) -> None:
        await servers.publish(1)
        tensors = sglang.tensors(2)
        await servers.fleet.load(Publication(version=2, tensors=tensors))
        for tensor in tensors.values():
            tensor += 1  # what the trainer does next
        again = await servers.start_anew(1)
        await servers.until(lambda: again.weight_version.startswith("version-2-"))
        await servers.until(lambda: servers.fleet.stats()["samplers"] == 2)
        paths = [[body["model_path"] for body in server.bodies("/update_weights_from_disk")] for server in servers.up]
        assert paths[1] == paths[0][1:]
        assert await servers.fleet.differences() == []
        assert written == [1, 2]
        assert [folder.name[:9] for folder in sglang.weights_folder.iterdir()] == ["version-2"]

    play(sglang, 2, use)


def test_a_server_that_holds_other_numbers_than_were_published_is_named_when_somebody_asks(sglang: Any) -> None:
    async def use(servers: Servers) -> None:
        await servers.publish(1)
        assert await servers.fleet.differences() == []
        servers.up[1].tensors["lm_head.weight"] = servers.up[1].tensors["lm_head.weight"] + 1
        assert await servers.fleet.differences() == [f"lm_head.weight of SGLang at {servers.up[1].address}"]
        for server in servers.up:
            server.faults.add("no_export")
        assert await servers.fleet.differences() == [], "nobody can tell"

    play(sglang, 2, use)


def test_a_request_that_fails_by_itself_costs_no_server(sglang: Any) -> None:
    async def use(servers: Servers) -> None:
        await servers.publish(1)
        with pytest.raises(ContextFull):
            await servers.fleet.generate(request("long", (3,) * 128))
        for server in servers.up:
            server.refusal = 400
        with pytest.raises(TaskError, match=r"refused \(400\): not this one"):
            await servers.fleet.generate(request("refused", PROMPTS[0]))
        assert servers.fleet.stats()["samplers"] == 2

    assert play(sglang, 2, use).notes == []


def test_a_server_that_breaks_over_a_request_is_lost_and_another_answers_it(sglang: Any) -> None:
    async def use(servers: Servers) -> None:
        await servers.publish(1)
        servers.up[0].refusal = 503
        drawn = await servers.fleet.generate(request("a", PROMPTS[0]))
        assert len(drawn.token_ids) == 8
        assert len(servers.drawn_by(0, PROMPTS[0])) == len(servers.drawn_by(1, PROMPTS[0])) == 1

    assert "refused (503)" in play(sglang, 2, use).notes[0]


def test_a_server_that_falls_silent_is_lost_and_what_it_drew_goes_on_elsewhere(sglang: Any) -> None:
    async def use(servers: Servers) -> None:
        await servers.publish(1)
        first = servers.up[0]
        first.seconds_per_token = 30.0
        asking = asyncio.create_task(servers.fleet.generate(request("a", PROMPTS[0])))
        await servers.until(lambda: bool(first.jobs))
        first.faults |= {"/server_info", "/abort_request"}
        drawn = await asking
        assert len(drawn.token_ids) == 8
        assert servers.drawn_by(1, PROMPTS[0]) == [PROMPTS[0]]

    assert "/server_info did not answer within 2 s" in play(sglang, 2, use, silent_seconds=2.0).notes[0]


def test_a_server_with_wrong_settings_is_the_users_mistake_and_not_lost(sglang: Any) -> None:
    async def use(servers: Servers) -> None:
        servers.up[1].settings["allow_auto_truncate"] = True
        with pytest.raises(UserError, match=rf"{servers.up[1].address} .*--allow-auto-truncate"):
            await servers.publish(1)

    assert play(sglang, 2, use).notes == []


def test_a_server_that_comes_up_late_is_waited_for(sglang: Any) -> None:
    async def use(servers: Servers) -> None:
        await servers.up[0].stop()
        publishing = asyncio.create_task(servers.publish(1))
        await asyncio.sleep(1.0)  # longer than one call tries
        await servers.start_anew(0)
        await publishing
        assert (await servers.fleet.generate(request("a", PROMPTS[0]))).versions == [1] * 8

    assert play(sglang, 1, use).notes == []


def test_a_server_that_was_left_paused_draws_again(sglang: Any) -> None:
    async def use(servers: Servers) -> None:
        servers.up[0].is_paused = True
        await servers.publish(1)
        assert (await servers.fleet.generate(request("a", PROMPTS[0]))).versions == [1] * 8

    assert play(sglang, 1, use, silent_seconds=5.0, start_seconds=1.0).notes == []


def test_with_no_server_left_the_run_ends_and_says_how_each_ended(sglang: Any) -> None:
    async def use(servers: Servers) -> None:
        await servers.publish(1)
        for server in servers.up:
            await server.stop()
        with pytest.raises(SamplerLost, match=r"after 3 restarts each: .*cannot be reached.*nothing for 0\.1 s"):
            await servers.fleet.generate(request("a", PROMPTS[0]))

    play(sglang, 2, use, start_seconds=0.1)


def test_after_a_rest_nothing_is_drawn_before_the_servers_were_fed_anew(sglang: Any) -> None:
    async def use(servers: Servers) -> None:
        await servers.publish(5)
        await servers.fleet.rest()
        with pytest.raises(BackendError, match="stale"):
            await servers.fleet.generate(request("early", PROMPTS[0]))
        await servers.publish(3)
        drawn = await servers.fleet.generate(request("a", PROMPTS[0]))
        assert drawn.versions == [3] * 8
        assert servers.has_right_logprobs(drawn)

    assert play(sglang, 2, use).notes == []
