"""What is free in the memory of this machine, for what a GPU leaves there.

Owns: asking Linux. Refuses: other systems, of which nothing is known, and what is planned for it (memory.py).
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path("/")


def free_host_bytes(root: Path = ROOT) -> int | None:
    """What the kernel could give without swapping, or what the limit of a container leaves, where that is less; None:
    unknown. root: of the file system."""
    available = _available(root / "proc/meminfo")
    if available is None:
        return None
    return min([available, *_left_in_group(root / "sys/fs/cgroup")])


def _available(meminfo: Path) -> int | None:
    for line in _read(meminfo).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _left_in_group(group: Path) -> list[int]:
    """Of the control group that this process sees as its root: version 2, or the memory controller of version 1."""
    found = []
    for limit_file, used_file, cache_name, folder in (
        ("memory.max", "memory.current", "inactive_file", group),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", group / "memory"),
    ):
        limit, used = _read(folder / limit_file).strip(), _read(folder / used_file).strip()
        if limit.isdecimal() and used.isdecimal():  # "max" is no limit
            # Cached files count as used, and give way.
            cached = dict(line.split() for line in _read(folder / "memory.stat").splitlines()).get(cache_name, "0")
            found.append(max(0, int(limit) - int(used) + int(cached)))
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
