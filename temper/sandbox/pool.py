"""The warm pool: sandboxes are started ahead, used once and replaced in the background.

Owns: the threads that hold sandboxes, the queue of programs, cancellation and closing. Refuses: reusing a sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
from concurrent.futures import Future, InvalidStateError

from temper.sandbox.boundary import find_boundary
from temper.sandbox.cell import Cell
from temper.sandbox.cgroup import find_homes
from temper.sandbox.program import Command, Limits, Outcome, Program, SandboxFailed
from temper.sandbox.requirement import require_sandbox

POLL_SECONDS = 1.0
"""How long a waiting thread sleeps before it looks again whether the pool was closed."""
JOIN_SECONDS = 20.0


class Sandbox:
    """Runs up to `size` programs at a time: `Sandbox().run_sync(Program("print(1)")).stdout == "1\\n"`.

    From any thread and from asyncio. Nothing starts before the first program. From then on each of up to twice `size`
    threads builds a sandbox, waits for its turn, runs one program and starts over: while one half of them runs programs
    the other half builds and buries. Each keeps its own because Linux ties "die with parent" to the starting thread.
    """

    def __init__(self, size: int = 2, limits: Limits | None = None, *, has_shell: bool = False) -> None:
        """has_shell: the system's programs are there, and a Command can be run."""
        require_sandbox()
        self.size = size
        self.limits = limits or Limits()
        self._boundary = find_boundary(has_shell=has_shell)
        self._homes = find_homes()
        self._owner = os.getpid()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._cells: set[Cell] = set()
        self._turns = threading.Semaphore(size)
        self._in_flight = 0
        self._is_closed = False
        self._lock = threading.Lock()

    async def run(self, program: Program | Command, limits: Limits | None = None) -> Outcome:
        """How the program ended. Cancelling kills its sandbox. Raises SandboxFailed when the boundary broke."""
        job = self._submit(program, limits)
        try:
            return await asyncio.wrap_future(job.future)
        except asyncio.CancelledError:
            job.abandon()
            raise

    def run_sync(self, program: Program | Command, limits: Limits | None = None) -> Outcome:
        """The same for callers without an event loop. The deadline counts from when a sandbox takes the program."""
        job = self._submit(program, limits)
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    return job.future.result(timeout=POLL_SECONDS)
        except BaseException:
            job.abandon()
            raise

    def close(self) -> None:
        """Fails what waits, kills every sandbox, and returns when they are gone. May be called twice."""
        with self._lock:
            self._is_closed = True
            threads, cells = list(self._threads), list(self._cells)
        with contextlib.suppress(queue.Empty):
            while job := self._jobs.get_nowait():
                job.settle(SandboxFailed("the sandbox was closed"))
        for _ in threads:
            self._jobs.put(None)
        for cell in cells:
            cell.kill()
        for thread in threads:
            thread.join(timeout=JOIN_SECONDS)

    @property
    def process_ids(self) -> list[int]:
        """Process ids, on the host, of the sandboxes that wait or run."""
        with self._lock:
            return [pid for cell in self._cells for pid in cell.process_ids]

    def _submit(self, program: Program | Command, limits: Limits | None) -> _Job:
        job = _Job(program, limits or self.limits)
        with self._lock:
            if self._is_closed:
                raise SandboxFailed("the sandbox is closed")
            if os.getpid() != self._owner:
                raise SandboxFailed("this sandbox belongs to the process that forked this one. Make one here")
            self._in_flight += 1
            while len(self._threads) < 2 * min(self._in_flight, self.size):
                thread = threading.Thread(target=self._serve, name="sandbox", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._jobs.put(job)
        return job

    def _serve(self) -> None:
        """One thread: build a sandbox, take a turn, run one program, bury the sandbox, again."""
        cell: Cell | None = None
        while not self._is_closed:
            with contextlib.suppress(SandboxFailed):  # the next job tries again, and hears the reason
                cell = cell or self._build(self.limits.file_bytes)
            if not self._turns.acquire(timeout=POLL_SECONDS):
                continue
            try:
                job = self._jobs.get(timeout=POLL_SECONDS)
            except queue.Empty:
                self._turns.release()
                continue
            cell = self._attempt(job, cell) if job else self._release(cell)
        if cell:
            self._discard(cell)

    def _attempt(self, job: _Job, cell: Cell | None) -> Cell | None:
        """Settles the job and ends the turn; returns the sandbox if it was not used."""
        if not job.future.set_running_or_notify_cancel():
            return self._release(cell)
        try:
            try:
                cell = self._fit(cell, job.limits.file_bytes)
                job.give(cell)
                cell.execute(job.program, job.limits)
            finally:
                self._release(cell)
            job.settle(cell.conclude())
        except SandboxFailed as error:
            job.settle(error)
        except Exception as error:  # the rim: a thread that dies would leave its callers waiting for ever
            job.settle(SandboxFailed(f"{type(error).__name__}: {error}"))
        if cell:
            self._discard(cell)
        return None

    def _release(self, cell: Cell | None) -> Cell | None:
        """Ends this thread's turn."""
        with self._lock:
            self._in_flight -= 1
        self._turns.release()
        return cell

    def _fit(self, cell: Cell | None, file_bytes: int) -> Cell:
        """The sandbox at hand, or a new one where it died waiting or its disk has another size."""
        if cell and cell.file_bytes == file_bytes and cell.is_alive():
            return cell
        if cell:
            self._discard(cell)
        return self._build(file_bytes)

    def _build(self, file_bytes: int) -> Cell:
        try:
            cell = Cell(self._boundary, self._homes, file_bytes)
        except OSError as error:
            raise SandboxFailed(f"the sandbox could not be built: {error}") from error
        with self._lock:
            self._cells.add(cell)
        try:
            cell.wait_ready()
            if self._is_closed:
                raise SandboxFailed("the sandbox was closed")
        except SandboxFailed:
            self._discard(cell)
            raise
        return cell

    def _discard(self, cell: Cell) -> None:
        cell.close()
        with self._lock:
            self._cells.discard(cell)


class _Job:
    """A program on its way, and the sandbox it is in once it has one."""

    def __init__(self, program: Program | Command, limits: Limits) -> None:
        self.program = program
        self.limits = limits
        self.future: Future[Outcome] = Future()
        self._cell: Cell | None = None
        self._is_abandoned = False
        self._lock = threading.Lock()

    def give(self, cell: Cell) -> None:
        with self._lock:
            if self._is_abandoned:
                raise SandboxFailed("the caller went away")
            self._cell = cell

    def abandon(self) -> None:
        """Nobody wants the outcome: ends the program now, wherever it is."""
        self.future.cancel()
        with self._lock:
            self._is_abandoned = True
            if self._cell:
                self._cell.kill()

    def settle(self, outcome: Outcome | SandboxFailed) -> None:
        with contextlib.suppress(InvalidStateError):  # the caller cancelled it meanwhile
            if isinstance(outcome, SandboxFailed):
                self.future.set_exception(outcome)
            else:
                self.future.set_result(outcome)
