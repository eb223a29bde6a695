"""Rewards by turn, through the real loop: turns of one episode get the credit that they earned, whoever pays them."""

from __future__ import annotations

import asyncio
import copy
import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from temper import loop
from temper.build import build_stage, first_model, make_plan
from temper.commands.training.preflight import dry_run
from temper.config import RunConfig, resolve, to_toml
from temper.errors import BackendError, UserError
from temper.rewards.composite import CompositeReward
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
        return EnvReply(messages=(self.reply(message.content.strip()),), is_done=self.heard == 2)

    def reply(self, said):
        return Message(role="user", content="more")

    async def close(self):
        pass

class Tool(TwoTurns):
    'A call works when its first letter has an even place; silence is no call.'
    def reply(self, said):
        if not said:
            return super().reply(said)
        return Message(role="tool", content="error" if ord(said[0]) % 2 else "ok")
"""
DOCS = Path(__file__).parent.parent.parent / "docs" / "rewards.md"


class Batches:
    def __init__(self) -> None:
        self.taken: list[Batch] = []

    def append(self, report: StepReport, batch: Batch) -> None:
        self.taken.append(batch)

    def evaluation(self, result: EvaluationResult) -> None:
        pass


Make = Callable[..., RunConfig]


@pytest.fixture
def make_config(tiny_recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Two turns in an environment of that name, paid by that part beside an outcome."""
    (tmp_path / "two_turns_world.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("two_turns_world", None)

    def make(env: str, paying: dict[str, Any], **objective: Any) -> RunConfig:
        table = {key: copy.deepcopy(tiny_recipe[key]) for key in ("model", "train", "sampling")}
        table |= {"steps": 2, "env": {"name": f"two_turns_world:{env}"}, "reward": [{"kind": "edit"}, paying]}
        table["sampling"]["stop"] = list("abcdefghijklm")  # an untrained model seldom ends by itself
        table["rollout"] = {"groups_per_step": 4, "group_size": 4, "max_turns": 2}
        table["objective"] = objective
        return resolve(table, [], where="test")[0]

    return make


@pytest.fixture
def config(make_config: Make, server: Any) -> RunConfig:
    server.answer = lambda texts: {"score": grade(texts["step"])}
    process = {"kind": "process", "weight": WEIGHT, "options": server.options(per_turn=True, by_turn=True)}
    return make_config("TwoTurns", process, preset="dr_grpo", advantage="turn_returns")


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


Pay = Callable[[Trajectory], list[float]]


def process_pays(member: Trajectory) -> list[float]:
    """By hand: what each turn is paid for its steps, weighted."""
    said = [turn.message.content.strip() for turn in member.turns]
    graded = [grade(text) / 10 if text else 0.0 for text in said]
    scale = min(1.0, 0.5 / sum(graded)) if sum(graded) else 0.0
    return [WEIGHT * scale * share for share in graded]


def returns_of(member: Trajectory, pay: Pay) -> list[float]:
    """What each turn and all later ones earned."""
    earned = pay(member)
    earned[-1] += member.score.value or 0.0
    return [sum(earned[turn:]) for turn in range(len(earned))]


def require_credit_by_turn(batch: Batch, pay: Pay = process_pays) -> int:
    """Asserts the advantage of every token of a batch; returns how many members have turns with different ones."""
    rows = {(row.group_id, row.index): row for update in batch.updates for row in update}
    different = 0
    for group in batch.groups:
        expected = advantages_of(group, pay)
        for member, by_turn in zip(group.trainable, expected, strict=True):
            row = rows[member.group_id, member.index]
            drawn = [a for a, is_drawn in zip(row.advantages, row.loss_mask, strict=True) if is_drawn]
            lengths = [len(turn.completion.token_ids) for turn in member.turns]
            by_token = [a for a, length in zip(by_turn, lengths, strict=True) for _ in range(length)]
            assert drawn == pytest.approx(by_token, abs=1e-9)
            different += len(by_turn) == 2 and abs(by_turn[0] - by_turn[1]) > 0.01
    return different


def advantages_of(group: Group, pay: Pay) -> list[list[float]]:
    returns = [returns_of(member, pay) for member in group.trainable]
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
    honest = CompositeReward.score_turns

    async def unpaid(self: CompositeReward, task: Task, trajectory: Trajectory) -> Any:
        total, parts, _ = await honest(self, task, trajectory)
        return total, parts, []

    monkeypatch.setattr(CompositeReward, "score_turns", unpaid)
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


def from_docs(language: str) -> str:
    """The example of docs/rewards.md."""
    *_, text = re.findall(rf"^```{language}\n(.*?)^```", DOCS.read_text(), re.DOTALL | re.MULTILINE)
    return str(text)


@pytest.fixture
def own(make_config: Make, tmp_path: Path) -> RunConfig:
    """The recipe of the page, with its function in a file."""
    (tmp_path / "own_rewards.py").write_text(from_docs("python"))
    sys.modules.pop("own_rewards", None)
    recipe = tomllib.loads(from_docs("toml"))
    return make_config("Tool", recipe["reward"][1], **recipe["objective"])


def test_the_reward_of_the_page_pays_turns_and_credit_sees_it(own: RunConfig, tmp_path: Path) -> None:
    def pays(member: Trajectory) -> list[float]:
        # A turn that was cut got no reply.
        heard = [turn.message.content.strip() if turn.replies else "" for turn in member.turns]
        return [0.5 * (-0.1 if ord(text[0]) % 2 else 0.1) if text else 0.0 for text in heard]

    batches = train(own, tmp_path / "run")
    assert sum(require_credit_by_turn(batch, pays) for batch in batches) > 8
    members = [member for batch in batches for group in batch.groups for member in group.trajectories]
    assert all(member.score == member.score_parts["edit"] for member in members), "turns are paid beside the outcome"
    for member in members:
        assert (member.score_parts["working_calls"].value or 0) == pytest.approx(2 * sum(pays(member)))
    with pytest.raises(AssertionError):  # the mutation: what turns are paid must matter
        sum(require_credit_by_turn(batch, lambda member: [0.0] * len(member.turns)) for batch in batches)


def test_the_reward_of_the_page_is_refused_where_credit_would_lose_it(own: RunConfig, tmp_path: Path) -> None:
    wrong = own.model_copy(update={"objective": own.objective.model_copy(update={"advantage": None})})
    with pytest.raises(UserError, match="what it pays would be lost"):
        train(wrong, tmp_path / "run")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(to_toml([wrong]))
    with pytest.raises(UserError, match="what it pays would be lost"):
        dry_run(recipe)


def test_a_function_that_pays_other_turns_than_there_are_leaves_its_episodes_untrained(
    own: RunConfig, tmp_path: Path
) -> None:
    whole = from_docs("python").rstrip()
    (tmp_path / "own_rewards.py").write_text(f"{whole} + [0.1] * (turns[0]['response'] < 'e')\n")
    with pytest.raises(BackendError, match=r"episodes failed, .* payments for . turns"):
        train(own, tmp_path / "strict")
    patient = own.model_copy(update={"rollout": own.rollout.model_copy(update={"error_limit": 1.0})})
    members = [
        member
        for batch in train(patient, tmp_path / "run")
        for group in (*batch.groups, *(group for group, _ in batch.dropped))
        for member in group.trajectories
    ]
    wrong = [member for member in members if member.turns[0].message.content < "e"]
    assert 0 < len(wrong) < len(members)
    for member in wrong:
        count = len(member.turns)
        assert f"working_calls: {count + 1} payments for {count} turns" in str(member.score.reason)
    assert all(not member.is_trainable and member.turn_rewards == () for member in wrong)
