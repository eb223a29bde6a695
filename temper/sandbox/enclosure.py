"""A wall around a program of the user's own: it sees its own files, writes nowhere, and reaches one socket.

Owns: the bubblewrap command line for agents, and what it shows of the host. Refuses: a folder of work that would show
everything, and hiding what the agent needs.
An agent needs more of the host than model-written code: its interpreter with all packages, and threads of any library.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from temper.errors import UserError
from temper.sandbox import forwarder
from temper.sandbox.boundary import SYSTEM_LIBRARIES, find_boundary, show_folders
from temper.sandbox.filter import AF_INET, AF_INET6, AF_UNIX, filter_program

SYSTEM = (
    *(*SYSTEM_LIBRARIES, "/bin", "/sbin", "/usr/bin", "/usr/sbin", "/usr/share", "/etc/alternatives"),
    "/etc/ssl/certs",  # beside the certificates lie private keys
)
FILES = ("/etc/hosts", "/etc/ld.so.cache", "/etc/localtime", "/etc/nsswitch.conf", "/etc/ssl/openssl.cnf")
PREFIXES = ("/usr", "/usr/local", "~/.local")
"""Where programs of many kinds are installed, beside keys and settings: of these, only what is in the folders below."""
INSTALLED = ("bin", "lib", "lib32", "lib64")
WIDE = ("/etc", "/run", "/var", *PREFIXES)
"""Folders that are not shown as a whole because a file in them is named."""
SOCKET = "/run/model"
SECCOMP = "{seccomp}"
"""Stands for the descriptor of the filter until somebody opens it."""
TMP_BYTES = 256 << 20
"""Of each folder that can be written."""


def agent_filter() -> bytes:
    """As around model-written code, but with TCP: in the agent's own network there is only its forwarder."""
    return filter_program(platform.machine(), (AF_UNIX, AF_INET, AF_INET6))


def enclose(
    command: str, *, python: str, socket: str, port: int, closed: Sequence[str] = (), hide: Sequence[str] = ()
) -> list[str]:
    """The command behind a wall in which 127.0.0.1:port is the socket of the host, and nothing else can be reached.

    closed: folders that are empty there, but for what the command names in them. hide: files and folders that are not
    to be read, whatever is in them."""
    words = shlex.split(command)
    return [
        find_boundary().bwrap,
        *("--unshare-all", "--unshare-user", "--uid", "1000", "--gid", "1000", "--hostname", "agent"),
        *("--cap-drop", "ALL", "--new-session", "--die-with-parent", "--seccomp", SECCOMP),
        *show_folders(SYSTEM),
        *(part for file in FILES for part in ("--ro-bind-try", file, file)),
        # Read-only: what root started owns the settings of the machine in /proc/sys, with no capability at all.
        *("--proc", "/proc", "--remount-ro", "/proc"),
        *("--dev", "/dev", "--size", str(TMP_BYTES), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"),
        *show_files(words, python, closed, hide),
        *("--ro-bind", socket, SOCKET, "--remount-ro", "/", "--chdir", os.getcwd()),
        *("--setenv", "HOME", "/tmp", "--setenv", "TMPDIR", "/tmp"),
        *("--", python, "-I", "-S", "-c", Path(forwarder.__file__).read_text(encoding="utf-8"), str(port), SOCKET),
        *words,
    ]


def show_files(words: Sequence[str], python: str, closed: Sequence[str] = (), hide: Sequence[str] = ()) -> list[str]:
    """Arguments that show what the agent needs besides the system, and an empty /tmp of its own. Raises UserError for a
    working folder that would show everything, and for hiding what is needed."""
    # The sockets of this run lie among temporary files: who reaches those of the nursery starts programs outside.
    closed = [os.path.realpath(folder) for folder in ("/tmp", tempfile.gettempdir(), *closed)]
    programs = [found for word in words[:1] if (found := shutil.which(word)) is not None]
    files = [python, *programs, *filter(os.path.isfile, words)]
    needed = _needed(files, closed)
    hidden = [os.path.realpath(path) for path in hide]
    for path in hidden:
        if lost := [place for place in (*needed, *files) if Path(os.path.realpath(place)).is_relative_to(path)]:
            raise UserError(
                f'env "agent": hide has {path}, and the agent needs {lost[0]}, which lies there. Leave it out'
            )
    covers = [place for path in (*closed, *hidden) for place in _places(path, (*SYSTEM, *needed))]
    mounts = {place: _cover(place) for place in covers}
    mounts["/tmp"] = ["--size", str(TMP_BYTES), "--tmpfs", "/tmp"]
    mounts |= {path: ["--ro-bind", path, path] for path in _outermost(needed, covers)}
    ordered = sorted(mounts, key=lambda place: len(Path(place).parts))  # what lies in another comes after it
    empty = [place for place in covers if os.path.isdir(place)]  # closed when what is shown in them has its place
    return [part for place in ordered for part in mounts[place]] + [
        part for place in empty for part in ("--remount-ro", place)
    ]


def _needed(files: Sequence[str], closed: Sequence[str]) -> list[str]:
    """The working folder, and those of these files."""
    here = os.getcwd()
    if _is_too_wide(here, closed):
        raise UserError(
            f'env "agent": with sandbox = true the agent sees the folder that Temper runs in, and that is {here}. '
            "Start it in the agent's own folder"
        )
    folders = [here]
    for path in files:
        for place in (os.path.abspath(path), os.path.realpath(path)):
            folder = os.path.dirname(place)
            is_installed = os.path.basename(folder) == "bin"  # its packages are beside it
            prefix = os.path.dirname(folder) if is_installed else folder
            if is_installed and os.path.realpath(prefix) in _real(PREFIXES):
                folders += [part for name in INSTALLED if os.path.isdir(part := os.path.join(prefix, name))]
            else:
                folders.append(place if _is_too_wide(prefix, closed) else prefix)
    return sorted({place for folder in folders for place in (folder, os.path.realpath(folder))}, key=len)


def _is_too_wide(folder: str, closed: Sequence[str]) -> bool:
    """Whether it holds what is nobody's business: the home folder, what is closed as a whole, or what is of many."""
    real = os.path.realpath(folder)
    return Path(*_real(["~"])).is_relative_to(real) or real in closed or real in _real(WIDE)


def _real(folders: Sequence[str]) -> list[str]:
    return [os.path.realpath(os.path.expanduser(folder)) for folder in folders]


def _places(path: str, shown: Sequence[str]) -> list[str]:
    """Where a real path is seen below the folders that are shown. Not as one of them: that is shown for itself."""
    found = []
    for folder in shown:
        real = os.path.realpath(folder)
        if not os.path.islink(folder) and path != real and Path(path).is_relative_to(real) and os.path.exists(path):
            found.append(os.path.join(folder, os.path.relpath(path, real)))
    return list(dict.fromkeys(found))


def _cover(place: str) -> list[str]:
    """A device that cannot be opened there stands in for a file."""
    return ["--tmpfs", place] if os.path.isdir(place) else ["--ro-bind", "/dev/null", place]


def _outermost(folders: Sequence[str], covers: Sequence[str]) -> list[str]:
    """Without those that another, or the system, shows already: with no cover between."""
    chosen: list[str] = []
    for folder in map(Path, folders):
        inner = [Path(cover) for cover in covers if folder.is_relative_to(cover)]
        around = [outer for outer in (*chosen, *SYSTEM) if folder.is_relative_to(outer)]
        if not any(all(not cover.is_relative_to(outer) for cover in inner) for outer in around):
            chosen.append(str(folder))
    return chosen
