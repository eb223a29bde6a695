"""Groups that filled no step are explained by what happened to them, and the advice fits."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from temper.errors import BackendError
from temper.protocols import Reward
from temper.rewards.composite import CompositeReward
from temper.rollout.buffer import Buffer
from temper.rollout.drops import explain_drops, tell_drops
from temper.rollout.group import reason_to_drop
from temper.types import Completion, Finish, Group, Message, Score, Status, Task, Trajectory, Turn

TASK = Task(id="t", messages=(Message(role="user", content="?"),))
TURN = Turn(
    completion=Completion(prompt_ids=(1,), token_ids=[2], logprobs=[0.0], versions=[0], finish=Finish.STOP),
    message=Message(role="assistant", content="!"),
)


def member(
    score: Score, *, parts: dict[str, Score] | None = None, status: Status = Status.COMPLETED, error: str | None = None
) -> Trajectory:
    return Trajectory(
        task_id="t", group_id="g", index=0, turns=(TURN,), status=status, score=score, score_parts=parts or {},
        error=error,
    )  # fmt: skip


def dropped(*members: Trajectory, draw: int = 0) -> tuple[Group, str]:
    group = Group(id=f"g{draw}", draw=draw, task=TASK, trajectories=members)
    reason = reason_to_drop(group, min_members=2, drop_degenerate=True)
    assert reason is not None
    return group, reason


def broken_reward(draw: int = 0) -> tuple[Group, str]:
    part = Score.error("ZeroDivisionError: division by zero")
    score = Score.error(f"exact: {part.reason}")
    return dropped(*[member(score, parts={"exact": part, "format": Score.of(1.0)}) for _ in range(2)], draw=draw)


def test_equal_rewards_are_a_matter_of_difficulty() -> None:
    said = explain_drops([dropped(member(Score.of(0.0)), member(Score.of(0.0)))])
    assert "1 degenerate" in said
    assert "it was 0 for every answer" in said
    assert "2 answers to 1 prompts: 1 all wrong, 0 all right. Pass rates by prompt: 0% of 2 t" in said
    assert "easier tasks in [[train]]" in said
    assert "rollout.max_rounds bounds" in said
    assert "max_new_tokens" not in said
    mixed = explain_drops([dropped(member(Score.of(v)), member(Score.of(v))) for v in (0.0, 1.0)])
    assert "for every answer" not in mixed


def test_answers_without_room_to_be_right_are_told_of_the_key() -> None:
    cut, whole = (member(Score.of(0.0), status=status) for status in (Status.TRUNCATED_LENGTH, Status.COMPLETED))
    said = explain_drops([dropped(cut, cut), dropped(cut, whole)])
    assert "3 of 4 answers were cut at their length: a larger sampling.max_new_tokens" in said


@pytest.mark.parametrize("staleness", [0, 1, 4])
@pytest.mark.parametrize("is_slow", [False, True], ids=["in order", "behind a slow one"])
def test_data_without_any_signal_ends_after_bounded_work(staleness: int, is_slow: bool) -> None:
    """Whatever the staleness: as many groups as max_rounds says, once more behind a draw that holds them up, and those
    that run meanwhile."""
    per_step, rounds = 2, 3
    started = 0

    async def run() -> None:
        nonlocal started
        buffer = Buffer(groups_per_step=per_step, max_staleness=staleness, max_rounds=rounds)
        taking = asyncio.ensure_future(buffer.take(5.0))
        running: list[int] = []
        while not taking.done():
            for _ in range(buffer.room):
                await buffer.start(started)
                running.append(started)
                started += 1
            is_held = is_slow and buffer.room > 0 and len(running) > 1
            for draw in running[1:] if is_held else running[:]:  # the first runs as long as anything else may start
                running.remove(draw)
                await buffer.finish(*dropped(member(Score.of(0.0)), member(Score.of(0.0)), draw=draw))
            await asyncio.sleep(0)
        taking.result()

    with pytest.raises(BackendError, match=r"groups were rolled and dropped.*all wrong.*Pass rates by prompt: 0% of"):
        asyncio.run(run())
    assert per_step * rounds < started <= 2 * per_step * rounds + 2 * (staleness + 1) * per_step


def told_of(drops: list[list[bool]]) -> list[str]:
    """What is said while steps of two groups are filled. drops: whether each group of a step is dropped, in order."""
    said: list[str] = []

    async def run() -> None:
        buffer = Buffer(groups_per_step=2, max_staleness=0, max_rounds=20, tell=said.append)
        draw = 0
        for version, step in enumerate(drops):
            turn = replace(TURN, completion=replace(TURN.completion, versions=[version]))
            for is_dropped in step:
                await buffer.start(draw)
                scored = (member(Score.of(float(not is_dropped and place))) for place in range(2))
                members = tuple(replace(one, turns=(turn,)) for one in scored)
                whole = Group(id=f"g{draw}", draw=draw, task=TASK, trajectories=members)
                await buffer.finish(whole, reason_to_drop(whole, min_members=2, drop_degenerate=True))
                draw += 1
            await buffer.take(1.0)
            await buffer.release(version + 1)

    asyncio.run(run())
    return said


def test_a_step_that_finds_nothing_to_train_on_says_so_before_it_gives_up() -> None:
    said = told_of([[True] * 30 + [False] * 2])
    assert [line.partition(" ")[0] for line in said] == ["6", "12", "24"], "three steps' worth, then twice as many"
    assert said[0].startswith(
        "6 groups were dropped so far for the next step, and others drawn: 6 degenerate. Most prompts"
    )
    assert "easier tasks in [[train]]" in said[0]
    assert said[0].endswith(". The run ends when more than 40 are (rollout.max_rounds)")
    assert all("\n" not in line for line in said)


def test_drops_past_the_bound_are_not_told_to_be_below_it() -> None:
    """Behind a slow draw as many again are dropped."""
    said: list[str] = []

    async def run() -> None:
        buffer = Buffer(groups_per_step=1, max_staleness=9, max_rounds=5, tell=said.append)
        await buffer.start(0)
        for draw in range(1, 9):
            await buffer.start(draw)
            await buffer.finish(*dropped(member(Score.of(0.0)), member(Score.of(0.0)), draw=draw))

    asyncio.run(run())
    assert [line.partition(" ")[0] for line in said] == ["3"]


def test_a_run_that_drops_a_few_groups_in_every_step_is_not_told_in_every_step() -> None:
    assert told_of([[True, False] * 2] * 40) == []
    assert told_of([[True] * 5 + [False] * 2] * 40) == []
    assert len(told_of([[True] * 7 + [False] * 2] * 40)) == 1


def test_drops_that_are_not_for_difficulty_are_told_with_their_reason_and_no_advice_on_it() -> None:
    said = tell_drops([broken_reward()] * 3 + [dropped(member(Score.of(1.0)), member(Score.of(1.0)))], most=40)
    assert "3 too few scored members: exact: ZeroDivisionError: division by zero, 1 degenerate" in said
    assert "prompts" not in said


def test_a_verifier_that_fails_is_named_with_its_error_and_difficulty_is_not_blamed() -> None:
    said = explain_drops([broken_reward()])
    assert '2 x reward "exact": ZeroDivisionError: division by zero' in said
    assert "Mend that reward" in said
    assert "harder" not in said
    assert '"format"' not in said


def test_an_environment_that_fails_is_shown_with_its_error() -> None:
    failed = member(Score.error("tool_error: boom"), status=Status.TOOL_ERROR, error="ConnectionError: boom")
    said = explain_drops([dropped(failed, failed)])
    assert "2 x tool_error (ConnectionError: boom)" in said
    assert "Mend the environment" in said
    assert "harder" not in said


def test_the_most_frequent_cause_comes_first() -> None:
    equal = dropped(member(Score.of(1.0)), member(Score.of(1.0)))
    said = explain_drops([equal] * 3 + [broken_reward()])
    assert said.index("degenerate group") < said.index("could not be scored")
    said = explain_drops([equal] + [broken_reward()] * 3)
    assert said.index("could not be scored") < said.index("degenerate group")


def test_a_run_without_a_step_ends_with_the_reward_that_failed() -> None:
    async def run() -> None:
        buffer = Buffer(groups_per_step=1, max_staleness=0, max_rounds=2)
        for draw in range(3):
            await buffer.start(draw)
            await buffer.finish(*broken_reward(draw))
        await buffer.take(1.0)

    with pytest.raises(BackendError, match=r'3 groups were rolled and dropped.*reward "exact": ZeroDivisionError'):
        asyncio.run(run())


class Hanging(Reward):
    name = "judge"

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        await asyncio.sleep(60)
        raise AssertionError


def test_a_run_that_stands_still_in_a_reward_names_it() -> None:
    async def run() -> None:
        buffer = Buffer(groups_per_step=1, max_staleness=0, max_rounds=2)
        await buffer.start(0)
        scoring = asyncio.ensure_future(CompositeReward([(Hanging(), 1.0)]).score(TASK, member(Score.of(0.0))))
        await asyncio.sleep(0)
        try:
            await buffer.take(0.05)
        finally:
            scoring.cancel()
            await asyncio.wait({scoring}, timeout=5)

    with pytest.raises(BackendError, match=r'1 groups running.*wait for: 1 x reward "judge"'):
        asyncio.run(run())
