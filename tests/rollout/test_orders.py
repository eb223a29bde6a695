"""Groups may be trained as they finish: nobody is too old, nobody starves, nobody is favoured."""

from __future__ import annotations

import asyncio
import heapq
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from temper.errors import BackendError
from temper.rollout.buffer import Buffer
from temper.simulate.clock import run_virtual
from tests.fakes.fairness import TASKS, UNFAIR, chi_square
from tests.fakes.rolling import Flow, Run, train
from tests.fakes.tail import TailSampler, heavy_tail
from tests.rollout.test_buffer import Simulation, group, lines_per_group


@settings(max_examples=100)
@given(
    st.integers(0, 10**6),
    st.integers(1, 4),
    st.integers(1, 5),
    st.sampled_from([0.0, 0.3, 0.7]),
    st.booleans(),
)
def test_finished_groups_are_never_too_old_and_each_is_consumed_once(
    seed: int, staleness: int, groups_per_step: int, drop_share: float, has_stubborn: bool
) -> None:
    simulation = Simulation(
        seed=seed, staleness=staleness, groups_per_step=groups_per_step, drop_share=drop_share, order="finished",
        stubborn=3 if has_stubborn else 0,
    )  # fmt: skip
    asyncio.run(simulation.run())
    assert max(simulation.ages) <= staleness
    seen = [g.draw for taken in simulation.trained for g in taken.groups]
    seen += [g.draw for taken in simulation.trained for g, _ in taken.dropped]
    assert len(seen) == len(set(seen)), "nothing is consumed twice"
    assert all(len(taken.groups) == groups_per_step for taken in simulation.trained)
    left = set(range(max(seen) + 1)) - set(seen)
    assert len(left) <= (staleness + 1) * groups_per_step, "who is not consumed is under way"


def test_a_slow_group_holds_nobody_up() -> None:
    """The bound is 4, nine of ten are finished and two are needed: in draw order the first draw would be waited for."""

    async def run(order: str) -> list[list[int]]:
        buffer = Buffer(groups_per_step=2, max_staleness=4, max_rounds=10, order=order)  # type: ignore[arg-type]
        for draw in range(10):
            await buffer.start(draw)
        for draw in range(1, 10):
            await buffer.finish(group(draw, 0), None)
        taken = []
        for version in range(1, 5):
            taken.append([g.draw for g in (await buffer.take(0.01)).groups])
            await buffer.release(version)
        with pytest.raises(BackendError, match="1 groups running, 1 finished"):
            await buffer.take(0.01)  # now it is as late as the bound allows, and waited for
        await buffer.finish(group(0, 0), None)
        return [*taken, [g.draw for g in (await buffer.take(0.01)).groups]]

    assert asyncio.run(run("finished")) == [[1, 2], [3, 4], [5, 6], [7, 8], [0, 9]]
    with pytest.raises(BackendError, match="1 groups running, 9 finished"):
        asyncio.run(run("draw"))


def test_whoever_must_be_trained_now_goes_before_those_who_finished_earlier() -> None:
    async def run() -> tuple[list[int], bool]:
        buffer = Buffer(groups_per_step=2, max_staleness=1, max_rounds=10, order="finished")
        for draw in range(3):
            await buffer.start(draw)
        for draw in (1, 2):
            await buffer.finish(group(draw, 0), None)
        await buffer.take(0.01)
        await buffer.release(1)
        for draw in (3, 4):
            await buffer.start(draw)
            await buffer.finish(group(draw, 1), None)
        was_ready = buffer.is_ready
        await buffer.finish(group(0, 0), None)
        return [g.draw for g in (await buffer.take(0.01)).groups], was_ready

    assert asyncio.run(run()) == ([0, 3], False)


def test_a_first_token_that_had_to_wait_gives_its_group_more_time() -> None:
    """Started by version 0, drawn by version 1 alone: with a bound of 1 it need not be trained at version 1."""

    async def run(drawn_by: int) -> list[int]:
        buffer = Buffer(groups_per_step=1, max_staleness=1, max_rounds=10, order="finished")
        for draw in range(2):
            await buffer.start(draw)
        await buffer.finish(group(0, 0), None)
        await buffer.take(0.01)
        await buffer.release(1)
        await buffer.start(2)
        await buffer.finish(group(2, 1), None)
        await buffer.finish(group(1, drawn_by), None)
        return [g.draw for g in (await buffer.take(0.01)).groups]

    assert asyncio.run(run(0)) == [1]
    assert asyncio.run(run(1)) == [2]


def test_drops_count_while_a_late_group_is_waited_for_and_end_the_run_only_after_it() -> None:
    async def run(last: str | None) -> int:
        buffer = Buffer(groups_per_step=1, max_staleness=1, max_rounds=2, order="finished", version=0)
        await buffer.start(0)
        await buffer.start(1)
        await buffer.finish(group(1, 0), None)
        await buffer.take(0.01)
        await buffer.release(1)
        draw = 2
        while buffer.room > 0:
            await buffer.start(draw)
            await buffer.finish(group(draw, 1), "degenerate")
            draw += 1
        assert draw - 2 == 3, "one more than two rounds of one, and no more start"
        waiting = asyncio.ensure_future(buffer.take(5.0))
        await asyncio.sleep(0)
        assert not waiting.done()
        await buffer.finish(group(0, 0), last)
        return len((await waiting).dropped)

    assert asyncio.run(run(None)) == 3
    with pytest.raises(BackendError, match="4 degenerate"):
        asyncio.run(run("degenerate"))


