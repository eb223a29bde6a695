"""Tail batching: short steps are short, long ones do what was put off, and everybody is trained once."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from temper.rollout.controls.control import PutOff
from temper.rollout.controls.tail import ShortSampler, quantile_of
from temper.simulate.clock import run_virtual
from temper.types import Completion, Finish, Request, SamplingParams
from tests.fakes.rolling import Flow, Run, train, train_with_kills
from tests.fakes.tail import TailSampler, heavy_tail


def run(
    controls: list[Any], steps: int = 24, length_of: Callable[[str], int] = heavy_tail(0.1), **flow: Any
) -> tuple[Run, TailSampler]:
    sampler = TailSampler(length_of)

    async def work() -> Run:
        source = Flow(groups_per_step=8, staleness=0, controls=controls, **flow).open(sampler)
        return await train(source, sampler, range(1, steps + 1), train_seconds=2.0)

    return run_virtual(work()), sampler


def test_a_heavy_tail_takes_three_quarters_of_the_time_and_nobody_is_lost() -> None:
    plain, _ = run([], order="draw", steps=30)
    tail, sampler = run([{"name": "tail", "quantile": 0.8}], steps=30)
    assert tail.seconds < 0.75 * plain.seconds
    assert max(tail.ages) == 0
    assert sampler.tokens_drawn < 1.15 * sum(tail.lengths), "what is thrown away"
    assert len(tail.trained) == len(set(tail.trained))
    missing = set(range(max(tail.trained) + 1)) - set(tail.trained)
    assert len(missing) == tail.batches[-1].system["flow/put_off"] < 8
    length_of = heavy_tail(0.1)
    offered = [length_of(f"{group.task.id}#{group.draw}") for batch in tail.batches for group in batch.groups]
    assert sorted(2 * offered) == sorted(tail.lengths), "who was put off has the answers it would have had"


def test_short_steps_end_at_the_limit_and_long_ones_have_none() -> None:
    tail, _ = run([{"name": "tail", "quantile": 0.8}])
    kinds = {"short": 0, "long": 0}
    for batch in tail.batches[2:]:  # before them too little is known
        longest = max(t.num_tokens for group in batch.groups for t in group.trajectories)
        if batch.system["flow/late_step"]:
            kinds["long"] += 1
            assert "flow/tail_limit" not in batch.system
            assert longest > 16
        else:
            kinds["short"] += 1
            assert longest <= batch.system["flow/tail_limit"] <= 8
    assert kinds["long"] >= 2
    assert kinds["short"] >= 12


def test_the_limit_follows_all_lengths_and_does_not_shrink_with_what_it_lets_pass() -> None:
    """Lengths are uniform over 1 to 100: the quantile is 80, and stays there."""
    tail, _ = run(
        [{"name": "tail", "quantile": 0.8, "window": 64}], steps=30,
        length_of=lambda name: random.Random(name).randrange(1, 101), num_tasks=400,
    )  # fmt: skip
    limits = [batch.system["flow/tail_limit"] for batch in tail.batches[14:] if "flow/tail_limit" in batch.system]
    assert 65 < sum(limits) / len(limits) < 95


def test_answers_that_are_all_longer_than_of_late_fill_their_step() -> None:
    """Less than two steps' groups are put off, then nobody."""
    grown = {"length": 8}
    sampler = TailSampler(lambda name: grown["length"])

    async def work() -> Run:
        source = Flow(groups_per_step=4, staleness=0, controls=["tail"]).open(sampler)
        first = await train(source, sampler, range(1, 4))
        grown["length"] = 20
        source = Flow(groups_per_step=4, staleness=0, controls=["tail"]).open(sampler, version=3)
        source.load_state(first.state)
        return await train(source, sampler, range(4, 6))

    then = run_virtual(work())
    assert set(then.lengths) == {20}
    assert [batch.system["flow/late_step"] for batch in then.batches] == [0, 1]
    assert then.batches[0].system["flow/tail_limit"] == 8
    assert 4 <= then.batches[0].system["flow/cut"] < 8


@pytest.mark.parametrize("seed", range(2))
def test_kill_and_resume_lose_nobody(seed: int) -> None:
    control = {"name": "tail", "quantile": 0.7, "patience": 4}
    consumed, systems = run_virtual(train_with_kills(control, seed, steps=24))
    assert len(consumed) == len(set(consumed))
    assert len(set(range(max(consumed) + 1)) - set(consumed)) <= 8
    assert all("flow/tail_limit" in system or system["flow/late_step"] for system in systems[3:]), "lengths are kept"
    assert sum(system["flow/late_step"] for system in systems) >= 3, "and who was put off"


def short(limit: int, max_new_tokens: int, length: int) -> Completion:
    async def work() -> Completion:
        sampler = ShortSampler(TailSampler(lambda name: length), limit)
        params = SamplingParams(max_new_tokens=max_new_tokens, stop_ids=(1,))
        return await sampler.generate(Request(id="stage 0/t#0/0/0", prompt_ids=(5,), params=params))

    return run_virtual(work())


def test_only_an_answer_that_the_limit_cuts_is_put_off() -> None:
    with pytest.raises(PutOff, match="not complete after 10 tokens"):
        short(limit=10, max_new_tokens=50, length=11)
    exactly = short(limit=10, max_new_tokens=50, length=10)
    assert (exactly.finish, exactly.params) == (Finish.STOP, SamplingParams(max_new_tokens=50, stop_ids=(1,)))
    cut_anyway = short(limit=10, max_new_tokens=10, length=30)
    assert (cut_anyway.finish, len(cut_anyway.token_ids)) == (Finish.LENGTH, 10)


def test_a_quantile_is_a_length_that_occurred() -> None:
    lengths = deque([5, 1, 4, 2, 3])
    assert [quantile_of(lengths, share) for share in (0.2, 0.5, 0.8, 0.99)] == [1, 3, 4, 5]


def test_a_group_that_is_put_off_ends_all_of_its_requests() -> None:
    """The others would hold the sampler, and their names."""

    async def work() -> int:
        lengths = {"0": 8, "1": 64}
        sampler = TailSampler(lambda name: lengths[name], name_of=lambda request_id: request_id.split("/")[2])
        source = Flow(groups_per_step=2, staleness=0, controls=[{"name": "tail", "window": 4}]).open(sampler)
        (control,) = source._controls.all
        control.load_state({"draws": [], "versions": [], "lengths": [4, 4, 4, 4]})
        await source.start()
        await asyncio.sleep(4.5)  # all of the first are beyond 4 tokens and were put off
        running = len(sampler._running)
        await source.close()
        return running

    assert run_virtual(work()) == 4
