"""A pool of killable worker processes with hard deadlines, usable from any thread and from asyncio.

Owns: starting, feeding, killing and replacing workers, and whose fault a failed call is. Refuses: knowing what they
compute.
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
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

from temper.children import worker_command
from temper.errors import TaskError
from temper.rewards.workers import program
from temper.types import Score

START_SECONDS = 120.0
"""For starting Python and importing the target; not part of a call's deadline."""
POLL_SECONDS = 1.0
"""How long an idle thread sleeps before it looks again whether its pool was closed."""
PATIENCE = 8
"""How many times its CPU deadline a pure call may take by the clock: other processes want the machine, too."""

Json = Any
"""What JSON can hold."""
Arguments = tuple[list[Json], dict[str, Json]]
"""By place and by name."""


class WorkerFailed(TaskError):
    """The call raised, hung or killed its program. The text is the reason."""


class Overrun(WorkerFailed):
    """The call needed more than it may have: CPU seconds, memory, depth of recursion. What is checked is to blame."""


class CpuSpent(Overrun):
    """The call used up its CPU seconds. A quieter machine would not have helped it."""


def blame(failure: WorkerFailed) -> Score:
    """What a failed check is worth: 0 when the response caused the failure, an error when verifier or machine did.

    Errors leave their group, and too many stop the run. If a response could bring one about, a policy could choose it
    over being wrong.
    """
    return Score.of(0.0, str(failure)) if isinstance(failure, Overrun) else Score.error(str(failure))


