"""The program that starts agents: one process for a run, which forks a supervisor for each episode.

Owns: an agent's standard streams, its end, and the end of everything it started. Refuses: importing Temper; it runs in
whatever Python the agent wants, 3.9 or newer.

A connection to its socket is an episode. One line of JSON comes in, one goes out when the agent has ended and nothing
of it is left. Hanging up ends the episode: so does the death of Temper.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
import importlib.util
import inspect
import json
import os
import select
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LOOK_SECONDS = 0.2
SWEEP_SECONDS = 0.01
"""Between two looks at what is being killed, which may fork meanwhile."""
GRACE_SECONDS = 1.0
"""For processes that an agent left running to end by themselves."""
KILL_SECONDS = 10.0
OUTPUT_BYTES = 1 << 20
"""Most that an agent may print to standard output."""
ERROR_BYTES = 1 << 14
"""Last bytes of standard error that are kept."""
MAX_PROCESSES = 256
"""Of one agent, itself included."""
CHUNK_BYTES = 1 << 16


def say(text: str) -> None:
    """To Temper, which reads standard output; there is no terminal here."""
    sys.stdout.write(text)
    sys.stdout.flush()


def main(path: str, target: str) -> None:
    """Serves until standard input ends, which it does with Temper."""
    sys.path[0] = os.getcwd()  # not the folder of this file: its names are no modules of an agent
    function = find_function(target) if target else None
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(1024)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    adopt_orphans()  # of supervisors: an agent without a wall can kill its own
    spared = set(descendants())  # what an agent's module started when it was imported
    say("ready\n")
    os.dup2(2, 1)  # nobody reads further words, and a full pipe would stop whoever says them
    descriptors, has_strays = [listener.fileno(), sys.stdin.fileno()], False
    while sys.stdin.fileno() not in (ready := look(descriptors, SWEEP_SECONDS if has_strays else LOOK_SECONDS)):
        if ready:
            connection, _ = listener.accept()
            spared.add(start_supervisor(listener, connection, function))
            connection.close()
        has_strays = sweep(spared)
    deadline = time.monotonic() + KILL_SECONDS
    while sweep(spared) and time.monotonic() < deadline:
        time.sleep(SWEEP_SECONDS)


def look(descriptors: list[int], seconds: float) -> list[int]:
    """Those that can be read, as soon as there is one, or after these seconds."""
    return select.select(descriptors, [], [], seconds)[0]


def adopt_orphans() -> None:
    """Whatever below this process loses its parent becomes its child, however often it forked and called setsid."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def start_supervisor(listener: socket.socket, connection: socket.socket, function: Callable[[Any], Any] | None) -> int:
    """The number of its process."""
    supervisor = os.fork()
    if supervisor == 0:
        listener.close()
        try:
            supervise(connection, function)
        finally:
            os._exit(0)
    return supervisor


def sweep(spared: set[int]) -> bool:
    """Kills what agents left to this process when they killed their supervisors; whether there was something. spared:
    processes that stay; those that have ended are taken out."""
    with contextlib.suppress(ChildProcessError):
        while ended := os.waitpid(-1, os.WNOHANG)[0]:
            spared.discard(ended)
    strays = [child for child in children(os.getpid()) if child not in spared]
    kill([process for stray in strays for process in (stray, *descendants(stray))])
    return bool(strays)


def find_function(target: str) -> Callable[[Any], Any]:
    """What "package.module:function" or "folder/file.py:function" names. Ends the program when there is none."""
    place, _, name = target.rpartition(":")
    try:
        if place.endswith(".py"):
            sys.path.append(str(Path(place).resolve().parent))
            spec = importlib.util.spec_from_file_location(Path(place).stem, place)
            assert spec, f"{place} is no Python file"
            assert spec.loader, f"{place} cannot be read"
            module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
        return getattr(module, name)
    except Exception as error:
        traceback.print_exc()
        say(f"{type(error).__name__}: {error}\n")
        raise SystemExit(1) from error


def supervise(connection: socket.socket, function: Callable[[Any], Any] | None) -> None:
    """Runs one agent to its end and answers how it ended."""
    with connection.makefile("rb") as reader:
        order = json.loads(reader.readline())
    adopt_orphans()
    outputs, errors = os.pipe(), os.pipe()
    agent = os.fork()
    if agent == 0:
        connection.close()
        become(order, function, outputs[1], errors[1])
    os.close(outputs[1])
    os.close(errors[1])
    watch = AgentWatch(agent, outputs[0], errors[0], connection)
    watch.run()
    left = watch.end_others()
    report = {
        "code": watch.code,
        "stdout": bytes(watch.stdout).decode(errors="replace"),
        "stderr": bytes(watch.stderr).decode(errors="replace"),
        "left": left,
        "why": watch.why,
    }
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(report).encode())
    connection.close()


