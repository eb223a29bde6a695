"""Guarantee: whatever a policy writes, no reward and no parser of tool calls keeps the event loop for more than a
second of processor time. The whole registry is tried; what runs elsewhere (workers, endpoints) is not counted."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from temper.envs.library.countdown import CountdownReward, countdown
from temper.envs.tool_calls import PARSERS, Call, parse
from temper.envs.tools import ArgumentsRefused, ToolSet, make_tool
from temper.rewards.code.code import find_program
from temper.rewards.form.instruction_checks import CHECKS, CHOICES
from temper.rewards.golden.degenerate import degenerate_texts
from temper.rewards.judges.judge import episode_text
from temper.rewards.judges.prompts import Unparsable, frame, parse_items, parse_score, parse_winner, score_prompt
from temper.rewards.learned.process import split_steps
from temper.rewards.registry import REWARDS, make_reward
from temper.types import Message, Task, Trajectory

BOUND_SECONDS = 1.0
WHOLE = list(degenerate_texts())
WORST = [WHOLE[i] for i in range(0, len(WHOLE), 9)]
"""Enough to notice a reward that forgot; the others are heavy."""
SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "string", "minLength": 3, "pattern": "^(a+)+$"}}})
OPTIONS: dict[str, dict[str, Any]] = {
    "format": {"pattern": "<think>.+</think>", "deadline_seconds": 1.0},
    "json_schema": {"schema": SCHEMA, "deadline_seconds": 1.0},
    "length": {"high": 10},
}
ELSEWHERE = {
    "judge": "judges", "pairwise": "judges", "rubric": "judges", "evolving_rubric": "judges", "process": "judges",
    "reward_model": "a model", "discriminator": "a model", "code": "the sandbox",
}  # fmt: skip
"""Rewards whose work is done by something else; the parts of it that are done here are tried below."""
TASK = Task(id="t:1", messages=(Message(role="user", content="What is 2 + 2?"),), answer="4")


def instructions() -> Iterator[Task]:
    """One task for each check, with arguments of the types that it takes."""
    samples = {"int": 3, "str": "word", "Sequence[str]": ["word", "a"]}
    for name, check in CHECKS.items():
        wanted = list(inspect.signature(check).parameters.items())[1:]
        given = {key: CHOICES[key][0] if key in CHOICES else samples[str(kind.annotation)] for key, kind in wanted}
        row = {"instruction_id_list": [name], "kwargs": [given]}
        yield Task(id=name, messages=(), answer=json.dumps(row))


def tool_calls(text: str) -> None:
    tools = ToolSet([make_tool(lookup), make_tool(lookup, name="a")])
    for call_format in PARSERS:
        for call in parse(text, call_format).calls:
            if isinstance(call, Call):
                with contextlib.suppress(ArgumentsRefused):
                    tools.bind(call)


def lookup(key: str, count: int = 1) -> str:
    """Looks up."""
    return key * count


def judging(text: str) -> None:
    frame(score_prompt("Judge.", 10), {"response": text}, "id", 16_000)
    said = Trajectory.saying("t:1", text)
    split_steps(said, "\n\n")
    episode_text(said)
    for read in (lambda reply: parse_score(reply, 10), parse_winner, lambda reply: parse_items(reply, 2)):
        for reply in (text, f"<think>{text}", f"```json\n{text}\n```", f"<score>{text}</score>"):
            with contextlib.suppress(Unparsable):
                read(reply)


def in_the_loop(reward: Any, tasks: list[Task]) -> Callable[[str], None]:
    def score(text: str) -> None:
        for task in tasks:
            asyncio.run(reward.score(task, Trajectory.saying(task.id, text)))

    return score


def work(name: str) -> Callable[[str], None]:
    if name in ("tool calls", "judging", "program"):
        return {"tool calls": tool_calls, "judging": judging, "program": lambda text: find_program(text)}[name]  # type: ignore[return-value]
    if name == "countdown":
        return in_the_loop(CountdownReward(), [countdown(0, 0)])
    if name == "math":
        pytest.importorskip("math_verify")
    reward = make_reward(name, OPTIONS.get(name, {}))
    return in_the_loop(reward, list(instructions()) if name == "ifeval" else [TASK])


NAMES = [*(name for name in REWARDS if name not in ELSEWHERE), "countdown", "tool calls", "judging", "program"]


def seconds_of(name: str, texts: list[tuple[str, str]]) -> dict[str, float]:
    """Processor time of this thread, by text. One instruction at a time counts, as one event of the loop does."""
    run, found = work(name), {}
    share = len(CHECKS) if name == "ifeval" else 1
    for title, text in texts:
        started = time.thread_time()
        run(text)
        found[title] = (time.thread_time() - started) / share
    return found


@pytest.mark.parametrize("name", NAMES)
def test_no_text_keeps_the_event_loop(name: str) -> None:
    assert {title: cost for title, cost in seconds_of(name, WORST).items() if cost > BOUND_SECONDS} == {}


@pytest.mark.heavy
@pytest.mark.parametrize("name", NAMES)
def test_no_text_of_the_whole_rule_keeps_the_event_loop(name: str) -> None:
    assert {title: cost for title, cost in seconds_of(name, WHOLE).items() if cost > BOUND_SECONDS} == {}


if __name__ == "__main__":
    print(f"{len(WHOLE)} texts of 32,000 characters; milliseconds of the event loop: the longest, and for which text")
    for name in NAMES:
        costs = seconds_of(name, WHOLE)
        worst = max(costs, key=lambda title: costs[title])
        print(f"{name:12} {1000 * costs[worst]:8.1f}  {worst}", flush=True)
