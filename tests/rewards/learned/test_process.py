from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    PreTrainedTokenizerFast,
)

from temper.errors import UserError
from temper.rewards.learned.process import AGGREGATES, ProcessReward, Step, split_steps, turn_rewards
from temper.types import Message, Score, ScoreKind, Task, Trajectory

Say = Callable[[str], Trajectory]
TASK = Task(id="t:1", messages=(Message(role="user", content="abc"),))


TEMPLATE = "{% for m in messages %}{{ m['content'] }}:{% endfor %}{% if add_generation_prompt %};{% endif %}"


@pytest.fixture
def write_model(save_letter_model: Callable[..., Path]) -> Callable[..., Path]:
    return partial(save_letter_model, tokens=("<end>", *"abcdefghijklmnopqrstuvwxyz;: \n"), template=TEMPLATE)


def many_turns(say: Say, *texts: str, reply: str = "") -> Trajectory:
    replies = (Message(role="tool", content=reply),) if reply else ()
    turns = tuple(dataclasses.replace(say(text).turns[0], replies=replies) for text in texts)
    return dataclasses.replace(say(""), turns=turns)


def score(reward: ProcessReward, trajectory: Trajectory) -> Score:
    async def run() -> Score:
        scored = await reward.score(TASK, trajectory)
        await reward.close()
        return scored

    return asyncio.run(run())


def score_turns(reward: ProcessReward, trajectory: Trajectory) -> tuple[Score, list[float | None]]:
    async def run() -> tuple[Score, list[float | None]]:
        scored = await reward.score_turns(TASK, trajectory)
        await reward.close()
        return scored

    return asyncio.run(run())


def test_aggregates_worked_by_hand() -> None:
    steps = (0.9, 0.8, 0.7)
    assert AGGREGATES["min"](steps) == 0.7
    assert AGGREGATES["product"](steps) == pytest.approx(0.504)
    assert AGGREGATES["last"](steps) == 0.7
    assert AGGREGATES["last"]((0.1, 0.9)) == 0.9


def test_steps_are_what_stands_between_separators(say: Say) -> None:
    trajectory = many_turns(say, "a\n\nb\n\n\n\n", "", "c")
    assert split_steps(trajectory, "\n\n") == (Step("a", 0), Step("b", 0), Step("c", 2))
    assert split_steps(trajectory, "\n\n", per_turn=True) == (Step("a\n\nb", 0), Step("c", 2))


@pytest.mark.parametrize("num_labels", [1, 2])
@pytest.mark.parametrize("kind", [LlamaForTokenClassification, LlamaForSequenceClassification])
def test_a_model_is_read_at_the_end_of_each_separator(
    tmp_path: Path, write_model: Callable[..., Path], say: Say, kind: Any, num_labels: int
) -> None:
    folder = write_model(tmp_path, kind=kind, num_labels=num_labels)
    reward = ProcessReward(path=str(folder), aggregate="product")
    model = kind.from_pretrained(folder).eval()
    encode = PreTrainedTokenizerFast.from_pretrained(folder).encode
    ids = encode("abc:;one\n\ntwo x\n\nresult\n\nlast\n\n", add_special_tokens=False)
    ends = [len("abc:;one\n\n") - 1, len("abc:;one\n\ntwo x\n\n") - 1, len(ids) - 1]
    with torch.no_grad():
        logits = model.score(model.model(torch.tensor([ids])).last_hidden_state[0, ends])
    good = logits[:, 0].sigmoid() if num_labels == 1 else logits.softmax(-1)[:, 1]
    trajectory = many_turns(say, "one\n\ntwo x", "last", reply="result")
    assert score(reward, trajectory).value == pytest.approx(math.prod(good.tolist()), abs=1e-5)
    *steps, _ = reward.log.take()
    assert [record["value"] for record in steps] == pytest.approx(good.tolist(), abs=1e-5)


