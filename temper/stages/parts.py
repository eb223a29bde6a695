"""The live parts of a stage that its source of batches and its held-out measure are made of.

Owns: which parts these are. Refuses: making them (build/).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from temper.config import RunConfig
from temper.objectives import Objective
from temper.protocols import Sampler, Trainer
from temper.rollout.episode import EpisodeSetup
from temper.stages.reading.data import StageData
from temper.stages.reading.reference_cache import References


@dataclass(frozen=True, kw_only=True)
class Parts:
    config: RunConfig
    index: int
    """Number of the stage, from 0."""
    objective: Objective
    data: StageData
    trainer: Trainer
    setup: EpisodeSetup
    opponent: Sampler | None = None
    """Who plays one half of every group; None: the policy plays all."""
    pressure: Callable[[], Mapping[str, float]] = dict
    """What the sampler counted during the last step."""
    folder: Path | None
    """Where caches that outlive a process are kept; None: nowhere."""
    origin: Path
    """The model that the stage starts from."""
    warn: Callable[[str], None] = lambda doubt: None
    """Where doubts about the stage go while it trains."""

    def references(self, name: str = "references.bin") -> References:
        """What the reference said of rows, kept between processes where there is a folder."""
        path = None if self.folder is None else self.folder / name
        return References(self.trainer.score, path, identity=str(self.origin.resolve()))
