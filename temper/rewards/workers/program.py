"""The program a worker process runs: import one function, then answer calls until the pool hangs up.

Owns: the child's side of the pipe. Refuses: importing torch, or of Temper what it needs not; a worker must start fast
and stay small.
Frames are a 4-byte length and JSON, both ways: the parent never unpickles what a poisoned worker wrote.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import resource
import signal
import socket
import struct
import sys
import time
import traceback
from typing import Any

from temper.children import die_with_parent, take_over_stdin

MAX_FRAME_BYTES = 64 * 2**20
MAX_PRINTED = 4000
"""Characters of what one call printed that are told."""
CPU_SPENT = signal.SIGPROF
"""What ends a worker whose call has used up its CPU seconds: the signal of ITIMER_PROF."""


def send(connection: socket.socket, value: Any) -> None:
    """Writes one frame. Respects the socket's own timeout. Dates and the like become text."""
    payload = json.dumps(value, default=str).encode()
    connection.sendall(struct.pack("!I", len(payload)) + payload)


def receive(connection: socket.socket, deadline: float | None = None) -> Any:
    """Reads one frame before the time.monotonic() instant `deadline`. Workers give none: they end with their pool."""
    (size,) = struct.unpack("!I", _read(connection, 4, deadline))
    if size > MAX_FRAME_BYTES:
        raise EOFError(f"a frame of {size} bytes")
    return json.loads(_read(connection, size, deadline))


def _read(connection: socket.socket, size: int, deadline: float | None) -> bytes:
    chunks, missing = [], size
    while missing:
        if deadline is not None:
            # Per chunk, or a worker that dribbles one byte a second would never be late.
            connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        chunk = connection.recv(min(missing, 2**16))
        if not chunk:
            raise EOFError("the other end hung up")
        chunks.append(chunk)
        missing -= len(chunk)
    return b"".join(chunks)


def main() -> None:
    die_with_parent(int(sys.argv[1]))
    connection = take_over_stdin()
    try:
        hello = receive(connection)
        try:
            function = find(hello["target"])
        except Exception as error:
            send(connection, {"error": f"{type(error).__name__}: {error}"})
            return
        limit_memory(hello["memory_bytes"])
        send(connection, {"value": "ready"})
        while True:
            arguments, named = receive(connection)
            send(connection, answer(function, arguments, named, hello["cpu_seconds"]))
    except (EOFError, ConnectionError):
        return


def find(target: str) -> Any:
    module, _, name = target.rpartition(":")
    if not module.endswith(".py"):
        return getattr(importlib.import_module(module), name)
    from temper.plugins import load_function  # only now: sys.path has just been set

    return load_function(target, where=target)


def limit_memory(num_bytes: int | None) -> None:
    """From now on this process cannot map more; None: as much as there is."""
    if num_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, resource.getrlimit(resource.RLIMIT_AS)[1]))


def answer(function: Any, arguments: list[Any], named: dict[str, Any], cpu_seconds: float | None) -> dict[str, Any]:
    """The result of one call, or the exception as text; "overrun" when the call needed more than this process has;
    and what it printed, if it did.

    After cpu_seconds of computing the kernel ends the process with CPU_SPENT, also while it is stuck in C code.
    """
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        outcome = _outcome(function, arguments, named, cpu_seconds)
    printed = said.getvalue()[:MAX_PRINTED]
    return {**outcome, "printed": printed} if printed else outcome


def _outcome(function: Any, arguments: list[Any], named: dict[str, Any], cpu_seconds: float | None) -> dict[str, Any]:
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds or 0.0)
    try:
        value = function(*arguments, **named)
        json.dumps(value)
    except (MemoryError, RecursionError) as error:
        return {"error": f"{type(error).__name__}: {error}".rstrip(": "), "overrun": type(error).__name__}
    except BaseException as error:  # SystemExit, KeyboardInterrupt and CancelledError are the function's own here
        return {"error": f"{type(error).__name__}: {error}{place_of(error, function)}"}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
    return {"value": value}


def place_of(error: BaseException, function: Any) -> str:
    """ ", in rewards.py, line 7": the innermost line of the file that defines the function. Empty for Temper's own
    verifiers, whose reasons are for people who never saw that file."""
    code = getattr(function, "__code__", None)
    if code is None or function.__module__.startswith("temper."):
        return ""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == code.co_filename]
    return f", in {own[-1].filename}, line {own[-1].lineno}" if own else ""


if __name__ == "__main__":
    main()
