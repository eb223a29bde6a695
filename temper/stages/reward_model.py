"""Reward models as a source of batches: rows that a scalar head is read on, and the scale that is stored with it.

Owns: the kind "reward_model", its held-out measure, calibration. Refuses: rows (reading/scored_rows.py), the losses
(objectives/losses/scores.py), how far scores are to be believed (evals/pairs.py).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import compress
from pathlib import Path
from statistics import fmean

import torch

from temper.evals.pairs import Reliability, judge_pairs, judge_steps, result_of
from temper.objectives import DirectLoss, Loss, Objective
from temper.objectives.losses.reward_models import ScoreScale
from temper.objectives.losses.scores import SCORE_LOSSES
from temper.protocols import BatchSource
from temper.rewards.learned.model import SCALE_FILE
from temper.rollout.draws import TaskStream
from temper.stages.kind import StageKind
from temper.stages.measures import Audit, comparison_budget
from temper.stages.parts import Parts
from temper.stages.reading.data import Reading
from temper.stages.reading.examples import MAX_SKIPS, RowTooLong
from temper.stages.reading.scored_rows import RowMaker, scored_rows
from temper.stages.reading.stream import StreamSource
from temper.types import Batch, EvaluationResult, Sample, Task

REPORT_FILE = "temper_calibration.json"
"""Beside the weights: what the scores were worth on the calibration set."""

Columns = list[list[float]]
"""One list per row."""
ScoreFn = Callable[[Sequence[Sample]], Sequence[Sequence[float]]]
"""What the head says at every position of each row; 0.0 where it is not read."""


class ScoredExamples(StreamSource):
    """Implements protocols.BatchSource over a stream of pairs or of solutions with labelled steps."""

    def __init__(self, stream: TaskStream, make_rows: RowMaker, *, batch_size: int, drops_long: bool = False) -> None:
        """`drops_long`: tasks that do not fit are passed over and counted, in place of an error."""
        super().__init__(stream)
        self._make_rows = make_rows
        self._batch_size = batch_size
        self._drops_long = drops_long

    async def take(self, step: int) -> Batch:
        rows: list[Sample] = []
        num_examples = num_dropped = 0
        while num_examples < self._batch_size:
            draw, task = self._stream.next()
            try:
                own = self._make_rows(task)
            except RowTooLong:
                num_dropped += 1
                if not self._drops_long or num_dropped > MAX_SKIPS:
                    raise
                continue
            num_examples += 1
            rows += [replace(row, group_id=f"{task.id}#{draw}") for row in own]  # a repeated task stays two examples
        # A pair counts once, and so does every labelled step: rejected rows bring no example of their own.
        weight = 1 / sum(row.num_actions for row in rows if row.index == 0)
        samples = tuple(replace(row, weights=[weight * m for m in row.loss_mask]) for row in rows)
        metrics = {"data/examples": float(num_examples), "gen/len_mean": fmean(len(row.token_ids) for row in rows)}
        if self._drops_long:
            metrics["data/too_long"] = float(num_dropped)
        return Batch(updates=(samples,), metrics=metrics)


def scores_of(score: ScoreFn, tasks: Sequence[Task], make_rows: RowMaker) -> tuple[Columns, Columns]:
    """Of every row of the tasks, at the positions that are read: what the head says, and what stands there.

    Rows of a pair follow each other, chosen first; what stands at a labelled step is its label.
    """
    rows = [row for task in tasks for row in make_rows(task)]
    said = [list(compress(scores, row.loss_mask)) for scores, row in zip(score(rows), rows, strict=True)]
    return said, [list(compress(row.advantages, row.loss_mask)) for row in rows]


class Calibration:
    """Writes beside the weights of a checkpoint what a fixed set of examples says about them. No state, no chance.

    `score` gives scores_of of these examples, `judge` makes the report of them. With `is_scaled` the mean and deviation
    of the scores become the scale of the reward; a process reward model speaks in probabilities and has none.
    """

    def __init__(
        self,
        score: Callable[[], tuple[Columns, Columns]],
        judge: Callable[[Columns, Columns], Mapping[str, object]],
        *,
        is_scaled: bool,
    ) -> None:
        self._score, self._judge, self._is_scaled = score, judge, is_scaled

    def __call__(self, folder: Path) -> None:
        said, truth = self._score()
        values = torch.tensor([value for row in said for value in row], dtype=torch.float64)
        scale = None
        # Scores that are all alike have no scale: rewards are then the scores as they are.
        if self._is_scaled and len(values) > 1 and values.std() > 0:
            scale = asdict(ScoreScale.of(values))
            _write(folder / SCALE_FILE, scale)
        _write(folder / REPORT_FILE, {**self._judge(said, truth), "scale": scale})


def _write(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=1, sort_keys=True))


CALIBRATION_TASKS = 512
"""Training examples that a scale is taken from when nothing is held out."""


class _Scores:
    """How often a scalar head is right about held-out pairs or steps."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def __call__(self, step: int, metrics: Mapping[str, float], audit: Audit | None) -> list[EvaluationResult]:
        parts, tasks = self._parts, self._parts.data.heldout
        said, truth = await asyncio.to_thread(_head_scores, parts, tasks)
        name = "steps" if _reads_steps(parts) else "pairs"
        reliability = _judged(parts, said, truth)
        return [result_of(reliability, stage=parts.index, step=step, name=name, budget=comparison_budget(tasks))]


def _calibration(parts: Parts) -> Calibration:
    """What puts the scale and the calibration report into checkpoints."""
    tasks = parts.data.heldout or parts.data.probe[:CALIBRATION_TASKS]

    def score() -> tuple[Columns, Columns]:
        return _head_scores(parts, tasks)

    def judge(said: Columns, truth: Columns) -> Mapping[str, object]:
        return _judged(parts, said, truth).as_json()

    return Calibration(score, judge, is_scaled=not _reads_steps(parts))


def _loss(objective: Objective) -> Loss:
    assert isinstance(objective, DirectLoss), "a reward model trains a direct loss"
    return objective.loss


def _reads_steps(parts: Parts) -> bool:
    return _loss(parts.objective).reads == "steps"


def _head_scores(parts: Parts, tasks: Sequence[Task]) -> tuple[Columns, Columns]:
    data = parts.data
    make_rows = scored_rows(_loss(parts.objective), data.tokenizer, data.shape.max_context)
    return scores_of(lambda rows: parts.trainer.score(rows, "policy"), tasks, make_rows)


def _judged(parts: Parts, said: Columns, truth: Columns) -> Reliability:
    if _reads_steps(parts):
        return judge_steps(said, truth)
    scores = [score for row in said for score in row]  # one per row, the chosen one first
    return judge_pairs(scores[0::2], scores[1::2])


def _source(parts: Parts) -> BatchSource:
    trainer, data = parts.config.trainer, parts.data
    make_rows = scored_rows(_loss(parts.objective), data.tokenizer, data.longest_row)
    drops_long = trainer.max_length > 0
    return ScoredExamples(data.stream, make_rows, batch_size=trainer.examples_per_step, drops_long=drops_long)


KIND = StageKind(
    name="reward_model",
    preset="reward_model",
    losses=tuple(SCORE_LOSSES),
    reading=Reading(share_sampled=lambda objective, tasks: 0.0, compares=lambda tasks: True),
    make_source=_source,
    make_measure=_Scores,
    make_rows=lambda objective, data, longest: scored_rows(_loss(objective), data.tokenizer, longest),
    leaves="scorer",
    together="group",
    writers=lambda parts, source: {"calibration": _calibration(parts)},
)
