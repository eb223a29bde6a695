"""A control group per running program: the kernel's own limit on memory and processes.

Owns: finding a folder of the cgroup tree (version 1 or 2) we may write, making and removing groups in it.
Refuses: changing any group it did not make. Where nothing is writable the watcher and the rlimits remain.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from dataclasses import dataclass
from pathlib import Path

from temper.sandbox.program import Limits

ROOT = Path("/sys/fs/cgroup")
NAME = "temper-sandbox"
REMOVE_SECONDS = 1.0

_numbers = itertools.count()


@dataclass(frozen=True)
class Homes:
    """The folders in which groups may be made. Version 2 has one for both, version 1 one per controller."""

    memory: Path
    processes: Path
    is_version_2: bool


class ControlGroup:
    """One program's group. Made with its sandbox, removed after its sandbox is dead."""

    def __init__(self, homes: Homes) -> None:
        name = f"{NAME}-{os.getpid()}-{next(_numbers)}"
        self._is_version_2 = homes.is_version_2
        self._memory, self._processes = homes.memory / name, homes.processes / name
        self._folders = list(dict.fromkeys((self._memory, self._processes)))
        try:
            for folder in self._folders:
                folder.mkdir()
        except OSError:
            self.remove()
            raise

    def limit_processes(self, most: int) -> Path:
        """For whoever joins by itself, and is limited in nothing else: the file to write its process id to."""
        (self._processes / "pids.max").write_text(str(most))
        return self._processes / "cgroup.procs"

    def limit(self, limits: Limits) -> None:
        """Once per group: version 1 refuses to raise the limits in the order in which it wants them lowered."""
        if self._is_version_2:
            (self._memory / "memory.max").write_text(str(limits.memory_bytes))
            optional = self._memory / "memory.swap.max", "0"
        else:
            (self._memory / "memory.limit_in_bytes").write_text(str(limits.memory_bytes))
            optional = self._memory / "memory.memsw.limit_in_bytes", str(limits.memory_bytes)
        if optional[0].exists():  # only where the kernel accounts for swap
            optional[0].write_text(optional[1])
        (self._processes / "pids.max").write_text(str(limits.processes + 1))  # the supervisor is one of them

    def add(self, pid: int) -> None:
        for folder in self._folders:
            (folder / "cgroup.procs").write_text(str(pid))

    def has_run_out_of_memory(self) -> bool:
        """Whether the kernel killed one of its processes for memory."""
        file = self._memory / ("memory.events" if self._is_version_2 else "memory.oom_control")
        counts = dict(line.split() for line in file.read_text().splitlines())
        return int(counts.get("oom_kill", 0)) > 0

    def remove(self) -> None:
        deadline = time.monotonic() + REMOVE_SECONDS
        for folder in self._folders:
            while folder.exists():
                with contextlib.suppress(OSError):
                    folder.rmdir()
                    break
                if time.monotonic() > deadline:  # the kernel lets go of a dead process a moment after its parent hears
                    break
                time.sleep(0.002)


def find_homes(root: Path = ROOT, membership: str | None = None) -> Homes | None:
    """None where no folder is writable. `membership` is the text of /proc/self/cgroup."""
    if membership is None:
        with contextlib.suppress(OSError):
            membership = Path("/proc/self/cgroup").read_text()
    paths = {}
    for line in (membership or "").splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            paths[controller] = path.strip("/")
    candidates = []
    if "memory" in paths and "pids" in paths:
        candidates = [
            Homes(memory, processes, is_version_2=False)
            for memory in _upwards(root / "memory", paths["memory"])
            for processes in _upwards(root / "pids", paths["pids"])
        ]
    elif "" in paths:
        candidates = [Homes(home, home, is_version_2=True) for home in _upwards(root, paths[""]) if _delegates(home)]
    homes = next(filter(_is_usable, candidates), None)
    if homes:
        _sweep(homes)
    return homes


def _sweep(homes: Homes) -> None:
    """Removes empty groups of processes that were killed before they could. The kernel refuses where one is in use."""
    for home in {homes.memory, homes.processes}:
        for folder in home.glob(f"{NAME}-*"):
            owner = folder.name.removeprefix(f"{NAME}-").partition("-")[0]
            if not Path(f"/proc/{owner}").exists():
                with contextlib.suppress(OSError):
                    folder.rmdir()


def _upwards(root: Path, path: str) -> list[Path]:
    """The group itself, then its parents: in a container the path may be that of the host and not exist here."""
    here = root / path
    return [folder for folder in (here, *here.parents) if folder.is_relative_to(root) and folder.is_dir()]


def _delegates(home: Path) -> bool:
    """A version 2 group hands on only the controllers named here, and with processes of its own it may name none."""
    with contextlib.suppress(OSError):
        return {"memory", "pids"} <= set((home / "cgroup.subtree_control").read_text().split())
    return False


def _is_usable(homes: Homes) -> bool:
    try:
        group = ControlGroup(homes)
    except OSError:
        return False
    try:
        group.limit(Limits())
    except OSError:
        return False
    finally:
        group.remove()
    return True
