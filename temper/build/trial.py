"""Rows of a stage's first step, made without weights: what a dry run shows of data that no model has seen yet.

Owns: which rows a stage would begin with. Refuses: sampling and scoring, which need a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from temper.build.fitting import require_rows
from temper.build.sources import examples_of, is_rolling, max_length, require_comparable, row_maker
from temper.config import RunConfig
from temper.data import StageData
from temper.objectives import Objective
from temper.stages.distill import share_of_samples
from temper.stages.preference_rows import RowRules, rows_maker
from temper.stages.sft import TooLong
from temper.types import Sample


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


async def try_rows(config: RunConfig, objective: Objective, data: StageData) -> Trial | None:
    """The first step's rows of a stage that reads some; None: it samples them all. Raises UserError for data that the
    stage cannot train on, in every row of its files."""
    require_rows(config, objective, data)
    if config.stage == "preference":
        return _pairs(config, objective, data)
    if is_rolling(config, objective, data) and share_of_samples(objective) == 1:
        return None
    if config.stage == "reward_model":  # held-out ones are scored before the first step
        make_rows = row_maker(config, objective, data)
        for task in data.heldout:
            make_rows(task)
    batch = await examples_of(config, objective, data).take(1)
    is_steps = objective.loss is not None and objective.loss.name == "steps"
    unit = {"reward_model": "solutions with labelled steps" if is_steps else "pairs"}.get(config.stage, "examples")
    return Trial(unit=unit, count=config.trainer.examples_per_step, rows=batch.updates[0])


def _pairs(config: RunConfig, objective: Objective, data: StageData) -> Trial | None:
    if not data.has_preferences:
        require_comparable(config, objective)
        return None
    make_rows = rows_maker(objective, RowRules(data.renderer, max_length(config, data)))
    is_labelled = objective.loss is not None and objective.loss.name == "kto"
    count, pairs = config.trainer.examples_per_step, list[Sequence[Sample]]()
    while len(pairs) < count:
        try:
            pairs.append(make_rows(data.stream.next()[1]))
        except TooLong:
            if not config.trainer.max_length:
                raise
    rows = [row for pair in pairs for row in pair]
    return Trial(unit="labelled completions" if is_labelled else "pairs", count=count, rows=rows)