class WorkerPool:
    """Runs `target` ("package.module:function") on JSON arguments in up to `size` processes.

    Nothing starts before the first call, and no more workers than calls in flight. Each worker has one thread here that
    lives as long as the pool: Linux ties "die with parent" to the thread that started the child, so a worker started
    from a caller's short-lived thread would be shot when that thread ends.

    A call whose worker died or was stopped on the way is repeated once, on a fresh worker: somebody's kill is no word
    about the call. One that loses its second worker, too, is to blame itself. One that is late by computing or waiting
    is not repeated.

    is_pure: the function only computes. Then the deadline counts CPU seconds, which a busy machine does not spend, and
    a call that used them up is an Overrun. One that ran out of memory, died or was late by the clock is repeated once
    on a fresh worker with no other call beside it: what failed for want of a quiet machine succeeds there.
    """

    def __init__(
        self,
        target: str,
        *,
        size: int = 2,
        deadline_seconds: float = 5.0,
        is_pure: bool = False,
        memory_bytes: int | None = None,
        show: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.target = target
        self.size = size
        self.deadline_seconds = deadline_seconds
        self.is_pure = is_pure
        self.memory_bytes = memory_bytes
        self._show = show
        self._jobs: queue.SimpleQueue[tuple[Future[Json], Arguments] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._workers: dict[threading.Thread, _Worker] = {}
        self._in_flight = 0
        self._is_closed = False
        self._lock = threading.Lock()
        self._room = _Room()

    async def call(self, *arguments: Json, **named: Json) -> Json:
        """The function's result. Raises WorkerFailed with the reason otherwise."""
        return await asyncio.wrap_future(self.submit(*arguments, **named))

    def submit(self, *arguments: Json, **named: Json) -> Future[Json]:
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
            self._jobs.put((future, (list(arguments), named)))
        return future

    @property
    def process_ids(self) -> list[int]:
        """Process ids of the living workers."""
        return [running.process.pid for running in list(self._workers.values()) if running.process.poll() is None]

    def close(self) -> None:
        """Fails what waits, kills every program, and returns when they are gone. May be called twice."""
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

    def _attempt(self, arguments: Arguments) -> Json | WorkerFailed:
        """The result of a call, or why it has none."""
        failure = WorkerFailed("the worker pool was closed")
        for enter in (self._room.together, self._room.alone if self.is_pure else self._room.together):
            may_repeat = self.is_pure
            try:
                with enter():
                    return self._worker().exchange(arguments, self.deadline_seconds * (PATIENCE if self.is_pure else 1))
            except WorkerFailed as error:
                return error
            except _Lost as lost:
                failure = lost.failure
                may_repeat = (may_repeat or lost.is_worker_hit) and not isinstance(failure, CpuSpent)
            except Exception as error:  # the rim: a thread that dies would leave its future waiting for ever
                failure = WorkerFailed(f"{type(error).__name__}: {error}")
            self._discard()
            if not may_repeat or self._is_closed:
                break
        return failure

    def _worker(self) -> _Worker:
        """This thread's program, started now if there is none."""
        me = threading.current_thread()
        if me not in self._workers:
            # Listed before it has started, so that close() also kills one that is busy importing.
            self._workers[me] = _Worker(self._show)
            if self._is_closed:
                raise _Lost(WorkerFailed("the worker pool was closed"))
            hello = {
                "target": self.target,
                "cpu_seconds": self.deadline_seconds if self.is_pure else None,
                "memory_bytes": self.memory_bytes,
            }
            try:
                self._workers[me].exchange(hello, START_SECONDS)
            except WorkerFailed as error:
                raise _Lost(WorkerFailed(f"worker could not import {self.target}: {error}")) from error
        return self._workers[me]

    def _discard(self) -> None:
        if running := self._workers.pop(threading.current_thread(), None):
            running.kill()
            running.connection.close()


class _Lost(Exception):
    """The worker is dead or must be killed. is_worker_hit: it died or was stopped, perhaps by no fault of the call."""

    def __init__(self, failure: WorkerFailed, *, is_worker_hit: bool = False) -> None:
        super().__init__(str(failure))
        self.failure, self.is_worker_hit = failure, is_worker_hit


class _Room:
    """Where calls run: side by side, or one alone."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_together = 0
        self._num_alone = 0
        """Calls that run alone or wait to: new calls side by side wait for them, or they would never be alone."""
        self._alone = threading.Lock()

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        with self._changed:
            while self._num_alone:
                self._changed.wait(timeout=POLL_SECONDS)
            self._num_together += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_together -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        with self._changed:
            self._num_alone += 1
            while self._num_together:
                self._changed.wait(timeout=POLL_SECONDS)
        try:
            with self._alone:
                yield
        finally:
            with self._changed:
                self._num_alone -= 1
                self._changed.notify_all()


class _Worker:
    """One process and the socket to it. Used by one thread; kill() may come from another."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self.connection, theirs = socket.socketpair()
        with theirs:
            # A new session: a signal typed at the terminal is for the run, which then closes its pools.
            self.process = subprocess.Popen(
                worker_command(program.__name__),
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
            program.send(self.connection, message)
            reply = program.receive(self.connection, deadline)
        except TimeoutError as error:
            if self._was_stopped():
                late = WorkerFailed(f"worker was stopped (SIGSTOP), nothing for {deadline_seconds:g} s")
                raise _Lost(late, is_worker_hit=True) from error
            raise _Lost(WorkerFailed(f"timeout after {deadline_seconds:g} s")) from error
        except (EOFError, OSError, ValueError) as error:
            end = self._end()
            is_spent = end == f"signal {program.CPU_SPENT.name}"
            failure = CpuSpent("it used up its CPU time") if is_spent else WorkerFailed(f"worker died ({end})")
            raise _Lost(failure, is_worker_hit=True) from error
        if "printed" in reply:
            self._show(reply["printed"])
        if reply.get("overrun") == "MemoryError":
            raise _Lost(Overrun(reply["error"]))  # the memory may be what earlier calls left behind
        if "overrun" in reply:
            raise Overrun(reply["error"])
        if "error" in reply:
            raise WorkerFailed(reply["error"])
        return reply["value"]

    def _was_stopped(self) -> bool:
        """Whether somebody stopped the process while it lived. That tells it from a slow verifier: neither answers, but
        the kernel reports only the stopped one to its parent, also when it was continued too late to be in time."""
        if sys.platform != "linux":  # elsewhere Python may lack waitid, and a stopped worker counts as late
            return False
        with contextlib.suppress(ChildProcessError):  # it ended meanwhile
            # Without WEXITED: its end stays for Popen.wait() to hear of.
            return os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WCONTINUED | os.WNOHANG) is not None
        return False

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