def test_a_finished_group_costs_the_same_however_many_others_wait() -> None:
    assert lines_per_group(64, 4, "finished") <= 1.1 * lines_per_group(8, 4, "finished")


@dataclass
class Timed:
    """Steps on a clock: two of twenty tasks take eight times as long as the others, in every epoch."""

    order: Any
    staleness: int = 4
    seed: int = 0
    waited: float = 0.0
    ages: list[int] = field(default_factory=list)
    steps: list[list[int]] = field(default_factory=list)
    """Tasks that each step trained."""

    async def run(self, num_steps: int) -> Timed:
        random_, clock, running = random.Random(self.seed), 0.0, list[tuple[float, int, int]]()
        draws, num_started = list[int](), 0
        buffer = Buffer(groups_per_step=4, max_staleness=self.staleness, max_rounds=10, order=self.order)
        for version in range(num_steps):
            asked = clock
            while not buffer.is_ready:
                while buffer.room > 0:
                    if num_started == len(draws):
                        draws += random_.sample(range(TASKS), TASKS)
                    await buffer.start(num_started)
                    seconds = 64 if draws[num_started] < 2 else 8
                    heapq.heappush(running, (clock + seconds, num_started, version))
                    num_started += 1
                ended, draw, drawn_by = heapq.heappop(running)
                clock = max(clock, ended)
                await buffer.finish(group(draw, drawn_by), None)
            taken = await buffer.take(1.0)
            self.waited += clock - asked
            self.steps.append([draws[g.draw] for g in taken.groups])
            self.ages += [version - g.oldest_version for g in taken.groups]
            clock += 2.0
            await buffer.release(version + 1)
        return self


def test_a_trainer_waits_less_for_a_heavy_tail() -> None:
    draw, finished = (asyncio.run(Timed(order, staleness=8).run(60)) for order in ("draw", "finished"))
    assert finished.waited < 0.85 * draw.waited
    assert max(finished.ages) <= 8


def test_what_is_trained_is_distributed_as_what_was_offered() -> None:
    """Chi-square over runs where length goes with the prompt, without each run's beginning and end."""
    counts: Counter[int] = Counter()
    for seed in range(12):
        steps = asyncio.run(Timed("finished", seed=seed).run(40)).steps[10:35]
        counts.update(task for step in steps for task in step)
    assert chi_square(counts, range(TASKS)) < UNFAIR


def simulated(order: str, steps: int = 12) -> Run:
    sampler = TailSampler(lambda name: 64 if int(name[1:].split("#")[0]) < 2 else 8)

    async def work() -> Run:
        flow = Flow(order=order, staleness=4, num_tasks=TASKS)
        return await train(flow.open(sampler), sampler, range(1, steps + 1), train_seconds=2.0)

    return run_virtual(work())


def test_all_of_an_epoch_is_trained_before_long() -> None:
    """Of the draws up to the last, only those under way are missing; their number is bounded."""
    run = simulated("finished")
    missing = set(range(max(run.trained) + 1)) - set(run.trained)
    assert len(run.trained) == len(set(run.trained))
    assert len(missing) <= 4 * (4 + 1)


@pytest.mark.parametrize("order", ["draw", "finished"])
@pytest.mark.parametrize("seed", range(2))
def test_kill_and_resume_consume_every_draw_exactly_once(order: str, seed: int) -> None:
    """Also those that were trained before an earlier draw, and those that were dropped."""
    random_ = random.Random(seed)
    flow = Flow(
        order=order, staleness=random_.choice([1, 2, 4]), seed=seed, drops=lambda task: task.id.endswith(("3", "7"))
    )

    async def work() -> list[int]:
        sampler = TailSampler(heavy_tail(0.2))
        consumed, state, step = list[int](), None, 1
        while step < 16:
            source = flow.open(sampler, version=step - 1)
            if state is not None:
                source.load_state(state)
            until = step + random_.randrange(1, 5)
            run = await train(source, sampler, range(step, until), random_.uniform(0, 10))
            consumed += run.consumed
            state, step = run.state, until
        return consumed

    consumed = run_virtual(work())
    assert len(consumed) == len(set(consumed)), "a draw was consumed twice"
    missing = set(range(max(consumed) + 1)) - set(consumed)
    assert len(missing) <= 5 * 4, "only what was under way at the end is missing"
    assert (order == "finished") or not missing


def test_a_state_of_before_is_read() -> None:
    """Checkpoints without the list of consumed draws were trained in draw order."""
    flow = Flow()
    sampler = TailSampler(heavy_tail())

    async def work() -> tuple[Run, Run]:
        first = await train(flow.open(sampler), sampler, range(1, 4))
        old = {name: value for name, value in first.state.items() if name not in ("consumed draws", "recent lengths")}
        source = flow.open(sampler, version=3)
        source.load_state(old)
        return first, await train(source, sampler, range(4, 6))

    first, second = run_virtual(work())
    assert min(second.trained) == min(set(range(100)) - set(first.consumed))


def test_the_length_of_quick_steps_is_told() -> None:
    run = simulated("finished")
    ratios = [batch.system["flow/length_ratio"] for batch in run.batches]
    assert ratios[0] == 1.0
    assert min(ratios) < 0.8
    assert max(ratios) > 1.5
    assert max(batch.system["flow/overtaken"] for batch in run.batches) >= 1
    assert all(not batch.system for batch in simulated("draw", steps=3).batches)
