"""vLLM in sampler processes: two of them draw, hold what was published, end, are replaced, and leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from temper.cluster.samplers import start_sampler
from temper.commands.training import train as training
from temper.config import resolve
from temper.engine.digests import Digests
from temper.engine.fleet.fleet import Fleet, FleetSettings
from temper.engine.fleet.health import Standing
from temper.engine.process.weights import SharedWeights, anonymous_file
from temper.engine.vllm.order import VllmOrder
from temper.runs.reader import RunReader
from temper.types import Completion, Finish
from tests.engine.vllm.test_engine import gap, needs_vllm, publication, request, settings, tiny_model
from tests.engine.vllm.test_parallel import two_heads

pytestmark = needs_vllm
SECONDS = 900.0
"""Two engines start at once, on a machine that may have much to do: minutes, where it takes seconds alone."""


def offspring(pid: int) -> list[Any]:
    """All living processes below this one, but Python's own tracker of shared memory."""
    import psutil

    found = []
    for one in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has just ended, and may wait to be fetched
            if "tracker" not in " ".join(one.cmdline()):
                found.append(one)
    return found


def require_ended(processes: list[Any]) -> None:
    import psutil

    _, alive = psutil.wait_procs(processes, timeout=30)
    assert alive == []


class LiveFleet:
    def __init__(self, fleet: Fleet, runner: asyncio.Runner, told: list[str]) -> None:
        self.fleet, self.told, self._runner = fleet, told, runner

    def run(self, work: Awaitable[Any]) -> Any:
        async def bounded() -> Any:
            return await asyncio.wait_for(work, SECONDS)

        return self._runner.run(bounded())

    def pid(self, place: int) -> int:
        return self.fleet._places[place].sampler._process.pid  # type: ignore[attr-defined, no-any-return]

    async def until(self, is_true: Callable[[], bool]) -> None:
        while not is_true():
            await asyncio.sleep(0.05)

    async def until_both_are_ready(self) -> None:
        await self.until(lambda: all(place.health.standing is Standing.READY for place in self.fleet._places))

    async def draw(self, count: int, name: str, **params: Any) -> list[Completion]:
        asked = [request(f"{name} {n}", prompt=(5, 6, 7 + n), **params) for n in range(count)]
        return await asyncio.gather(*(self.fleet.generate(each) for each in asked))


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveFleet]:
    folder, told = tmp_path_factory.mktemp("model"), list[str]()
    tiny_model(0).save_pretrained(folder)
    order = VllmOrder(settings=settings(folder, max_running=8), num_threads=1).to_json()
    weights = SharedWeights(anonymous_file())
    fleet_settings = FleetSettings(max_restarts=3, silent_seconds=SECONDS, feeds_late=True)

    def start(place: int) -> Any:
        return start_sampler(order, weights, name=f"sampler {place}", environment={"OMP_NUM_THREADS": "1"})

    with asyncio.Runner() as runner:
        live = LiveFleet(runner.run(_made(start, fleet_settings, told, weights)), runner, told)
        live.run(live.fleet.load(publication(tiny_model(0), 1)))
        yield live
        processes = offspring(os.getpid())
        assert len(processes) == 6, "two samplers, and an engine and a rank of each"
        runner.run(live.fleet.close())
        require_ended(processes)


async def _made(start: Any, fleet_settings: FleetSettings, told: list[str], weights: SharedWeights) -> Fleet:
    return Fleet(start, 2, fleet_settings, note=told.append, closed=weights.close)


def test_both_draw_with_the_weights_of_the_last_publication_and_show_that_they_hold_them(live: LiveFleet) -> None:
    old, new = tiny_model(0), tiny_model(1)
    live.run(live.fleet.load(publication(new, 2)))
    drawn = live.run(live.draw(6, "both"))
    assert {version for each in drawn for version in each.versions} == {2}
    assert max(gap(new, each) for each in drawn) < 1e-4
    assert min(gap(old, each) for each in drawn) > 0.1, "the other weights would be noticed"
    assert live.run(live.fleet.differences()) == []
    unknown = [live.run(place.sampler.differences(Digests(), SECONDS)) for place in live.fleet._places]
    assert unknown == [sorted(dict(new.named_parameters()))] * 2, "each adds up every tensor"
    live.run(live.fleet.load(publication(new, 3)))
    assert live.fleet.stats()["decode_tokens"] > 0


@pytest.mark.parametrize("finish", [Finish.ABORT, Finish.INTERRUPT])
def test_a_request_that_is_ended_over_there_returns_what_was_drawn_so_far(live: LiveFleet, finish: Finish) -> None:
    async def scenario() -> Completion:
        end = live.fleet.abort if finish is Finish.ABORT else live.fleet.interrupt
        task = asyncio.create_task(live.fleet.generate(request("ended", max_new_tokens=240)))
        await asyncio.sleep(0.5)
        await end("ended")
        return await task

    assert live.run(scenario()).finish is finish


