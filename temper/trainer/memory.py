"""The most memory that was held at once, counted from a moment on; and that a GPU had no room, behind an error.

Owns: starting and reading the count, of a GPU or of this process. Refuses: other processes and other devices, and what
to do about a full one (build/full.py).
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

from temper.errors import OutOfMemory
from temper.trainer.ranks.channel import RankFailure

RESET_RESIDENT_PEAK = "5"
"""What is written to Linux's clear_refs to reset the peak (man 5 proc)."""


class PeakMemory:
    """Peak since this object was made, where the system can start its count anew; else since the process began."""

    def __init__(self, device: torch.device, process: Path = Path("/proc/self")) -> None:
        self._device, self._status = device, process / "status"
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.is_since_start = False
        else:
            self.is_since_start = not _reset(process / "clear_refs")
        """Whether the figure also covers what the process did before."""

    def bytes(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        if self.is_since_start:
            unit = 1 if sys.platform == "darwin" else 1024
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        line = next(line for line in self._status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024


def find_full(error: BaseException, phase: str) -> OutOfMemory | None:
    """That a GPU was full, of this process or of another trainer rank, if that is why this was raised. phase: what was
    done, where the error does not say it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OutOfMemory):
            return cause
        if isinstance(cause, RankFailure) and cause.full is not None:
            return cause.full
        if isinstance(cause, torch.OutOfMemoryError):
            return OutOfMemory(phase, cause)
        cause = cause.__cause__
    return None


def _reset(path: Path) -> bool:
    """False: the system has no such count, or forbids it."""
    try:
        path.write_text(RESET_RESIDENT_PEAK)
    except OSError:
        return False
    return True
