"""What code of this process touches while it runs: files it writes, addresses it calls, processes it starts.

Owns: listening to the interpreter's audit events, and what is left afterwards. Refuses: stopping anything (sandbox/),
and seeing what other processes or C code do.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
SYSTEM = ("/dev/", "/proc/", "/sys/")
"""What is written there is no file."""


@dataclass(slots=True)
class WhatWasTouched:
    """What was seen. All of it is of the whole process."""

    written: set[str] = field(default_factory=set)
    called: set[str] = field(default_factory=set)
    """Addresses of other machines, as text."""
    threads: frozenset[int] = frozenset()
    """Alive before; the same below."""
    processes: frozenset[int] = frozenset()

    @property
    def left_files(self) -> list[str]:
        """Files that were written and are still there."""
        return sorted(path for path in self.written if os.path.exists(path))

    @property
    def left_threads(self) -> list[str]:
        return sorted(one.name for one in threading.enumerate() if one.ident not in self.threads)

    @property
    def left_processes(self) -> list[int]:
        return sorted(children() - self.processes)


_WATCHED: list[WhatWasTouched] = []
_is_listening = False


@contextmanager
def watching() -> Iterator[WhatWasTouched]:
    """Sees what happens inside. What is left is asked for when all is closed, inside or after."""
    global _is_listening
    if not _is_listening:  # a hook cannot be taken away: one for the life of the process, deaf while nobody watches
        sys.addaudithook(_hear)
        _is_listening = True
    threads = frozenset(one.ident for one in threading.enumerate() if one.ident is not None)
    sight = WhatWasTouched(threads=threads, processes=frozenset(children()))
    _WATCHED.append(sight)
    try:
        yield sight
    finally:
        _WATCHED.remove(sight)


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if not _WATCHED:
        return
    if event == "open":
        path, mode, flags = arguments
        is_written = flags & WRITING or (mode and set(mode) & set("wax+"))
        # One that is opened as its folder has no name, and is gone with whoever holds it.
        if is_written and isinstance(path, str | bytes | os.PathLike) and not os.path.isdir(path):
            _note_file(os.fsdecode(path))
    elif event in ("os.mkdir", "sqlite3.connect"):
        _note_file(str(arguments[0]))
    elif event == "socket.connect":
        _note_address(arguments[1])
    elif event == "socket.getaddrinfo" and arguments[0]:
        _note_address((arguments[0],))


def _note_file(path: str) -> None:
    whole = os.path.abspath(path)
    if not whole.startswith(SYSTEM) and "__pycache__" not in whole:
        for sight in _WATCHED:
            sight.written.add(whole)


def _note_address(address: Any) -> None:
    if isinstance(address, tuple) and address:  # a path is a socket of this machine
        host = address[0].decode() if isinstance(address[0], bytes) else str(address[0])
        if host not in ("127.0.0.1", "::1", "localhost"):
            for sight in _WATCHED:
                sight.called.add(host)


def children() -> set[int]:
    """Processes that this one has started and that have not ended."""
    found = set[int]()
    for task in Path("/proc/self/task").glob("*/children"):
        try:
            found.update(map(int, task.read_text().split()))
        except OSError:  # the thread has ended
            continue
    return {number for number in found if _is_alive(number)}


def _is_alive(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
