"""Scalars of a run, forwarded to other people's dashboards: TensorBoard, trackio, Weights & Biases (offline).

Owns: a recorder that never raises into training and never makes it wait. Refuses: being the record; that is run.db.
Files go to mirrors/NAME in the run directory; nothing is sent anywhere.
"""

from __future__ import annotations

import importlib.util
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from temper.errors import UserError, install_line
from temper.types import Batch, EvaluationResult, StepReport

FOLDER = "mirrors"
QUEUE_SIZE = 256
"""Steps and evaluations that may wait for a slow mirror; what comes then is dropped and counted."""
PATIENCE_SECONDS = 30.0
"""Time to write what is left when the run ends."""

Scalars = Mapping[str, float]


class Writer(Protocol):
    """One dashboard's own way of taking numbers. Used by one thread only."""

    def write(self, scalars: Scalars, step: int) -> None: ...
    def close(self) -> None: ...


OpenWriter = Callable[[Path, str], Writer]
"""(folder for its files, name of the run) -> writer."""


def open_mirrors(
    names: Sequence[str], run: Path, steps_by_stage: Sequence[int], warn: Callable[[str], None]
) -> list[Mirror]:
    """Started mirrors of a run directory. Raises UserError, before any starts, for one that is not installed."""
    for name in names:
        _require(name)
    mirrors = [Mirror(name, WRITERS[name], run, steps_by_stage, warn) for name in dict.fromkeys(names)]
    for mirror in mirrors:
        mirror.start()
    return mirrors


class Mirror:
    """A recorder of the loop. The first failure is told once, and everything after it is ignored."""

    def __init__(
        self,
        name: str,
        open_writer: OpenWriter,
        run: Path,
        steps_by_stage: Sequence[int],
        warn: Callable[[str], None],
    ) -> None:
        """steps_by_stage: one axis for all stages, the same after a resume."""
        self._name, self._run, self._open = name, run, open_writer
        self._starts = [sum(steps_by_stage[:stage]) for stage in range(len(steps_by_stage))]
        self._warn = warn
        self._jobs: queue.Queue[tuple[Scalars, int] | None] = queue.Queue(QUEUE_SIZE)
        self._num_dropped = 0
        self._has_warned = False
        self._is_broken = threading.Event()
        self._writer = threading.Thread(target=self._work, name=f"mirror {name}", daemon=True)

    def start(self) -> None:
        self._writer.start()

    def append(self, report: StepReport, batch: Batch) -> None:
        seconds = {f"seconds/{phase}": value for phase, value in report.seconds.items()}
        scalars = {**report.metrics, **report.system, **seconds, "loss/total": report.loss}
        self._put(scalars, self._starts[report.stage] + report.step)

    def evaluation(self, result: EvaluationResult) -> None:
        name = f"heldout/{result.name}"
        scalars = {name: result.score, f"{name}/low": result.low, f"{name}/high": result.high}
        self._put(scalars, self._starts[result.stage] + result.step)

    def close(self, deadline_seconds: float = PATIENCE_SECONDS) -> None:
        """Lets the mirror finish what waits, within the deadline; then leaves it behind."""
        deadline = time.monotonic() + deadline_seconds
        with suppress(queue.Full):
            self._jobs.put(None, timeout=deadline_seconds)
        self._writer.join(timeout=max(0.0, deadline - time.monotonic()))
        if self._writer.is_alive():
            self._tell(f"did not finish within {deadline_seconds:g} s; its last steps may be missing")
        elif self._num_dropped:
            self._tell(f"was too slow: {self._num_dropped} steps or evaluations are missing")

    def _put(self, scalars: Scalars, step: int) -> None:
        if self._is_broken.is_set():
            return
        # Not-a-number has no place on an axis, and some dashboards choke on it; run.db knows of it.
        finite = {name: float(value) for name, value in scalars.items() if math.isfinite(value)}
        try:
            self._jobs.put_nowait((finite, step))
        except queue.Full:
            self._num_dropped += 1

    def _work(self) -> None:
        """The mirror's thread: opens, forwards, closes. Ends at None or at the first failure, whatever it is."""
        try:
            folder = self._run / FOLDER / self._name
            folder.mkdir(parents=True, exist_ok=True)
            writer = self._open(folder, self._run.name)
            while (job := self._next()) is not None:
                writer.write(*job)
            writer.close()
        except Exception as error:  # the rim: somebody else's program, and training must not depend on it
            self._is_broken.set()
            self._tell(f"stopped: {type(error).__name__}: {error}")

    def _next(self) -> tuple[Scalars, int] | None:
        while True:
            try:
                return self._jobs.get(timeout=1.0)
            except queue.Empty:
                continue

    def _tell(self, what: str) -> None:
        """Once: a mirror that fails at every step would fill the log."""
        if not self._has_warned:
            self._has_warned = True
            with suppress(Exception):
                self._warn(f"mirror {self._name} {what}. Training goes on; the run is in {self._run}")


class _TensorBoard:
    def __init__(self, folder: Path, run: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder))  # type: ignore[no-untyped-call]

    def write(self, scalars: Scalars, step: int) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Trackio:
    def __init__(self, folder: Path, run: str) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(folder))  # read once, when trackio is first imported
        import trackio  # type: ignore[import-not-found, import-untyped, unused-ignore]

        self._run: Any = trackio.init(
            project="temper", name=run, resume="allow", embed=False, auto_log_gpu=False, auto_log_cpu=False
        )

    def write(self, scalars: Scalars, step: int) -> None:
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        self._run.finish()


class _Wandb:
    def __init__(self, folder: Path, run: str) -> None:
        import wandb  # type: ignore[import-not-found, import-untyped, unused-ignore]

        settings = wandb.Settings(silent=True, console="off", x_disable_stats=True, disable_git=True, save_code=False)
        self._run: Any = wandb.init(project="temper", name=run, dir=str(folder), mode="offline", settings=settings)

    def write(self, scalars: Scalars, step: int) -> None:
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        self._run.finish()


WRITERS: dict[str, OpenWriter] = {"tensorboard": _TensorBoard, "trackio": _Trackio, "wandb": _Wandb}
"""Writers by name, which is also that of the package it needs and of Temper's extra."""


def _require(name: str) -> None:
    if name not in WRITERS:
        raise UserError(f'mirror "{name}" is unknown. Choose among {", ".join(WRITERS)}')
    if importlib.util.find_spec(name) is None:
        raise UserError(f'mirror "{name}" is not installed. Leave it out, or run: {install_line(name)}')
