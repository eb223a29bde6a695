"""Synchronous environments and tools in daemon threads, so that a hanging one costs a thread and never a run.

Owns: deadlines for code that cannot be cancelled, the bound on threads given up, the check that episodes share nothing.
Refuses: code that holds the interpreter's lock for ever (a C loop, a regular expression); that belongs in the sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import inspect
import queue
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from temper.calls import DeadlinePassed, call
from temper.errors import BackendError, TaskError, UserError
from temper.protocols import Env, EnvOpening, EnvReply
from temper.types import Message, Task

IDLE_SECONDS = 3600.0
"""A thread nobody has asked anything for so long ends by itself: its episode was lost."""


class Abandoned:
    """Threads given up and still running. They cannot be killed, so too many of them stop the run."""

    def __init__(self, limit: int = 64) -> None:
        self._limit = limit
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    @property
    def count(self) -> int:
        with self._lock:
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            return len(self._threads)

    def add(self, thread: threading.Thread) -> None:
        with self._lock:
            self._threads.append(thread)

    def require_room(self) -> None:
        """Raises BackendError when the limit is reached."""
        if self.count < self._limit:
            return
        names = Counter(thread.name for thread in self._threads)
        listed = ", ".join(f"{number} in {name}" for name, number in names.most_common(5))
        raise BackendError(
            f"{self._limit} threads hang in environments or tools and cannot be ended: {listed}. Give that code "
            "deadlines of its own, or run it in the sandbox"
        )


ABANDONED = Abandoned()
"""Abandoned threads of the whole process: threads belong to it, not to an episode."""


class Worker:
    """One daemon thread that makes calls in order. What needs to stay in one thread, e.g. SQLite, does."""

    def __init__(self, name: str, abandoned: Abandoned = ABANDONED) -> None:
        abandoned.require_room()
        self._abandoned = abandoned
        self.is_stuck = False
        """A call did not come back in time; what is asked after it waits behind it."""
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    async def call(self, function: Callable[[], Any], seconds: float) -> Any:
        """What the function returns or raises, or DeadlinePassed. The worker is of no use after that."""
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

        def settle(value: Any, error: BaseException | None) -> None:
            if not outcome.done():
                outcome.set_result((value, error))

        def work() -> None:
            value, error = None, None
            try:
                value = function()
            except BaseException as problem:  # sys.exit() in a user's tool must end neither thread nor run
                error = problem
            with contextlib.suppress(RuntimeError):  # the loop is closed, and with it whoever asked
                loop.call_soon_threadsafe(settle, value, error)

        self._jobs.put(work)
        try:
            await asyncio.wait({outcome}, timeout=seconds)
        finally:
            if not outcome.done():  # the deadline, or the episode was cancelled
                self.is_stuck = True
                self._abandoned.add(self._thread)
        if self.is_stuck:
            outcome.cancel()
            raise DeadlinePassed(f"{self._thread.name} took longer than {seconds:g} s")
        value, error = await outcome
        if error is None:
            return value
        raise error if isinstance(error, Exception) else TaskError(f"{type(error).__name__} in {self._thread.name}")

    def stop(self, last: Callable[[], Any] | None = None) -> None:
        """Ends the thread once it is free, after a last call that nobody waits for and whose errors nobody reads."""
        if last is not None:
            self._jobs.put(lambda: _quietly(last))
        self._jobs.put(None)

    def _serve(self) -> None:
        try:
            while (job := self._jobs.get(timeout=IDLE_SECONDS)) is not None:
                job()
        except queue.Empty:
            return


def _quietly(function: Callable[[], Any]) -> None:
    with contextlib.suppress(Exception):
        function()


async def run_in_thread(
    function: Callable[[], Any], *, seconds: float, name: str, abandoned: Abandoned = ABANDONED
) -> Any:
    """One call in a thread of its own, or DeadlinePassed."""
    worker = Worker(name, abandoned)
    try:
        return await worker.call(function, seconds)
    finally:
        worker.stop()


async def run_with_deadline(function: Callable[[], Any], seconds: float, name: str) -> Any:
    """What a function, sync or async, returns or raises, or DeadlinePassed. Async ones must not block the loop."""
    if inspect.iscoroutinefunction(function):
        return await call(function(), seconds, name)
    value = await run_in_thread(function, seconds=seconds, name=name)
    return await call(value, seconds, name) if inspect.isawaitable(value) else value


class SyncEnv(Protocol):
    """An environment without async: start once, step, close."""

    def start(self, task: Task, seed: int) -> EnvOpening: ...

    def step(self, message: Message) -> EnvReply: ...

    def close(self) -> None: ...


class InThread:
    """Makes an Env of a SyncEnv: all its calls, construction included, in one daemon thread with deadlines."""

    def __init__(self, make: Callable[[], SyncEnv], *, seconds: float = 30.0, abandoned: Abandoned = ABANDONED) -> None:
        self._make = make
        self._seconds = seconds
        self._name = getattr(make, "__name__", type(make).__name__)
        self._abandoned = abandoned
        self._worker: Worker | None = None
        self._env: SyncEnv | None = None

    async def start(self, task: Task, seed: int) -> EnvOpening:
        assert self._worker is None, "an environment is single-use"
        self._worker = Worker(self._name, self._abandoned)
        return await self._call(lambda: self._make_and_start(task, seed))

    async def step(self, message: Message) -> EnvReply:
        env = self._env
        assert env is not None, "start() comes first"
        return await self._call(lambda: env.step(message))

    async def close(self) -> None:
        """Closes in the same thread. One that hangs is not waited for; it closes when it comes back."""
        worker, self._worker = self._worker, None
        if worker is None:
            return
        if worker.is_stuck:
            worker.stop(self._close)
            return
        try:
            await worker.call(self._close, self._seconds)
        finally:
            worker.stop()

    def _make_and_start(self, task: Task, seed: int) -> EnvOpening:
        self._env = self._make()
        return self._env.start(task, seed)

    def _close(self) -> None:
        if self._env is not None:
            self._env.close()

    async def _call(self, function: Callable[[], Any]) -> Any:
        assert self._worker is not None, "the environment is closed"
        return await self._worker.call(function, self._seconds)


async def play_script(env: Env, task: Task, said: Sequence[str], seed: int = 0) -> list[EnvReply]:
    """What an environment answers to a policy that says these things, up to the end: for trying one out."""
    answers = [answer async for answer in _replies(env, task, said, seed)]
    return answers[1:]  # the first is the opening


async def check_isolation_of_episodes(
    make_env: Callable[[], Env], task: Task, *, said: Sequence[str], other: Sequence[str], seed: int = 0
) -> None:
    """Raises UserError unless an episode is the same alone, after another one, and side by side with it.

    `said` is what the policy says in the episode watched, `other` what it says in the one that must leave no trace.
    """
    alone = [reply async for reply in _replies(make_env(), task, said, seed)]
    before = copy.deepcopy(task)
    async for _ in _replies(make_env(), task, other, seed):
        pass
    if task != before:
        raise UserError(f"the environment changed its task {task.id}: every later episode would see another one")
    after = [reply async for reply in _replies(make_env(), task, said, seed)]
    _require_same(alone, after, "after another episode")
    watched, noise = _replies(make_env(), task, said, seed), _replies(make_env(), task, other, seed)
    beside = []
    async for reply in watched:
        beside.append(reply)
        await anext(noise, None)
    async for _ in noise:
        pass
    _require_same(alone, beside, "beside another episode")


async def _replies(env: Env, task: Task, said: Sequence[str], seed: int) -> Any:
    """What the environment says, turn by turn."""
    try:
        yield await env.start(task, seed)
        for text in said:
            reply = await env.step(Message(role="assistant", content=text))
            # How long a tool took is not part of an answer.
            events = tuple(dataclasses.replace(event, seconds=0.0) for event in reply.events)
            yield dataclasses.replace(reply, events=events)
            if reply.is_done:
                return
    finally:
        await env.close()


def _require_same(alone: Sequence[object], again: Sequence[object], when: str) -> None:
    if list(alone) == list(again):
        return
    turn = next((i for i, (a, b) in enumerate(zip(alone, again, strict=False)) if a != b), min(len(alone), len(again)))
    pair = [f"{answers[turn]!r:.300}" if turn < len(answers) else "nothing" for answers in (alone, again)]
    raise UserError(
        f"the environment leaks between episodes: {when}, its answer {turn} differs.\n  alone: {pair[0]}\n"
        f"  {when}: {pair[1]}\nKeep all state in self, made in start()."
    )
