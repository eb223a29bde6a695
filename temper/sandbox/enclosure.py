"""A wall around a program of the user's own: it sees its own files, writes nowhere, and reaches one socket.

Owns: the bubblewrap command line for agents. Refuses: a folder of work that would show everything.
An agent needs more of the host than model-written code: its interpreter with all packages, and threads of any library.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

from temper.errors import UserError
from temper.sandbox import forwarder
from temper.sandbox.boundary import SYSTEM_LIBRARIES, find_boundary, show_folders
from temper.sandbox.filter import AF_INET, AF_INET6, AF_UNIX, filter_program

SYSTEM = (*SYSTEM_LIBRARIES, "/bin", "/sbin", "/usr/bin", "/usr/sbin", "/usr/share", "/etc/alternatives", "/etc/ssl")
FILES = ("/etc/hosts", "/etc/ld.so.cache", "/etc/localtime", "/etc/nsswitch.conf")
SOCKET = "/run/model"
SECCOMP = "{seccomp}"
"""Stands for the descriptor of the filter until somebody opens it."""
TMP_BYTES = 256 << 20


def agent_filter() -> bytes:
    """As around model-written code, but with TCP: in the agent's own network there is only its forwarder."""
    return filter_program(platform.machine(), (AF_UNIX, AF_INET, AF_INET6))


def enclose(command: str, *, python: str, socket: str, port: int) -> list[str]:
    """The command behind a wall in which 127.0.0.1:port is the socket of the host, and nothing else can be reached."""
    words = shlex.split(command)
    shown = _outermost(_folders(words, python))
    return [
        find_boundary().bwrap,
        *("--unshare-all", "--unshare-user", "--uid", "1000", "--gid", "1000", "--hostname", "agent"),
        *("--cap-drop", "ALL", "--new-session", "--die-with-parent", "--seccomp", SECCOMP),
        *show_folders(SYSTEM),
        *(part for file in FILES for part in ("--ro-bind-try", file, file)),
        *("--proc", "/proc", "--dev", "/dev", "--size", str(TMP_BYTES), "--tmpfs", "/tmp"),
        *(part for path in shown for part in ("--ro-bind", path, path)),
        *("--ro-bind", socket, SOCKET, "--remount-ro", "/", "--chdir", os.getcwd()),
        *("--setenv", "HOME", "/tmp", "--setenv", "TMPDIR", "/tmp"),
        *("--", python, "-I", "-S", "-c", Path(forwarder.__file__).read_text(encoding="utf-8"), str(port), SOCKET),
        *words,
    ]


def _folders(words: Sequence[str], python: str) -> list[str]:
    """What the agent sees besides the system: the working folder, its interpreter's, and those its command names."""
    here, home = os.getcwd(), os.path.realpath(os.path.expanduser("~"))
    if os.path.realpath(here) in ("/", home):
        raise UserError(
            f'env "agent": with sandbox = true the agent sees the folder that Temper runs in, and that is {here}. '
            "Start it in the agent's own folder"
        )
    programs = [found for word in words[:1] if (found := shutil.which(word)) is not None]
    folders = [here]
    for path in (python, *programs, *filter(os.path.isfile, words)):
        for place in (os.path.abspath(path), os.path.realpath(path)):
            folder = os.path.dirname(place)
            if os.path.basename(folder) == "bin":  # of an installation: its packages are beside it
                folder = os.path.dirname(folder)
            folders.append(place if folder in ("/", home) else folder)
    return [place for folder in folders for place in (folder, os.path.realpath(folder))]


def _outermost(folders: Sequence[str]) -> list[str]:
    """Without those that another, or the system, shows already."""
    chosen: list[str] = []
    for folder in sorted(set(folders), key=len):
        if not any(Path(folder).is_relative_to(outer) for outer in (*chosen, "/usr", "/bin", "/lib")):
            chosen.append(folder)
    return chosen
