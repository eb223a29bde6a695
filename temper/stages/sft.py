"""Supervised fine-tuning: the likelihood of given texts, in batches of examples.

Owns: the kind "sft", and examples as a source of batches. Refuses: making rows (reading/examples.py), and the loss.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import torch

from temper.batching.rows import domain_of
from temper.objectives import DirectLoss, Extent, Objective
from temper.objectives.losses.likelihood import LIKELIHOOD_LOSSES
from temper.protocols import BatchSource
from temper.rollout.draws import TaskStream
from temper.stages.kind import StageKind
from temper.stages.parts import Parts
from temper.stages.reading.ahead import Ahead
from temper.stages.reading.data import Reading, StageData
from temper.stages.reading.examples import MAX_SKIPS, ExampleRenderer, RowTooLong, example_rows
from temper.stages.reading.fitting import MakeRows
from temper.stages.reading.stream import StreamSource
from temper.types import Batch, Column, Sample, array_of


class Examples(StreamSource):
    """Implements protocols.BatchSource over a stream of tasks with answers."""

    def __init__(
        self,
        stream: TaskStream,
        renderer: ExampleRenderer,
        objective: DirectLoss,
        *,
        batch_size: int,
        max_length: int,
        drops_long: bool = False,
    ) -> None:
        """`drops_long`: tasks that do not fit are passed over and counted, in place of an error."""
        super().__init__(stream)
        self._renderer = renderer
        self._objective = objective
        self._batch_size = batch_size
        self._max_length = max_length
        self._drops_long = drops_long

    async def take(self, step: int) -> Batch:
        examples: list[list[Sample]] = []
        dropped = 0
        while len(examples) < self._batch_size:
            draw, task = self._stream.next()
            try:
                rows = example_rows(self._renderer, task, max_length=self._max_length)
            except RowTooLong:
                dropped += 1
                if not self._drops_long or dropped > MAX_SKIPS:
                    raise
                continue
            # Named by its draw, so that a task which is drawn twice stays two trajectories.
            examples.append([replace(row, group_id=f"{task.id}#{draw}", teacher=domain_of(task)) for row in rows])
        lengths = torch.tensor([sum(row.num_actions for row in rows) for rows in examples])
        extent = Extent(lengths=lengths, group_ids=torch.arange(len(examples)), max_new_tokens=self._max_length)
        assert self._objective.weighting is not None, "a loss of given texts weighs their tokens"
        weights = self._objective.weighting(extent).tolist()
        samples = tuple(_weighted(row, w) for rows, w in zip(examples, weights, strict=True) for row in rows)
        metrics = {"data/examples": float(len(examples)), "gen/len_mean": lengths.double().mean().item()}
        if self._drops_long:
            metrics["data/too_long"] = float(dropped)
        return Batch(updates=(samples,), metrics=metrics)


def _weighted(row: Sample, weight: float) -> Sample:
    return replace(row, weights=Column(weight * array_of(row.loss_mask, np.float64)))


def examples_of(parts: Parts) -> Examples:
    """Given texts, with the weights of the stage's objective."""
    trainer, data = parts.config.trainer, parts.data
    assert isinstance(parts.objective, DirectLoss), "given texts are read by a direct loss"
    return Examples(
        data.stream,
        data.renderer,
        parts.objective,
        batch_size=trainer.examples_per_step,
        max_length=data.longest_row,
        drops_long=trainer.max_length > 0,
    )


def examples_ahead(parts: Parts) -> BatchSource:
    return Ahead(examples_of(parts))


def text_rows(objective: Objective, data: StageData, longest: int) -> MakeRows:
    """Rows of given texts, for kinds that read them."""
    return partial(example_rows, data.renderer, max_length=longest)


KIND = StageKind(
    name="sft",
    preset="sft",
    losses=tuple(LIKELIHOOD_LOSSES),
    reading=Reading(share_sampled=lambda objective, tasks: 0.0),
    make_source=examples_ahead,
    make_rows=text_rows,
)
