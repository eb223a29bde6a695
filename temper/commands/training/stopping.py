"""Ctrl-C, SIGTERM, a full disk: a run ends where it can be resumed, and says how.

Owns: signals while a run is on, and its last words. Refuses: what is saved (the loop finishes a checkpoint that is
being written).
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType

from temper.errors import DiskFull, TemperError, is_disk_full
from temper.runs.reader import RunReader
from temper.trainer.checkpoint import list_checkpoints

SIGNALS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
"""What stops a run, and who answers where nobody else does."""
NO_CHECKPOINT = "there is no checkpoint yet: a resume begins anew"


class Stopped(KeyboardInterrupt):
    """A signal ended the run."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(f"stopped by {number.name}")
        self.exit_code = 128 + number
        """As shells count: 130 after Ctrl-C, 143 after SIGTERM."""


async def run_until_stopped(work: Coroutine[None, None, None]) -> signal.Signals | None:
    """Runs the work; at the first signal cancels it, lets it close what is open, and returns the signal. None: none.

    A second signal does not wait for that. Outside of the main thread, and where the program has handlers of its own,
    signals are theirs.
    """
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    seen: list[signal.Signals] = []

    def stop(number: int, frame: FrameType | None) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(signal.Signals(number))
        loop.call_soon_threadsafe(task.cancel)

    with _handled_by(stop):
        try:
            await task
        except asyncio.CancelledError:
            if not seen:
                raise
    return seen[0] if seen else None


@contextmanager
def _handled_by(stop: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    is_main = threading.current_thread() is threading.main_thread()
    free = [number for number in SIGNALS if is_main and _is_free(number)]
    before = {number: signal.signal(number, stop) for number in free}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_free(number: signal.Signals) -> bool:
    """Nobody but Python or asyncio.run has asked for this signal."""
    handler = signal.getsignal(number)
    function = handler.func if isinstance(handler, partial) else handler
    return function is SIGNALS[number] or getattr(function, "__module__", "") == "asyncio.runners"


def describe_stop(folder: Path) -> str:
    """Where a stopped run stands: its step, and what a resume goes on from."""
    with RunReader(folder) as reader:
        steps, stages = reader.steps(), {record.stage: record for record in reader.stages()}
    if not steps:
        where = "before its first step"
    else:
        last = steps[-1]
        stage = stages[last.stage]
        where = f"after step {last.step} of {stage.steps} of stage {last.stage + 1} ({stage.name})"
    saved = _last_checkpoint(folder)
    return f"{where}; " + (f"the last checkpoint is {saved}" if saved else NO_CHECKPOINT)


def _last_checkpoint(folder: Path) -> Path | None:
    folders = sorted((folder / "checkpoints").glob("*-*"), key=lambda path: int(path.name.partition("-")[0]))
    found = [checkpoint for path in folders for checkpoint in list_checkpoints(path)]
    return found[-1] if found else None


@contextmanager
def full_disk_explained(folder: Path) -> Iterator[None]:
    """A disk that fills while a run is on, wherever in it, ends the run with what is full, what is kept and how to go
    on. Nothing is read from run.db for that: SQLite may need room to read."""
    try:
        yield
    except Exception as error:
        is_explained = isinstance(error, TemperError) and not isinstance(error, DiskFull)
        if is_explained or not is_disk_full(error):
            raise
        named = getattr(error, "filename", None) or folder
        full = str(error) if isinstance(error, DiskFull) else f"disk full while writing {named}: {error}"
        room, last = shutil.disk_usage(folder if folder.is_dir() else folder.parent), _last_checkpoint(folder)
        kept = f"nothing is lost up to the last checkpoint, {last}" if last else NO_CHECKPOINT
        raise DiskFull(
            f"{full}.\nOf the disk of {folder}, {room.free / 2**20:.1f} of {room.total / 2**20:.1f} MiB are free; "
            f"{kept}. Free space, then go on with --resume"
        ) from error
