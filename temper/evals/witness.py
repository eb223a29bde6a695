"""What code of this process touches while it runs: files it changes, addresses it calls, processes it starts.

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
CHANGES: dict[str, tuple[tuple[int, int | None], ...]] = {
    "os.mkdir": ((0, 2),),
    "os.rename": ((0, 2), (1, 3)),
    "os.link": ((1, 3),),
    "os.symlink": ((1, 2),),
    "os.remove": ((0, 1),),
    "os.rmdir": ((0, 1),),
    "os.truncate": ((0, None),),
    "sqlite3.connect": ((0, None),),
}
"""Events that change files: the places, among their arguments, of each path and of the open folder that it is below."""
FOLLOWING = ("open", "os.truncate", "sqlite3.connect")
"""Events that change what a link leads to; the others change the link."""
CALLS = {"socket.connect": 1, "socket.sendto": 1, "socket.sendmsg": 1, "socket.getnameinfo": 0}
"""Events with an address, which is this argument: host and port, or the path of a socket of this machine."""
LOOKUPS = ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr")
"""Events whose first argument is a host."""
LOCAL = frozenset(("", "localhost", "::1", "::", "0.0.0.0", os.uname().nodename))
"""This machine. A server that listens here looks up the machine's own name."""


@dataclass(slots=True)
class WhatWasTouched:
    """What was seen. All of it is of the whole process."""

    changed: set[str] = field(default_factory=set)
    """Files and folders that were written, made, moved or removed: the names that they had, and have."""
    called: set[str] = field(default_factory=set)
    """Addresses of other machines, as text."""
    threads: frozenset[int] = frozenset()
    """Alive before; the same below."""
    processes: frozenset[int] = frozenset()

    @property
    def left_files(self) -> list[str]:
        """Those that are there."""
        return sorted(path for path in self.changed if os.path.lexists(path))

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
        if is_written and not (isinstance(path, str | bytes | os.PathLike) and os.path.isdir(path)):
            _note_change(event, path)
    for path_at, folder_at in CHANGES.get(event, ()):
        _note_change(event, arguments[path_at], -1 if folder_at is None else arguments[folder_at])
    if event == "socket.bind" and isinstance(arguments[1], str | bytes):
        _note_change(event, arguments[1])
    elif event in CALLS and isinstance(address := arguments[CALLS[event]], tuple) and address:
        _note_host(address[0])
    elif event in LOOKUPS:
        _note_host(arguments[0])


def _note_change(event: str, path: Any, folder: int = -1) -> None:
    """folder: descriptor of that which a relative path is below; -1: the working directory."""
    if not isinstance(path, str | bytes | os.PathLike):  # a descriptor: it was heard when it was opened
        return
    name = os.fsdecode(path).rstrip(os.sep)
    if name in ("", ":memory:") or name.startswith("\0"):  # databases and sockets that are no files
        return
    place = os.path.join(_folder_of(folder), name)
    parent, last = os.path.split(place)
    whole = os.path.realpath(place) if event in FOLLOWING else os.path.join(os.path.realpath(parent), last)
    # Folders that may be there already are made, and files that may be gone removed, without asking before.
    is_vain = event in ("os.mkdir", "os.remove", "os.rmdir") and os.path.lexists(whole) == (event == "os.mkdir")
    is_file = not any(given.startswith(SYSTEM) for given in (os.path.abspath(place), whole))
    if is_file and not is_vain and "__pycache__" not in whole:
        for sight in _WATCHED:
            sight.changed.add(whole)


def _folder_of(descriptor: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}") if descriptor >= 0 else ""
    except OSError:  # what is raised here would come out of the call that is heard, which has an error of its own
        return ""


def _note_host(host: Any) -> None:
    name = host.decode(errors="replace") if isinstance(host, bytes) else str(host or "")
    if name not in LOCAL and not name.startswith("127."):
        for sight in _WATCHED:
            sight.called.add(name)


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
