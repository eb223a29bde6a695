"""Credit by turn for agents, from HTTP to the advantage of each token: what comes later in time is what counts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from temper.batching import CreditRules, assign_credit, rows_of
from temper.models.tiny import character_tokenizer
from temper.objectives import resolve
from temper.protocols import Reward
from temper.rewards.composite import CompositeReward
from temper.types import Group, Message, Request, Score, Task, Trajectory
from tests.fakes.agents import play_agent
from tests.fakes.sampler import FakeSampler

TASK = Task(id="t", messages=(Message(role="user", content="ask"),), answer="42")
AGENT = """
import json, os, urllib.request

def ask(messages):
    body = json.dumps({"model": "any", "messages": messages}).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["choices"][0]["message"]

def solve(task):
    said = ask(task["messages"])
    ask([{"role": "user", "content": "helper"}])
    return ask([*task["messages"], said, {"role": "user", "content": "more"}])["content"]
"""
SAID = ({"ask": "1", "helper": "2", "more": "42"}, {"ask": "3", "helper": "5", "more": "41"})
"""What each member of the group says to what was asked last."""
PAID = {"1": 0.1, "2": 0.2, "42": 0.4, "3": 0.3, "5": 0.5, "41": 0.6}


class Right(Reward):
    name = "right"

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        return Score.of(float(trajectory.text == task.answer))


class Paying(Reward):
    name = "paying"
    pays_turns = True

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        raise AssertionError("it pays turns")

    async def score_turns(self, task: Task, trajectory: Trajectory) -> tuple[Score, Sequence[float | None]]:
        return Score.of(0.0), [PAID[turn.message.content] for turn in trajectory.turns]


def play(folder: Path, said: dict[str, str], *parts: Reward) -> Trajectory:
    tokenizer = character_tokenizer("abcdefghijklmnopqrstuvwxyz0123456789 ")
    path = folder / "agent.py"
    path.write_text(AGENT)

    def say(request: Request) -> list[int]:
        last = tokenizer.decode(request.prompt_ids).removesuffix("<|assistant|>").rpartition("<|user|>")[2]
        return [*tokenizer.encode(said[last]), tokenizer.eos_token_id]

    scorer = CompositeReward([(part, 1.0) for part in parts])
    return play_agent(TASK, FakeSampler(say), tokenizer, {"function": f"{path}:solve"}, scorer=scorer, seconds=60.0)


def advantages(folder: Path, objective: dict[str, Any], *parts: Reward) -> list[list[float]]:
    """Of each turn, as turns stand in the rows: the two of the conversation, then the helper's."""
    members = [play(folder, said, *parts) for said in SAID]
    for index, said in enumerate(SAID):
        told = [turn.message.content for turn in members[index].turns]
        assert told == [said["ask"], said["more"], said["helper"]], "the helper's row stands behind"
        assert members[index].turn_order == (0, 2, 1)
    members[1] = Trajectory(**{name: getattr(members[1], name) for name in Trajectory.__slots__} | {"index": 1})
    group = Group(id="g", draw=0, task=TASK, trajectories=tuple(members))
    rules = CreditRules(objective=resolve("dr_grpo", {"advantage": objective}), max_new_tokens=80)
    batch = assign_credit([row for one in members for row in rows_of(one)], [group], rules, version=0)
    found = []
    for member in members:
        rows = [row for update in batch.updates for row in update if row.index == member.index]
        assert len(rows) == 2
        drawn = [a for row in rows for a, is_drawn in zip(row.advantages, row.loss_mask, strict=True) if is_drawn]
        by_turn = []
        for turn in member.turns:
            own, drawn = drawn[: turn.completion.num_drawn], drawn[turn.completion.num_drawn :]
            assert len(set(own)) == 1, "tokens of a turn share its credit"
            by_turn.append(own[0])
        found.append(by_turn)
    return found


def test_turns_are_credited_by_what_they_and_later_ones_were_paid(tmp_path: Path) -> None:
    """In time: 0.1, 0.2, 0.4 and the outcome 1 for the last; 0.3, 0.5, 0.6 and 0. The helper came second, and what was
    paid after it is to its credit."""
    first, second = advantages(tmp_path, {"name": "turn_returns"}, Right(), Paying())
    assert first == pytest.approx([(1.7 - 1.4) / 2, (1.4 - 0.6) / 2, (1.6 - 1.1) / 2])
    assert second == pytest.approx([-value for value in first])
    own, _ = advantages(tmp_path, {"name": "turn_returns", "gamma": 0.0}, Right(), Paying())
    assert own == pytest.approx([(0.1 - 0.3) / 2, (1.4 - 0.6) / 2, (0.2 - 0.5) / 2]), "each by its own payment"


def test_states_that_two_agents_share_are_compared(tmp_path: Path) -> None:
    """The outcome is paid to the turn that came last. Returns in time 0.25, 0.5, 1, and zeros for the other; first
    calls and helpers saw the same, the second calls of the conversations did not."""
    first, second = advantages(tmp_path, {"name": "state_returns", "gamma": 0.5}, Right())
    assert first == pytest.approx([0.5 + 0.125, 0.5, 0.5 + 0.25])
    assert second == pytest.approx([-value for value in first])


def test_returns_to_go_are_the_outcome_wherever_a_turn_stands(tmp_path: Path) -> None:
    first, second = advantages(tmp_path, {"name": "returns_to_go"}, Right())
    assert (first, second) == ([1.0] * 3, [0.0] * 3)
