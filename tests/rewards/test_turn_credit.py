"""A process reward by turn, through the real loop: turns of one episode get the credit that their steps earned."""

from __future__ import annotations

import asyncio
import copy
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from temper import loop
from temper.build import build_stage, first_model, make_plan
from temper.commands.preflight import dry_run
from temper.config import RunConfig, resolve, to_toml
from temper.errors import UserError
from temper.rewards.rubric import Rubric
from temper.types import Batch, EvaluationResult, Group, Score, StepReport, Task, Trajectory

WEIGHT = 0.8
MODULE = """
from temper.protocols import EnvOpening, EnvReply
from temper.types import Message

class TwoTurns:
    'Asks for more once. Pays nothing: the outcome is found by a verifier.'
    def __init__(self):
        self.heard = 0

    async def start(self, task, seed):
        return EnvOpening(messages=task.messages)

    async def step(self, message):
        self.heard += 1
        return EnvReply(messages=(Message(role="user", content="more"),), is_done=self.heard == 2)

    async def close(self):
        pass
"""


class Batches:
    def __init__(self) -> None:
        self.taken: list[Batch] = []

    def append(self, report: StepReport, batch: Batch) -> None:
        self.taken.append(batch)

    def evaluation(self, result: EvaluationResult) -> None:
        pass


@pytest.fixture
def config(tiny_recipe: dict[str, Any], server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    (tmp_path / "two_turns_world.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("two_turns_world", None)
    server.answer = lambda texts: {"score": grade(texts["step"])}
    process = {"kind": "process", "weight": WEIGHT, "options": server.options(per_turn=True, by_turn=True)}
    table = {key: copy.deepcopy(tiny_recipe[key]) for key in ("model", "train", "sampling")}
    table |= {"steps": 2, "env": {"name": "two_turns_world:TwoTurns"}, "reward": [{"kind": "edit"}, process]}
    table["sampling"]["stop"] = list("abcdefghijklm")  # an untrained model seldom ends by itself
    table["rollout"] = {"groups_per_step": 4, "group_size": 4, "max_turns": 2}
    table["objective"] = {"preset": "dr_grpo", "advantage": "turn_returns"}
    return resolve(table, [], where="test")[0]


def grade(text: str) -> int:
    """What the judge says of a step, from 0 to 10."""
    return 7 * ord(text[0]) % 11


def train(config: RunConfig, folder: Path) -> list[Batch]:
    batches = Batches()
    folder.mkdir()

    async def go() -> None:
        stage = build_stage(config, 0, first_model(config, folder))
        await loop.run(make_plan(stage, first_step=1, recorders=(batches,), checkpoint=lambda step: None))
        await stage.close()

    asyncio.run(go())
    return batches.taken


def returns_of(member: Trajectory) -> list[float]:
    """By hand: what each turn and all later ones earned."""
    said = [turn.message.content.strip() for turn in member.turns]
    graded = [grade(text) / 10 if text else 0.0 for text in said]
    scale = min(1.0, 0.5 / sum(graded)) if sum(graded) else 0.0
    earned = [WEIGHT * scale * share for share in graded]
    earned[-1] += member.score.value or 0.0
    return [sum(earned[turn:]) for turn in range(len(earned))]


def require_credit_by_turn(batch: Batch) -> int:
    """Asserts the advantage of every token of a batch; returns how many members have turns with different ones."""
    rows = {(row.group_id, row.index): row for update in batch.updates for row in update}
    different = 0
    for group in batch.groups:
        expected = advantages_of(group)
        for member, by_turn in zip(group.trainable, expected, strict=True):
            row = rows[member.group_id, member.index]
            drawn = [a for a, is_drawn in zip(row.advantages, row.loss_mask, strict=True) if is_drawn]
            lengths = [len(turn.completion.token_ids) for turn in member.turns]
            by_token = [a for a, length in zip(by_turn, lengths, strict=True) for _ in range(length)]
            assert drawn == pytest.approx(by_token, abs=1e-9)
            different += len(by_turn) == 2 and abs(by_turn[0] - by_turn[1]) > 0.01
    return different


def advantages_of(group: Group) -> list[list[float]]:
    returns = [returns_of(member) for member in group.trainable]
    reached = [[own[turn] for own in returns if len(own) > turn] for turn in range(2)]
    return [[value - fmean(reached[turn]) for turn, value in enumerate(own)] for own in returns]


def test_turns_are_credited_by_what_their_steps_earned_and_the_outcome_once(
    config: RunConfig, server: Any, tmp_path: Path
) -> None:
    batches = train(config, tmp_path / "run")
    assert sum(map(require_credit_by_turn, batches)) > 8, "the test proves nothing when all turns earn alike"
    members = [member for batch in batches for group in batch.groups for member in group.trajectories]
    assert all(member.score == member.score_parts["edit"] for member in members), "turns are paid beside the outcome"
    assert {member.weighted_parts["process"] for member in members} == {Score.of(0.0)}
    # Those of the gate before the first step are asked about too.
    said = [turn.message.content for member in members for turn in member.turns if turn.message.content.strip()]
    assert len(said) <= len(server.asked) <= len(said) + 2 * 8


def test_credit_without_the_payments_is_not_credit_by_turn(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Rubric.score_turns

    async def unpaid(self: Rubric, task: Task, trajectory: Trajectory) -> Any:
        total, parts, _ = await honest(self, task, trajectory)
        return total, parts, []

    monkeypatch.setattr(Rubric, "score_turns", unpaid)
    with pytest.raises(AssertionError):
        sum(map(require_credit_by_turn, train(config, tmp_path / "run")))


def test_a_step_that_cannot_be_judged_leaves_its_episode_untrained(
    config: RunConfig, server: Any, tmp_path: Path
) -> None:
    server.answer = lambda texts: {"score": grade(texts["step"])} if grade(texts["step"]) > 3 else {"score": "?"}
    members = [
        member
        for batch in train(config, tmp_path / "run")
        for group in (*batch.groups, *(group for group, _ in batch.dropped))
        for member in group.trajectories
    ]
    silent = [member for member in members if "cannot be read" in str(member.score.reason)]
    assert 0 < len(silent) < len(members)
    assert all(not member.is_trainable and member.turn_rewards == () for member in silent)


def test_payments_that_no_credit_sees_are_refused_before_anything_is_trained(config: RunConfig, tmp_path: Path) -> None:
    wrong = config.model_copy(update={"objective": config.objective.model_copy(update={"advantage": None})})
    with pytest.raises(UserError, match=r'advantage group_mean .* Use objective\.advantage = "turn_returns"'):
        train(wrong, tmp_path / "run")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(to_toml([wrong]))
    with pytest.raises(UserError, match="what it pays would be lost"):
        dry_run(recipe)
