"""Guarantee: every sample is drawn once under a name of its own, failures are counted apart, too many end it.

Planted faults: a verifier that crashes, an environment that breaks, samples named by the order of asking.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import pytest

from temper.envs.env import make_env
from temper.errors import BackendError
from temper.evals.attempts import Attempts, constant_score, play
from temper.evals.scores import suite_metrics
from temper.evals.suites import text_answer
from temper.protocols import Env, EnvOpening, EnvReply
from temper.rollout.episode import EpisodeSetup
from temper.runs.results import PromptResult
from temper.types import Event, EventKind, Group, Message, Request, SamplingParams, Score, Task, Trajectory
from tests.fakes.episodes import FakeScorer
from tests.fakes.sampler import FakeSampler


class Digits:
    """The prompt is a number; so is the answer."""

    def prompt_messages(self, task: Task) -> tuple[Message, ...]:
        return task.messages

    def prompt_ids(self, messages: Sequence[Message], tools: object = ()) -> tuple[int, ...]:
        return (int(messages[-1].content) + 10,)

    def extend_ids(self, prompt_ids: Sequence[int], *_: object, tools: object = ()) -> tuple[int, ...]:
        return (*prompt_ids, 0)

    def decode(self, ids: Sequence[int]) -> str:
        return str(ids[0] - 10)


class Equal(FakeScorer):
    async def score(self, task: Task, trajectory: Trajectory) -> tuple[Score, Mapping[str, Score]]:
        if task.answer == "broken":
            return Score.error("verifier crashed"), {}
        if task.answer == "odd":
            return Score.unscorable("nothing to judge by"), {}
        return Score.of(float(trajectory.text == task.answer)), {}

    async def evolve(self, groups: Sequence[Group]) -> None:
        raise AssertionError("an evaluation teaches nobody")


def tasks(*answers: str) -> list[Task]:
    return [Task(id=f"t{i}", messages=(Message(role="user", content=str(i)),), answer=a) for i, a in enumerate(answers)]


def by_name(request: Request) -> list[int]:
    """What is drawn depends on the name of the request alone, as in a real engine."""
    return [10 + sum(request.id.encode()) % 7, 1]


class Shop:
    """Two turns: a tool that costs something and changes something, then the end. Task 3 never answers."""

    async def start(self, task: Task, seed: int) -> EnvOpening:
        self._number, self._turn = task.messages[0].content, 0
        return EnvOpening(messages=task.messages)

    async def step(self, message: Message) -> EnvReply:
        if self._number == "3":
            await asyncio.sleep(60)
        self._turn += 1
        if self._turn == 2:
            return EnvReply(is_done=True)
        done = [Event(kind=kind, name="buy", cost=1.5) for kind in (EventKind.TOOL_CALL, EventKind.SIDE_EFFECT)]
        return EnvReply(messages=(Message(role="tool", content="0"),), events=tuple(done))

    async def close(self) -> None:
        """Nothing is open."""


def run(
    *answers: str,
    samples: int = 3,
    at_once: int = 4,
    make: Callable[[str], Env] = make_env,
    seconds: float = 60.0,
    **settings: float,
) -> tuple[PromptResult, ...]:
    setup = EpisodeSetup(
        sampler=FakeSampler(by_name), renderer=Digits(), scorer=Equal(), make_env=make,
        params=SamplingParams(max_new_tokens=4, stop_ids=(1,)), max_turns=4, episode_seconds=seconds, seed=0,
    )  # fmt: skip
    attempts = Attempts(name="suite/x", samples=samples, at_once=at_once, answer_of=text_answer, **settings)
    counted: list[int] = []
    found = asyncio.run(play(setup, tasks(*answers), attempts, progress=counted.append))
    assert sum(counted) == samples * len(answers)
    return found


def texts(results: Sequence[PromptResult], count: int) -> list[list[str]]:
    return [[sample.text for sample in prompt.samples[:count]] for prompt in results]


def test_every_prompt_has_its_samples_in_order() -> None:
    found = run("0", "1")
    assert [prompt.task_id for prompt in found] == ["t0", "t1"]
    assert {len(prompt.samples) for prompt in found} == {3}
    sample = found[0].samples[0]
    assert (sample.num_tokens, sample.num_turns, sample.status, sample.answer) == (2, 1, "completed", sample.text)


def test_more_samples_more_prompts_and_more_at_once_keep_the_first_ones() -> None:
    few = run("0", "1", samples=2, at_once=1)
    assert texts(run("0", "1", samples=5, at_once=7), 2) == texts(few, 2)
    assert texts(run("0", "1", "2", samples=2, at_once=3)[:2], 2) == texts(few, 2)
    assert len({text for row in texts(run("0", "1", samples=5), 5) for text in row}) > 2, "the fake does vary"


def test_what_cannot_be_scored_is_kept_with_its_reason_and_no_number() -> None:
    found = run("0", "odd")
    assert {(sample.score, sample.reason) for sample in found[1].samples} == {(None, "nothing to judge by")}


def test_too_many_failures_end_it_with_the_sample_named() -> None:
    with pytest.raises(BackendError, match=r"sample \d of task t1: verifier crashed"):
        run("0", "broken")
    found = run("0", "broken", error_limit=0.5)
    assert [sample.score for sample in found[1].samples] == [None] * 3


def test_what_an_agent_did_is_counted_and_a_time_out_is_no_failure_of_ours() -> None:
    found = run("0", "1", "2", "3", make=lambda name: Shop(), at_once=12, seconds=1.0)
    sample = found[0].samples[0]
    assert (sample.num_turns, sample.cost, dict(sample.events)) == (2, 3.0, {"side_effect": 1, "tool_call": 1})
    assert {(sample.status, sample.score) for sample in found[3].samples} == {("timeout", None)}
    metrics = suite_metrics(found)
    assert metrics["timeouts"]["score"] == 0.25
    assert metrics["side_effects"]["score"] == 0.75


def test_the_constant_answer_is_the_commonest_gold_one() -> None:
    scorer, golds = Equal(), tasks("4", "4", "7", "odd")
    assert asyncio.run(constant_score(scorer, golds, "{answer}")) == pytest.approx(2 / 3)
    assert asyncio.run(constant_score(scorer, golds, "it is {answer}")) == 0.0, "it goes through the verifier"
    assert asyncio.run(constant_score(scorer, golds, "")) is None
