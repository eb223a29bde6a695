"""A held-out score counts what it says it counts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import pytest

from temper.engine.fake import FakeSampler
from temper.envs.env import make_env
from temper.errors import BackendError
from temper.evals.evaluate import Evaluation, constant_answer_score, evaluate, prompts_hash
from temper.rollout.episode import EpisodeSetup
from temper.types import Group, Message, Request, SamplingParams, Score, Task, Trajectory


class Digits:
    """The prompt is a number; so is the answer."""

    def prompt_messages(self, task: Task) -> tuple[Message, ...]:
        return task.messages

    def prompt_ids(self, messages: Sequence[Message], tools=()) -> tuple[int, ...]:
        return (int(messages[-1].content) + 10,)

    def extend_ids(self, *_: object, tools=()) -> tuple[int, ...]:
        raise AssertionError("one turn only")

    def decode(self, ids: Sequence[int]) -> str:
        return str(ids[0] - 10)


class Equal:
    async def score(self, task: Task, trajectory: Trajectory) -> tuple[Score, Mapping[str, Score]]:
        if task.answer == "broken":
            return Score.error("verifier crashed"), {}
        return Score.of(float(trajectory.text == task.answer)), {}

    def weighted(self, parts: Mapping[str, Score]) -> Mapping[str, Score]:
        return parts

    async def evolve(self, groups: Sequence[Group]) -> None:
        """Learns nothing."""


def tasks(*answers: str) -> list[Task]:
    return [Task(id=f"t{i}", messages=(Message(role="user", content=str(i)),), answer=a) for i, a in enumerate(answers)]


def setup(sampler: FakeSampler) -> EpisodeSetup:
    return EpisodeSetup(
        sampler=sampler, renderer=Digits(), scorer=Equal(), make_env=make_env,
        params=SamplingParams(max_new_tokens=4, stop_ids=(1,)), max_turns=1, episode_seconds=5.0, seed=0,
    )  # fmt: skip


def echo(request: Request) -> list[int]:
    return [request.prompt_ids[0], 1]


def test_the_score_is_the_share_of_right_answers_with_its_interval() -> None:
    heldout = tasks("0", "1", "9", "9")
    way = Evaluation(name="sampled", temperature=0.5, samples=3)
    sampler = FakeSampler(echo)
    result = asyncio.run(evaluate(setup(sampler), heldout, way, stage=1, step=7, constant_score=0.25))
    assert (result.score, result.num_prompts, result.samples_per_prompt) == (0.5, 4, 3)
    assert result.low < 0.5 < result.high
    assert {request.params.temperature for request in sampler.requests} == {0.5}
    assert len({request.id for request in sampler.requests}) == 12
    assert all(request.id.startswith("eval/1/7/sampled/") for request in sampler.requests)


def test_a_failed_verifier_is_not_a_wrong_answer() -> None:
    way = Evaluation(name="greedy", temperature=0.0, samples=1)
    with pytest.raises(BackendError, match="verifier crashed"):
        asyncio.run(evaluate(setup(FakeSampler(echo)), tasks("0", "broken"), way, stage=0, step=0, constant_score=0.0))


def test_the_commonest_answer_is_scored_on_every_task() -> None:
    score = asyncio.run(constant_answer_score(setup(FakeSampler(echo)), tasks("3", "3", "5", "3")))
    assert score == 0.75


def test_the_budget_tells_other_prompts_apart() -> None:
    assert prompts_hash(tasks("1", "2")) == prompts_hash(tasks("1", "2")) != prompts_hash(tasks("1", "3"))
