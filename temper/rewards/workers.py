"""A pool of killable worker processes with hard deadlines, usable from any thread and from asyncio.

Owns: starting, feeding, killing and replacing workers. Refuses: knowing what they compute.
Verifiers run here and not in-process because sympy, regular expressions and users' code can hang in C code that no
signal and no thread can interrupt; a process can always be killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from temper.errors import TaskError
from temper.rewards import worker

START_SECONDS = 120.0
"""For starting Python and importing the target; not part of a call's deadline."""
POLL_SECONDS = 1.0
"""How long an idle thread sleeps before it looks again whether its pool was closed."""

Json = Any
"""What JSON can hold."""


class WorkerFailed(TaskError):
    """The call raised, hung or killed its worker. The text is the reason; it becomes Score.error, never a number."""


class WorkerPool:
    """Runs `target` ("package.module:function") on JSON arguments in up to `size` processes.

    Nothing starts before the first call, and no more workers than calls in flight. Each worker has one thread here that
    lives as long as the pool: Linux ties "die with parent" to the thread that started the child, so a worker started
    from a caller's short-lived thread would be shot when that thread ends.
    """

    def __init__(self, target: str, *, size: int = 2, deadline_seconds: float = 5.0) -> None:
        self.target = target
        self.size = size
        self.deadline_seconds = deadline_seconds
        self._jobs: queue.SimpleQueue[tuple[Future[Json], list[Json]] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._workers: dict[threading.Thread, _Worker] = {}
        self._in_flight = 0
        self._is_closed = False
        self._lock = threading.Lock()

    async def call(self, *arguments: Json) -> Json:
        """The function's result. Raises WorkerFailed with the reason otherwise."""
        return await asyncio.wrap_future(self.submit(*arguments))

    def submit(self, *arguments: Json) -> Future[Json]:
        """For callers without an event loop. The deadline counts from when a worker takes the call."""
        future: Future[Json] = Future()
        with self._lock:
            if self._is_closed:
                raise WorkerFailed(f"the worker pool of {self.target} is closed")
            self._in_flight += 1
            if self._in_flight > len(self._threads) and len(self._threads) < self.size:
                thread = threading.Thread(target=self._serve, name=f"pool {self.target}", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._jobs.put((future, list(arguments)))
        return future

    @property
    def process_ids(self) -> list[int]:
        """Of the living workers."""
        return [running.process.pid for running in list(self._workers.values()) if running.process.poll() is None]

    def close(self) -> None:
        """Fails what waits, kills every worker, and returns when they are gone. May be called twice."""
        with self._lock:
            self._is_closed = True
            threads = list(self._threads)
        with contextlib.suppress(queue.Empty):
            while job := self._jobs.get_nowait():
                if job[0].set_running_or_notify_cancel():
                    _settle(job[0], WorkerFailed("the worker pool was closed"))
        for _ in threads:
            self._jobs.put(None)
        for running in list(self._workers.values()):
            running.kill()  # also ends the receive() its thread waits in
        for thread in threads:
            thread.join(timeout=10.0)

    def _serve(self) -> None:
        """One thread, one worker at a time: take a job, run it, replace the worker if it was lost."""
        while not self._is_closed:
            try:
                job = self._jobs.get(timeout=POLL_SECONDS)
            except queue.Empty:
                continue
            if job is None:
                break
            future, arguments = job
            if future.set_running_or_notify_cancel():
                _settle(future, self._attempt(arguments))
            with self._lock:
                self._in_flight -= 1
        self._discard()

    def _attempt(self, arguments: list[Json]) -> Json | WorkerFailed:
        try:
            return self._worker().exchange(arguments, self.deadline_seconds)
        except WorkerFailed as error:
            return error
        except _Lost as error:
            self._discard()
            return WorkerFailed(str(error))
        except Exception as error:  # the rim: a thread that dies would leave its future waiting for ever
            self._discard()
            return WorkerFailed(f"{type(error).__name__}: {error}")

    def _worker(self) -> _Worker:
        """This thread's worker, started now if there is none."""
        me = threading.current_thread()
        if me not in self._workers:
            # Listed before it has started, so that close() also kills one that is busy importing.
            self._workers[me] = _Worker()
            if self._is_closed:
                raise _Lost("the worker pool was closed")
            try:
                self._workers[me].exchange({"path": sys.path, "target": self.target}, START_SECONDS)
            except WorkerFailed as error:
                raise _Lost(f"worker could not import {self.target}: {error}") from error
        return self._workers[me]

    def _discard(self) -> None:
        if running := self._workers.pop(threading.current_thread(), None):
            running.kill()
            running.connection.close()


class _Lost(Exception):
    """The worker is dead or must be killed."""


class _Worker:
    """One process and the socket to it. Used by one thread; kill() may come from another."""

    def __init__(self) -> None:
        self.connection, theirs = socket.socketpair()
        with theirs:
            # -P: the script's folder stays off sys.path, where rewards/math.py would shadow the standard library's.
            # A new session: a signal typed at the terminal is for the run, which then closes its pools.
            self.process = subprocess.Popen(
                [sys.executable, "-P", str(Path(worker.__file__)), str(os.getpid())],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def exchange(self, message: Json, deadline_seconds: float) -> Json:
        deadline = time.monotonic() + deadline_seconds
        try:
            self.connection.settimeout(deadline_seconds)
            worker.send(self.connection, message)
            reply = worker.receive(self.connection, deadline)
        except TimeoutError as error:
            raise _Lost(f"timeout after {deadline_seconds:g} s") from error
        except (EOFError, OSError, ValueError) as error:
            raise _Lost(f"worker died ({self._end()})") from error
        if "error" in reply:
            raise WorkerFailed(reply["error"])
        return reply["value"]

    def _end(self) -> str:
        try:
            code = self.process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "it closed its pipe"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def kill(self) -> None:
        # The whole session: a verifier's own children must not outlive it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=10.0)


def _settle(future: Future[Json], outcome: Json | WorkerFailed) -> None:
    if isinstance(outcome, WorkerFailed):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
