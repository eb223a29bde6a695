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


@dataclass(frozen=True)
class Usage:
    tasks: int
    """Processes and threads, without the supervisor."""
    cpu_seconds: float
    """Of the living and of the children they have waited for."""
    memory_bytes: int


def measure(supervisor: int) -> Usage:
    """A process that ends while we look counts as nothing."""
    tasks, ticks, pages = -1, 0, 0
    waiting = [supervisor]
    while waiting:
        folder = Path(f"/proc/{waiting.pop()}")
        with contextlib.suppress(OSError):
            # The name in parentheses may hold anything, so count the fields from behind it.
            status = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            ticks += sum(map(int, status[11:15]))
            tasks += int(status[17])
            pages += int(status[21])
            for thread in (folder / "task").iterdir():
                waiting += map(int, (thread / "children").read_text().split())
    return Usage(max(tasks, 0), ticks / TICKS, pages * PAGE_BYTES)
