"""`temper watch`: the dashboard of one run, several, or a folder of runs, live or finished.

Owns: putting the server together, saying where it is, ending it. Refuses: writing to a run's record, and listening
beyond this machine unasked. Imports no torch: the page is there at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import webbrowser
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from temper.dashboard.registry import Registry
from temper.dashboard.server import make_app, make_server
from temper.listening import is_public, listen
from temper.terminal import print_line

NICENESS = 10
"""Below training, which may run on the same cores."""


def watch(
    paths: Sequence[Path],
    *,
    host: str = "127.0.0.1",
    port: int = 8777,
    open_browser: bool = False,
    say: Callable[[str], None] = print_line,
) -> None:
    """Serves until SIGTERM or Ctrl-C. `say` gets what the user should know; port 0 picks a free one."""
    registry = Registry(paths)
    app, streams = make_app(registry, host)
    server = make_server(app, streams)
    bound = listen(host, port)
    try:
        address = f"http://{f'[{host}]' if ':' in host else host}:{bound.getsockname()[1]}/"
        if is_public(host):
            say(f"warning: everybody who can reach {host} can read these runs")
        count = len(registry.runs())
        found = f"{count} run{'s' if count != 1 else ''}" if count else "no runs yet; they appear when they start"
        say(f"{found} at {address}  (Ctrl-C ends it)")
        with contextlib.suppress(OSError):
            os.nice(NICENESS)
        if open_browser:
            webbrowser.open(address)  # the socket listens already, so the browser just waits a moment
        _run(server, bound)
    finally:
        bound.close()


def _run(server: Any, bound: socket.socket) -> None:
    """Serves in this process. A shutdown that was asked for is no failure."""
    # uvicorn raises the signal once more when it is done; by default that would end the process as if it had crashed.
    previous = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        asyncio.run(server.serve(sockets=[bound]))
    except KeyboardInterrupt:
        return
    finally:
        signal.signal(signal.SIGTERM, previous)
