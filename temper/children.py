"""Worker processes of ours: how one is started, and that it never outlives who started it.

Owns: the command, the end with the parent, the socket that arrives as standard input. Refuses: what a worker does, and
importing anything else of Temper; a worker must start fast and stay small.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys

PR_SET_PDEATHSIG = 1


def worker_command(module: str) -> list[str]:
    """Runs main() of a module in a fresh interpreter that imports from where this one does. Its first argument is the
    number of this process, for die_with_parent()."""
    program = f"import json, sys; sys.path[:] = json.loads(sys.argv[2]); from {module} import main; main()"
    # -P: the working directory stays off sys.path, where a file could shadow the standard library's.
    return [sys.executable, "-P", "-c", program, str(os.getpid()), json.dumps(sys.path)]


def die_with_parent(parent: int) -> None:
    """Asks the kernel to kill this process with its parent, also while it is stuck in C code that holds the GIL.

    Elsewhere than on Linux an idle worker ends when its pipe closes, a busy one after the call at hand.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call above
        os._exit(1)


def take_over_stdin() -> socket.socket:
    """The socket to who started it arrives as standard input; move it out of reach of code that reads or closes
    that."""
    connection = socket.socket(fileno=os.dup(0))
    devnull = os.open(os.devnull, os.O_RDONLY)
    os.dup2(devnull, 0)
    os.close(devnull)
    return connection
