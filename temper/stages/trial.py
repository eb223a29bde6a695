"""Rows of a stage's first step, made without weights: what a dry run shows of data that no model has seen yet.

Owns: which rows a stage would begin with. Refuses: sampling and scoring, which need a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from temper.config import RunConfig
from temper.objectives import DirectLoss, Objective, RowKind
from temper.stages.kind import StageKind
from temper.stages.reading.data import StageData
from temper.stages.reading.examples import RowTooLong
from temper.stages.reading.fitting import require_rows
from temper.types import Sample

UNITS: dict[RowKind, str] = {
    "texts": "examples",
    "pairs": "pairs",
    "labelled": "labelled completions",
    "steps": "solutions with labelled steps",
}
"""What is counted, by what the loss reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What a stage reads in one step."""

    unit: str
    """What is counted, e.g. "pairs"."""
    count: int
    rows: Sequence[Sample]

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)

    @property
    def num_trained(self) -> int:
        return sum(row.num_actions for row in self.rows)


def try_rows(config: RunConfig, kind: StageKind, objective: Objective, data: StageData) -> Trial | None:
    """The first step's rows of a stage that reads some; None: it samples them all. Raises UserError for data that the
    stage cannot train on, in every row of its files."""
    make_rows = kind.row_maker(objective, data)
    if make_rows is None:
        return None
    assert isinstance(objective, DirectLoss), "rows are read by a direct loss"
    require_rows(config, make_rows, data)
    if kind.make_rows is not None and data.is_heldout_compared:  # scored before the first step
        make_heldout = kind.make_rows(objective, data, data.shape.max_context)
        for task in data.heldout:
            make_heldout(task)
    count, examples = config.trainer.examples_per_step, list[Sequence[Sample]]()
    while len(examples) < count:
        try:
            examples.append(make_rows(data.stream.next()[1]))
        except RowTooLong:
            if not config.trainer.max_length:
                raise
    rows = [row for example in examples for row in example]
    return Trial(unit=UNITS[objective.loss.reads], count=count, rows=rows)