def become(order: dict[str, Any], function: Callable[[Any], Any] | None, stdout: int, stderr: int) -> None:
    """The agent itself: never returns."""
    os.setsid()
    if order["group"]:
        Path(order["group"]).write_text(str(os.getpid()))
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    with tempfile.TemporaryFile() as task:
        task.write(json.dumps(order["task"]).encode())
        task.flush()
        os.lseek(task.fileno(), 0, os.SEEK_SET)
        for descriptor, place in ((task.fileno(), 0), (stdout, 1), (stderr, 2)):
            os.dup2(descriptor, place)
    os.environ.update(order["variables"])
    code = 1
    try:
        if function is None:
            words = with_filter(order["words"], bytes.fromhex(order["filter"]))
            os.execvp(words[0], words)
        result = function(order["task"])
        result = asyncio.run(result) if inspect.iscoroutine(result) else result
        say("\n" + json.dumps({"result": result}) + "\n")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def with_filter(words: list[str], content: bytes) -> list[str]:
    """The words with the descriptor from which bubblewrap reads its filter of system calls."""
    if not content:
        return words
    reading, writing = os.pipe()
    os.write(writing, content)
    os.close(writing)
    os.set_inheritable(reading, True)
    return [str(reading) if word == "{seccomp}" else word for word in words]


class AgentWatch:
    """An agent from its start to the end of all its processes."""

    def __init__(self, agent: int, stdout: int, stderr: int, connection: socket.socket) -> None:
        self._agent, self._connection = agent, connection
        self._streams = {stdout: bytearray(), stderr: bytearray()}
        self.stdout, self.stderr = self._streams.values()
        self.code: int | None = None
        self.why = ""
        """Why it was ended; empty: it ended by itself."""

    def run(self) -> None:
        """Until the agent ends, or must."""
        poller = select.poll()
        for descriptor in (*self._streams, self._connection.fileno(), os.pidfd_open(self._agent)):
            poller.register(descriptor, select.POLLIN)
        while self.code is None and not self.why:
            for descriptor, _ in poller.poll(1000 * LOOK_SECONDS):
                if descriptor == self._connection.fileno():
                    self.why = "hung up"
                elif descriptor in self._streams and not self._read(descriptor):
                    poller.unregister(descriptor)
            self._bury()
            if len(self.stdout) > OUTPUT_BYTES:
                self.why = f"it printed more than {OUTPUT_BYTES} bytes"
            if len(descendants()) > MAX_PROCESSES:
                self.why = f"it had more than {MAX_PROCESSES} processes"

    def end_others(self) -> int:
        """Kills what is left, and returns how many processes an agent that ended by itself left running."""
        deadline = time.monotonic() + (0.0 if self.why else GRACE_SECONDS)
        while descendants() and time.monotonic() < deadline:
            time.sleep(0.01)
            self._bury()
        found = len(descendants())
        deadline = time.monotonic() + KILL_SECONDS
        while (others := descendants()) and time.monotonic() < deadline:
            kill(others)
            self._bury()
            time.sleep(0.002)
        for descriptor in self._streams:  # all writers are dead, so this ends
            while self._read(descriptor):
                pass
        return found

    def _read(self, descriptor: int) -> bool:
        """False at the end of the stream."""
        data, held = os.read(descriptor, CHUNK_BYTES), self._streams[descriptor]
        held += data
        if held is self.stderr:
            del held[:-ERROR_BYTES]
        else:
            del held[OUTPUT_BYTES + 1 :]
        return bool(data)

    def _bury(self) -> None:
        """Takes leave of children that have ended: the agent, and whatever lost its parent."""
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if found[0] == self._agent:
                    self.code = os.waitstatus_to_exitcode(found[1])


def kill(processes: list[int]) -> None:
    for number in (signal.SIGSTOP, signal.SIGKILL):  # stopped first: none forks while the others are killed
        for process in processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended, or is another user's
                os.kill(process, number)


def descendants(ancestor: int = 0) -> list[int]:
    """All processes below one, or below this one, those that have ended and are not yet buried left out."""
    found: list[int] = []
    waiting = children(ancestor or os.getpid())
    while waiting:
        found.append(process := waiting.pop())
        waiting += children(process)
    return [process for process in dict.fromkeys(found) if not _is_dead(process)]


def children(process: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{process}/task").iterdir():
            with contextlib.suppress(OSError):  # it has ended; the children of the others count
                found += map(int, (thread / "children").read_text().split())
    return found


def _is_dead(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


if __name__ == "__main__":
    main(*sys.argv[1:3])
