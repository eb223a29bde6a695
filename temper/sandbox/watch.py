"""What a sandbox's processes use at this moment, read from the host's /proc.

Owns: walking the tree below a sandbox's process 1 and adding up. Refuses: deciding; the cell compares with its limits.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
BUSY = ("R", "D")
"""States of a thread that runs or could, and of one that waits for a disk or a page."""


@dataclass(frozen=True)
class Usage:
    tasks: int
    """Processes and threads, without the supervisor."""
    cpu_seconds: float
    """Processor time of living processes and of the children they have waited for."""
    memory_bytes: int
    is_idle: bool
    """No thread runs, wants to run, or waits for a disk."""


def measure(supervisor: int) -> Usage:
    """A process that ends while we look counts as nothing."""
    tasks, ticks, pages, is_idle = -1, 0, 0, True
    waiting = [supervisor]
    while waiting:
        folder = Path(f"/proc/{waiting.pop()}")
        with contextlib.suppress(OSError):
            status = _fields(folder)
            ticks += sum(map(int, status[11:15]))
            tasks += int(status[17])
            pages += int(status[21])
            for thread in (folder / "task").iterdir():
                is_idle = is_idle and _fields(thread)[0] not in BUSY
                waiting += map(int, (thread / "children").read_text().split())
    return Usage(max(tasks, 0), ticks / TICKS, pages * PAGE_BYTES, is_idle)


def _fields(folder: Path) -> list[str]:
    """Fields of the stat file, from the state on. The name in parentheses before it may hold anything."""
    return (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