def test_a_judge_scores_each_step_with_what_came_before(server: Any, say: Say) -> None:
    seen = []

    def judge(texts: dict[str, str]) -> object:
        seen.append((texts["before"], texts["step"]))
        return {"score": {"a": 9, "b": 4, "c": 7}[texts["step"]]}

    server.answer = judge
    assert score(ProcessReward(**server.options()), say("a\n\nb\n\nc")) == Score.of(0.4)
    assert sorted(seen) == [("", "a"), ("a", "b"), ("a\n\nb", "c")]
    assert score(ProcessReward(**server.options(aggregate="last")), say("a\n\nb\n\nc")) == Score.of(0.7)


def test_a_step_without_a_score_leaves_none(server: Any, say: Say) -> None:
    server.answer = lambda texts: {"score": 10} if texts["step"] == "a" else {"score": "?"}
    assert score(ProcessReward(**server.options()), say("a\n\nb")).kind is ScoreKind.UNSCORABLE
    server.answer = lambda texts: {"score": 10} if texts["step"] == "a" else None
    assert score(ProcessReward(**server.options()), say("a\n\nb")).kind is ScoreKind.ERROR


def test_a_response_without_steps_is_worth_nothing(server: Any, say: Say) -> None:
    assert score(ProcessReward(**server.options()), say(" \n\n ")) == Score.of(0.0)


def test_turn_rewards_are_sums_of_steps_below_the_outcome() -> None:
    steps = (Step("a", 0), Step("b", 0), Step("c", 2))
    assert turn_rewards(steps, (0.1, 0.1, 0.2), 3) == [pytest.approx(0.2), None, pytest.approx(0.2)]
    capped = turn_rewards(steps, (1.0, 1.0, 1.0), 3)
    assert capped == [pytest.approx(1 / 3), None, pytest.approx(1 / 6)]
    many = turn_rewards((Step("x", 0),) * 100, (1.0,) * 100, 1)
    assert many == [pytest.approx(0.5)]
    assert turn_rewards((), (), 2) == [None, None]


def test_by_turn_each_step_is_asked_about_once_and_pays_its_turn(server: Any, say: Say) -> None:
    server.answer = lambda texts: {"score": {"a": 2, "b": 1, "c": 0, "d": 1}[texts["step"]]}
    reward = ProcessReward(**server.options(by_turn=True))
    assert reward.pays_turns
    assert not ProcessReward(**server.options()).pays_turns
    total, paid = score_turns(reward, many_turns(say, "a\n\nb", " ", "c\n\nd"))
    assert total == Score.of(0.0), "the least step, for the record"
    assert paid == [pytest.approx(0.3), None, pytest.approx(0.1)]
    assert len(server.asked) == 4
    assert score_turns(ProcessReward(**server.options(by_turn=True)), say(" ")) == (Score.of(0.0), [None])


def test_by_turn_a_step_without_a_score_pays_nothing_to_anyone(server: Any, say: Say) -> None:
    server.answer = lambda texts: {"score": 10} if texts["step"] == "a" else {"score": "?"}
    total, paid = score_turns(ProcessReward(**server.options(by_turn=True)), many_turns(say, "a", "b"))
    assert total.kind is ScoreKind.UNSCORABLE
    assert paid == []


def test_a_response_that_does_not_fit_the_model_is_unscorable(
    tmp_path: Path, write_model: Callable[..., Path], say: Say
) -> None:
    folder = write_model(tmp_path, kind=LlamaForTokenClassification, num_labels=2)
    assert score(ProcessReward(path=str(folder)), say("a" * 100)).kind is ScoreKind.UNSCORABLE


@pytest.mark.parametrize(
    "wrong", [{}, {"aggregate": "mean"}, {"separator": "", "base_url": "http://a", "model": "m"},
              {"path": "/no/such", "base_url": "http://a", "model": "m"}, {"path": "/no/such"},
              {"base_url": "http://a", "model": "m", "show_answer": True},
              {"base_url": "http://a", "model": "m", "device": "cuda"}]
)  # fmt: skip
def test_options_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        ProcessReward(**wrong)
