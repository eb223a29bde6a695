"""Over-sampling trains the first that finish and loses nobody: what is cut comes later, with its own random numbers."""

from __future__ import annotations

from typing import Any

import pytest

from temper.rollout.controls.late import LateRounds
from temper.simulate.clock import run_virtual
from tests.fakes.rolling import Flow, Run, train, train_with_kills
from tests.fakes.tail import TailSampler, heavy_tail


def run(controls: list[Any], steps: int = 24, **flow: Any) -> tuple[Run, TailSampler]:
    """A tenth of the groups is eight times as long as the others."""
    sampler = TailSampler(heavy_tail(0.1))

    async def work() -> Run:
        source = Flow(groups_per_step=8, controls=controls, **flow).open(sampler)
        return await train(source, sampler, range(1, steps + 1), train_seconds=2.0)

    return run_virtual(work()), sampler


def test_a_synchronous_run_with_a_heavy_tail_takes_two_thirds_of_the_time() -> None:
    plain, _ = run([], staleness=0, order="draw")
    cut, sampler = run([{"name": "oversample", "factor": 1.25}], staleness=0)
    assert cut.seconds < 0.67 * plain.seconds
    assert max(cut.ages) == 0, "what was cut is drawn anew"
    assert sampler.tokens_drawn < 1.15 * sum(cut.lengths), "what is thrown away"


def test_nobody_is_lost_or_favoured() -> None:
    """What is trained is what was offered but for those who wait, whose number is told; so are the lengths."""
    length_of = heavy_tail(0.1)
    cut, _ = run([{"name": "oversample", "factor": 1.25}], staleness=0)
    assert len(cut.trained) == len(set(cut.trained))
    offered = [length_of(f"{group.task.id}#{group.draw}") for batch in cut.batches for group in batch.groups]
    assert sorted(2 * offered) == sorted(cut.lengths), "a group that was cut has the answers it would have had"
    missing = set(range(max(cut.trained) + 1)) - set(cut.trained)
    assert len(missing) == cut.batches[-1].system["flow/overtaken"] <= 8 + 2
    ratios = [batch.system["flow/length_ratio"] for batch in cut.batches]
    assert min(ratios) < 0.7
    assert max(ratios) > 1.5, "a late step"


def test_one_that_was_cut_is_asked_for_by_the_same_name() -> None:
    _, sampler = run([{"name": "oversample", "factor": 1.25}], staleness=0)
    names = [request.id for request in sampler.requests]
    assert len(names) > len(set(names))


def test_late_steps_are_told_and_start_no_more_than_they_need() -> None:
    cut, _ = run([{"name": "oversample", "factor": 1.5}], staleness=0)
    late = [batch.system["flow/late_step"] for batch in cut.batches]
    assert late[:6] == [0, 0, 1, 0, 0, 1], "four of twelve are cut, and eight fill a step"
    assert sum(batch.system["flow/cut"] for batch in cut.batches[:3]) == 8
    assert cut.batches[2].system["flow/put_off"] == 0


@pytest.mark.parametrize("seed", range(3))
def test_kill_and_resume_lose_nobody(seed: int) -> None:
    control = {"name": "oversample", "factor": 1.5, "patience": 3}
    consumed, systems = run_virtual(train_with_kills(control, seed, steps=20))
    assert len(consumed) == len(set(consumed))
    assert len(set(range(max(consumed) + 1)) - set(consumed)) <= 4 + 2 * 2
    assert sum(system["flow/late_step"] for system in systems) >= 4, "a resume remembers who was put off"


def test_who_was_put_off_waits_for_so_many_steps_and_no_longer() -> None:
    rounds = LateRounds(groups_per_step=4, patience=3)
    rounds.begin(0)
    rounds.put_off(7)
    kinds = []
    for version in range(1, 5):
        rounds.begin(version)
        kinds.append(rounds.is_late)
    assert kinds == [False, False, True, True]
    assert rounds.may_start(7)
    assert not rounds.may_start(8), "who was put off goes first"
    rounds.started(7)
    assert rounds.may_start(8)


def test_those_put_off_are_remembered() -> None:
    rounds, again = (LateRounds(groups_per_step=2, patience=9) for _ in range(2))
    rounds.begin(5)
    rounds.put_off(3)
    rounds.put_off(1)
    again.load_state(rounds.state())
    again.begin(6)
    assert again.is_late
    assert [draw for draw in range(5) if again.may_start(draw)] == [1, 3]


def test_with_staleness_fewer_run_ahead_and_tokens_are_younger() -> None:
    everybody, _ = run([], staleness=4)
    half, _ = run([{"name": "oversample", "factor": 2.0}], staleness=4)
    assert sum(half.ages) / len(half.ages) < 0.6 * sum(everybody.ages) / len(everybody.ages)
    assert half.seconds < 1.15 * everybody.seconds
    assert "flow/cut" not in half.batches[0].system
