"""A trainer that learns nothing and takes the time of learning it.

Owns: the Trainer protocol, the seconds of a step, the seconds in which it computed. Refuses: weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from temper.simulate.clock import spend
from temper.simulate.speeds import Speeds, TrainingWork, training_seconds
from temper.types import Batch, Group, Publication, Sample, TrainResult


class SimulatedTrainer:
    """Implements protocols.Trainer."""

    def __init__(self, speeds: Speeds, *, trainers: int = 1, updates: int = 1, version: int = 0) -> None:
        self._speeds, self._trainers, self._updates = speeds, trainers, updates
        self._version = version
        self.busy_seconds = 0.0

    @property
    def version(self) -> int:
        return self._version

    @property
    def scales(self) -> Mapping[str, float]:
        return {}

    def step(self, batch: Batch) -> TrainResult:
        work = work_of(batch.groups, self._updates)
        seconds = training_seconds(self._speeds, work, self._trainers)
        spend(seconds)
        self.busy_seconds += seconds
        self._version += 1
        return TrainResult(loss=0.0, metrics={"data/tokens": float(work.tokens)}, seconds={})

    def publish(self) -> Publication:
        return Publication(version=self._version, tensors={})

    def score(
        self, samples: Sequence[Sample], who: Literal["policy", "reference", "teacher", "critic", "routers"]
    ) -> Sequence[Sequence[float]]:
        return [[0.0] * len(sample.token_ids) for sample in samples]

    def prepack(self, updates: tuple[tuple[Sample, ...], ...]) -> None:
        """There is nothing to pack."""

    def warm_up(self, rows: Sequence[Sample]) -> None:
        """Nothing is cold."""

    def observe(self, score: float) -> None:
        """Nobody waits for progress."""

    def peak_memory_bytes(self) -> int:
        return 0

    @property
    def peak_is_since_start(self) -> bool:
        return False

    def save(self, folder: Path) -> None:
        (folder / "version").write_text(str(self._version))

    def load(self, folder: Path) -> None:
        self._version = int((folder / "version").read_text())


def work_of(groups: Sequence[Group], updates: int) -> TrainingWork:
    """Prompts count for every row that has them: what a trainer shares of them is in its speed."""
    rows = [member for group in groups for member in group.trainable]
    prompts = sum(len(member.turns[0].completion.prompt_ids) for member in rows)
    return TrainingWork(tokens=prompts + sum(member.num_tokens for member in rows), rows=len(rows), updates=updates)
