"""Labels for process reward models without people: a step is good when the policy still gets there after it.

Owns: labels from Monte-Carlo continuations, and the rows they are written to. Refuses: drawing and scoring
continuations (rollout/steps.py), solutions of more than one turn. Math-Shepherd, arXiv 2312.08935.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from temper.errors import UserError
from temper.rollout.episode import EpisodeSetup
from temper.rollout.steps import StepSplit, estimate_steps
from temper.storable import storable_json
from temper.types import Completion, Finish, Message, Score, Status, Task, Trajectory, Turn

AT_ONCE = 16
"""Solutions whose continuations are drawn together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Labelling:
    separator: str = "\n\n"
    """Between the steps, as the reward "process" splits them."""
    samples: int = 8
    """Continuations after each step."""
    min_share: float = 0.0
    """Success rate from which on a step is good. 0: one continuation that succeeds is enough."""

    def __post_init__(self) -> None:
        if not 0 <= self.min_share <= 1:
            raise UserError(f"min_share={self.min_share} must lie between 0 (one success is enough) and 1.")

    def is_good(self, rate: float) -> bool:
        return rate >= self.min_share if self.min_share else rate > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledSteps:
    """One solution with a verdict on each of its steps."""

    task: Task
    steps: tuple[str, ...]
    rates: tuple[float, ...]
    """Mean reward of continuations after the step; after the last, the reward of the solution itself."""
    labels: tuple[bool, ...]

    def as_row(self) -> dict[str, object]:
        """As data files hold it; `rates` is for people."""
        return {
            "prompt": [message.as_dict() for message in self.task.messages],
            "completions": list(self.steps),
            "labels": list(self.labels),
            "rates": list(self.rates),
        }


async def spoken(setup: EpisodeSetup, encode: Callable[[str], list[int]], task: Task, text: str) -> Trajectory:
    """A given solution as if the policy had said it, scored. `encode`: Renderer.completion_ids."""
    prompt_ids = setup.renderer.prompt_ids(setup.renderer.prompt_messages(task))
    ids = encode(text)
    zeros = [0.0] * len(ids)
    completion = Completion(
        prompt_ids=prompt_ids, token_ids=ids, logprobs=zeros, versions=[-1] * len(ids), finish=Finish.STOP
    )
    trajectory = Trajectory(
        task_id=task.id,
        group_id=task.id,
        index=0,
        turns=(Turn(completion=completion, message=Message(role="assistant", content=text)),),
        status=Status.COMPLETED,
        score=Score.unscorable("not scored yet"),
    )
    score, parts = await setup.scorer.score(task, trajectory)
    return replace(trajectory, score=score, score_parts=parts)


async def label_solution(
    setup: EpisodeSetup, task: Task, trajectory: Trajectory, rules: Labelling, request_id: str
) -> LabelledSteps | str:
    """The solution with its labels, or why it has none. Only a broken backend raises."""
    if not trajectory.is_trainable:
        return trajectory.score.reason or f"it is {trajectory.status}"
    if trajectory.num_tokens > setup.params.max_new_tokens:
        return f"it is longer than max_new_tokens={setup.params.max_new_tokens}"
    split = StepSplit(separator=rules.separator, samples=rules.samples)
    valued = await estimate_steps(setup, task, trajectory, split, request_id)
    if valued.score.value is None:
        return str(valued.score.reason)
    pieces = [_steps_in(piece, rules.separator) for piece in _pieces(valued, setup.renderer.decode)]
    if any(len(steps) > 1 for steps in pieces):
        return "a token holds the end of one step and the beginning of the next"
    # A piece without a step is what stood before the first one, or nothing but space.
    places = [place for place, steps in enumerate(pieces) if steps]
    if not places:
        return "it has no steps"
    # The value of a state is that of the step before it. What the last step led to is the solution itself.
    rates = (*(valued.step_values[place + 1] for place in places[:-1]), valued.score.value)
    steps = tuple(pieces[place][0] for place in places)
    return LabelledSteps(task=task, steps=steps, rates=rates, labels=tuple(map(rules.is_good, rates)))


def _pieces(trajectory: Trajectory, decode: Callable[[Sequence[int]], str]) -> list[str]:
    """The text of a solution, cut where its steps begin."""
    ids = trajectory.turns[0].completion.token_ids
    ends = (*trajectory.step_starts[1:], len(ids))
    return [decode(ids[start:end]) for start, end in zip(trajectory.step_starts, ends, strict=True)]


def _steps_in(text: str, separator: str) -> list[str]:
    """As the reward "process" splits it."""
    return [piece.strip() for piece in text.split(separator) if piece.strip()]


async def label_solutions(
    setup: EpisodeSetup, solutions: Sequence[tuple[Task, Trajectory]], rules: Labelling, *, name: str = "labels"
) -> tuple[list[LabelledSteps], Counter[str]]:
    """All that could be labelled, in order, and how many could not for which reason."""
    room = asyncio.Semaphore(AT_ONCE)

    async def label(place: int, task: Task, trajectory: Trajectory) -> LabelledSteps | str:
        async with room:
            return await label_solution(setup, task, trajectory, rules, f"{name}/{place}/{task.id}")

    async with asyncio.TaskGroup() as group:
        running = [group.create_task(label(place, *solution)) for place, solution in enumerate(solutions)]
    found = [await labelled for labelled in running]
    return [one for one in found if not isinstance(one, str)], Counter(one for one in found if isinstance(one, str))


def write_rows(path: Path, labelled: Sequence[LabelledSteps]) -> None:
    """One JSON object per line. Written aside and renamed: a killed run leaves no half of a data set."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".tmp-{path.name}")
    lines = [storable_json(json.dumps(one.as_row(), ensure_ascii=False)) for one in labelled]
    unfinished.write_text("".join(f"{line}\n" for line in lines), "utf-8")
    unfinished.rename(path)