def test_requests_of_a_killed_sampler_are_drawn_elsewhere_and_its_engine_ends_with_it(live: LiveFleet) -> None:
    model, pid = tiny_model(1), live.pid(0)
    below = offspring(pid)
    assert len(below) == 2, "vLLM's engine and its rank"
    before = live.run(live.draw(6, "killed", max_new_tokens=100))

    async def scenario() -> list[Completion]:
        drawing = asyncio.create_task(live.draw(6, "killed", max_new_tokens=100))
        await asyncio.sleep(0.2)
        os.kill(pid, signal.SIGKILL)
        drawn = await drawing
        await live.until_both_are_ready()
        return drawn

    drawn = live.run(scenario())
    assert [len(each.token_ids) for each in drawn] == [100] * 6
    assert max(gap(model, each) for each in drawn) < 1e-4
    assert [each.token_ids for each in drawn] == [each.token_ids for each in before], "seeds are those of names"
    require_ended(below)
    assert any("sampler 0" in text and "killed by SIGKILL" in text for text in live.told)
    assert live.pid(0) != pid
    assert live.run(live.fleet.differences()) == [], "the new one was fed"


def test_a_sampler_ends_with_its_engine_and_is_replaced(live: LiveFleet) -> None:
    pid, model = live.pid(1), tiny_model(1)

    async def scenario() -> list[Completion]:
        drawing = asyncio.create_task(live.draw(6, "orphaned", max_new_tokens=100))
        await asyncio.sleep(0.2)
        for process in offspring(pid):
            process.kill()
        drawn = await drawing
        await live.draw(6, "after")
        await live.fleet.load(publication(model, 9))  # whoever was not asked finds it out now
        await live.until_both_are_ready()
        return drawn

    drawn = live.run(scenario())
    assert max(gap(model, each) for each in drawn) < 1e-4
    assert live.pid(1) != pid
    assert any("sampler 1" in text and "the engine is lost" in text for text in live.told)
    assert live.run(live.fleet.differences()) == []


def test_a_run_with_two_samplers_goes_on_when_one_is_killed_and_leaves_nothing_behind(
    tiny_recipe: dict[str, Any], tmp_path: Path
) -> None:
    before, run = {one.pid for one in offspring(os.getpid())}, tmp_path / "run"
    stage = {**tiny_recipe["stage"][1], "steps": 6, "evaluation": {"every": 6}}
    table = tiny_recipe | {
        "stage": [stage],
        "engine": {"kind": "vllm", "place": "process", "max_running": 64},
        "cluster": {"samplers": 2},
    }
    seen = list[Any]()
    killer = threading.Thread(target=_kill_one, args=(run, before, seen), daemon=True)
    killer.start()
    training.train_stages(resolve(table, ("model.new.width=64",), where="test"), run=run)
    killer.join(10)
    with RunReader(run) as reader:
        assert reader.is_finished
        restarts = [point.value for point in reader.metric("sys/sampler_restarts")]
    assert sum(restarts) == 1
    assert len(seen) == 6, "two samplers, and an engine and a rank of each"
    require_ended(seen)


def test_a_sampler_whose_vllm_has_two_ranks_shows_what_both_hold_and_is_replaced_with_them(tmp_path: Path) -> None:
    old, new = two_heads(0), two_heads(1)
    old.save_pretrained(tmp_path)
    order = VllmOrder(settings=settings(tmp_path, tensor_parallel=2), num_threads=1).to_json()
    weights, told = SharedWeights(anonymous_file()), list[str]()
    fleet_settings = FleetSettings(max_restarts=1, silent_seconds=SECONDS, feeds_late=True)

    def start(place: int) -> Any:
        return start_sampler(order, weights, name="the sampler", environment={"OMP_NUM_THREADS": "1"})

    async def scenario() -> None:
        fleet = Fleet(start, 1, fleet_settings, note=told.append, closed=weights.close)
        try:
            await fleet.load(publication(new, 1))
            (place,) = fleet._places
            below = offspring(place.sampler._process.pid)  # type: ignore[attr-defined]
            ranks = [one for one in below if "Worker" in one.cmdline()[0]]
            assert len(ranks) == 2
            drawn = await fleet.generate(request("both", max_new_tokens=24))
            assert gap(new, drawn) < 1e-4
            assert gap(old, drawn) > 0.1, "the other weights would be noticed"
            assert await fleet.differences() == [], "what both ranks hold, put together, is what was published"
            ranks[1].kill()
            again = await fleet.generate(request("both", max_new_tokens=24))
            assert gap(new, again) < 1e-4
            require_ended(below)
            assert any("the engine is lost" in text for text in told)
        finally:
            await fleet.close()

    asyncio.run(asyncio.wait_for(scenario(), SECONDS))


def _kill_one(run: Path, before: set[int], seen: list[Any]) -> None:
    """After the first step."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        if list(run.glob("checkpoints/*/step-2")):
            own = [one for one in offspring(os.getpid()) if one.pid not in before]
            samplers = [one for one in own if "sampler_main" in " ".join(one.cmdline())]
            seen += own
            samplers[0].kill()
            return
        time.sleep(0.01)
