"""What a kind of stage is: one frozen record.

Owns: the questions that are answered differently by different kinds. Refuses: the answers (one file per kind), and the
table of kinds (kinds.py). An `if` on a stage's name anywhere is a sign that a field is missing here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from temper.config import RunConfig
from temper.errors import UserError
from temper.objectives import Objective
from temper.protocols import BatchSource
from temper.stages.measures import Measure, measure_answers
from temper.stages.parts import Parts
from temper.stages.reading.data import Reading, StageData
from temper.stages.reading.fitting import MakeRows

Writer = Callable[[Path], None]


@dataclass(frozen=True, kw_only=True)
class StageKind:
    """One kind of stage. What most kinds have in common are the defaults."""

    name: str
    preset: str
    """What it trains with when a recipe names no preset."""
    losses: tuple[str | None, ...]
    """Losses that it may train with; None is the policy gradient."""
    reading: Reading
    """How it reads its data."""
    make_source: Callable[[Parts], BatchSource]
    make_measure: Callable[[Parts], Measure] = measure_answers
    """Makes what is measured on held-out tasks."""
    make_rows: Callable[[Objective, StageData, int], MakeRows] | None = None
    """Makes rows of given tasks, of at most so many tokens. None: it reads none."""
    is_rewarded: bool = False
    """Whether samples are trained or kept by their reward, so that there must be one."""
    may_choose: bool = False
    """Whether a reward may judge what it samples, so that prompts can be chosen by their histories."""
    leaves: Literal["policy", "scorer", "rows"] = "policy"
    """What later stages find: a policy, a model that scores, or rows to read. After the last two the policy is what it
    was."""
    rows_file: str = ""
    """File of a checkpoint that holds the rows it leaves."""
    together: Literal["group", "trajectory"] = "trajectory"
    """What shares a microbatch: a pair is compared inside one."""
    ready_after: frozenset[str] = frozenset()
    """Kinds of earlier stages whose policy must be shown to be fit for this one."""
    check: Callable[[RunConfig, Objective], None] = lambda config, objective: None
    """Raises UserError for mistakes that show without data and without a model."""
    check_data: Callable[[RunConfig, Objective, StageData], None] = lambda config, objective, data: None
    """Raises UserError for data that it cannot train on."""
    describe: Callable[[RunConfig, Objective, StageData], Mapping[str, str]] = lambda config, objective, data: {}
    """What a dry run says of it, by name of the line."""
    writers: Callable[[Parts, BatchSource], Mapping[str, Writer]] = lambda parts, source: {}
    """What it adds to its checkpoints, by name."""

    @property
    def trains(self) -> bool:
        return self.leaves != "rows"

    def output(self, checkpoint: Path) -> Path:
        """What later stages read of its last checkpoint."""
        return checkpoint / self.rows_file if self.rows_file else checkpoint

    def row_maker(self, objective: Objective, data: StageData) -> MakeRows | None:
        """Makes the rows that are trained; None: all of them are drawn, now or by whoever was recorded."""
        if self.make_rows is None or data.share_sampled == 1 or data.recorded:
            return None
        return self.make_rows(objective, data, data.longest_row)


def require_whole_updates(config: RunConfig) -> None:
    """Refuses a step whose groups cannot be shared out over its optimiser steps."""
    groups, updates = config.rollout.groups_per_step, config.trainer.updates_per_batch
    if groups % updates:
        raise UserError(
            f"rollout.groups_per_step={groups} does not divide over trainer.updates_per_batch={updates}. "
            f"Use a multiple, e.g. groups_per_step={-(-groups // updates) * updates}"
        )
