"""Playing a suite: every prompt several times, through the same episodes as training.

Owns: order, names of requests, what becomes of an attempt that failed. Refuses: scores of many attempts (scores.py).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from temper.batching.reflection import looks_back
from temper.errors import BackendError
from temper.evals.suites import AnswerOf
from temper.rollout.episode import EpisodeSetup, Scorer, run_episode
from temper.rollout.thinking import was_closed
from temper.runs.results import PromptResult, SampleResult
from temper.types import ScoreKind, Status, Task, Trajectory

ERROR_LIMIT = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempts:
    """How a suite is played."""

    name: str
    """Begins the name of every request. Randomness is keyed by it, the place of the task in the suite and the number of
    the sample: neither what else is asked, nor how much, nor where the data lies changes a sample."""
    samples: int
    at_once: int
    """Episodes that run together. The clock of an episode starts when it does, so that none times out in a queue."""
    answer_of: AnswerOf
    error_limit: float = ERROR_LIMIT
    """Stop when more than this share of all attempts failed: verifier or environment broken, not answers wrong."""


async def play(
    setup: EpisodeSetup, tasks: Sequence[Task], attempts: Attempts, *, progress: Callable[[int], None]
) -> tuple[PromptResult, ...]:
    """Every task `samples` times, in the order of the tasks. Raises BackendError when too many attempts failed."""
    drawn: list[list[SampleResult | None]] = [[None] * attempts.samples for _ in tasks]
    places = iter([(row, k) for row in range(len(tasks)) for k in range(attempts.samples)])
    failures: list[str] = []

    async def work(places: Iterator[tuple[int, int]]) -> None:
        for row, k in places:
            task = tasks[row]
            name = f"{attempts.name}/{row}/{k}"
            trajectory = await run_episode(setup, task, group_id=task.id, index=k, request_id=name)
            drawn[row][k] = as_sample(trajectory, attempts.answer_of, has_budget=setup.thinking is not None)
            if trajectory.score.kind is ScoreKind.ERROR and trajectory.status is not Status.TIMEOUT:
                failures.append(f"sample {k} of task {task.id}: {trajectory.score.reason}")
                _require_few(failures, attempts, len(tasks))
            progress(1)

    workers = [asyncio.create_task(work(places)) for _ in range(min(attempts.at_once, len(tasks) * attempts.samples))]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return tuple(
        PromptResult(
            task_id=task.id,
            prompt="\n\n".join(message.content for message in task.messages),
            gold=task.answer,
            samples=tuple(sample for sample in row if sample is not None),
        )
        for task, row in zip(tasks, drawn, strict=True)
    )


def _require_few(failures: Sequence[str], attempts: Attempts, num_tasks: int) -> None:
    total = attempts.samples * num_tasks
    if len(failures) > attempts.error_limit * total:
        raise BackendError(
            f"{len(failures)} of {total} attempts failed, more than the limit of {attempts.error_limit:.0%}. The last: "
            f"{failures[-1]}. Nothing was saved: a score of what is left would be of other prompts"
        )


def as_sample(trajectory: Trajectory, answer_of: AnswerOf, *, has_budget: bool = False) -> SampleResult:
    """`has_budget`: its thinking may have been closed."""
    events = trajectory.events
    score = trajectory.score
    reflects, backtracks = looks_back(trajectory)
    return SampleResult(
        score=score.value,
        reason=score.reason if score.value is None else None,
        answer=answer_of(trajectory.text),
        num_tokens=trajectory.num_tokens,
        num_turns=len(trajectory.turns),
        status=str(trajectory.status),
        seconds=round(trajectory.seconds, 3),
        events=dict(sorted(Counter(str(event.kind) for event in events).items())),
        cost=sum(event.cost for event in events),
        text=trajectory.text,
        is_closed=was_closed(trajectory) if has_budget else None,
        reflects=reflects,
        backtracks=backtracks,
    )


async def constant_score(scorer: Scorer, tasks: Sequence[Task], say: str) -> float | None:
    """Mean score of always saying the commonest gold answer; None: nothing can be said.

    A model that beats only this has learnt nothing. `say` puts an answer into words.
    """
    golds = Counter(task.answer for task in tasks if task.answer is not None)
    if not say or not golds:
        return None
    # Ties are broken by the text, so that the number does not depend on the order of the tasks.
    answer = say.replace("{answer}", min(golds, key=lambda text: (-golds[text], text)))
    scores = [(await scorer.score(task, Trajectory.saying(task.id, answer)))[0] for task in tasks]
    values = [score.value for score in scores if score.value is not None]
    return sum(values) / len(values) if values else None
