"""Held-out score of the weights the sampler holds, with an interval and the score of the commonest answer beside it.

Owns: what is asked, how often, under which budget. Uses the same episodes as training but its own request names, so an
evaluation cannot change what training draws.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from temper.errors import BackendError
from temper.evals.passk import clustered_interval
from temper.rollout.episode import EpisodeSetup, run_episode
from temper.types import EvaluationResult, Task, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One way to ask: greedy once, or sampled several times."""

    name: str
    temperature: float
    samples: int


async def evaluate(
    setup: EpisodeSetup, tasks: Sequence[Task], evaluation: Evaluation, *, stage: int, step: int, constant_score: float
) -> EvaluationResult:
    """Plays every task `samples` times. A failed verifier is an error of the evaluation, never a score."""
    params = dataclasses.replace(setup.params, temperature=evaluation.temperature)
    setup = dataclasses.replace(setup, params=params)
    prefix = f"eval/{stage}/{step}/{evaluation.name}"
    async with asyncio.TaskGroup() as group:
        running = [
            [
                group.create_task(
                    run_episode(setup, task, group_id=task.id, index=k, request_id=f"{prefix}/{task.id}/{k}")
                )
                for k in range(evaluation.samples)
            ]
            for task in tasks
        ]
    scores = [[_value_of(member.result()) for member in members] for members in running]
    mean, low, high = clustered_interval(scores)
    return EvaluationResult(
        stage=stage,
        step=step,
        name=evaluation.name,
        score=mean,
        low=low,
        high=high,
        num_prompts=len(tasks),
        samples_per_prompt=evaluation.samples,
        constant_score=constant_score,
        budget={
            "prompts_sha256": prompts_hash(tasks),
            "temperature": evaluation.temperature,
            "max_new_tokens": params.max_new_tokens,
            "max_turns": setup.max_turns,
            "samples": evaluation.samples,
        },
    )


async def constant_answer_score(setup: EpisodeSetup, tasks: Sequence[Task]) -> float:
    """Mean score of always giving the commonest gold answer. A model that beats only this has learnt nothing."""
    answers = Counter(task.answer for task in tasks if task.answer is not None)
    if not answers:
        return 0.0
    # Ties are broken by the text, so that the number does not depend on the order of the tasks.
    answer = min(answers, key=lambda text: (-answers[text], text))
    scores = [await setup.scorer.score(task, Trajectory.saying(task.id, answer)) for task in tasks]
    values = [score.value for score, _ in scores if score.value is not None]
    return sum(values) / len(values) if values else 0.0


def prompts_hash(tasks: Sequence[Task]) -> str:
    digest = hashlib.sha256()
    for task in tasks:
        digest.update(repr((task.messages, task.answer)).encode())
    return digest.hexdigest()


def _value_of(trajectory: Trajectory) -> float:
    if trajectory.score.value is None:
        raise BackendError(f"held-out task {trajectory.task_id} could not be scored: {trajectory.score.reason}")
    return trajectory.score.value
