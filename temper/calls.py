"""Calls of users' code from the event loop: with deadlines, and left behind where they cannot be ended.

Owns: exceptions that would end more than the call, coroutines that swallow their cancellation, the account of what is
waited for, the end of an event loop in which something will not end, naming code that holds the loop.
Refuses: running synchronous code (envs/threads.py), and saying what a failure means; callers do.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import sys
import sysconfig
import threading
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from pathlib import Path
from typing import Any, TypeVar

from temper.errors import BackendError, TaskError, TemperError
from temper.storable import written_out
from temper.terminal import SafeConsole

Result = TypeVar("Result")

GRACE_SECONDS = 5.0
"""For a coroutine that was cancelled to clean up. One that still goes on is left where it stands and never resumed."""
CLOSE_SECONDS = 30.0
"""For what a user's code does to close."""
HELD_NOTICE_SECONDS = 30.0
"""After so long in one step of a coroutine, code that holds the event loop is named."""
HELD_LIMIT_SECONDS = 1800.0
"""After so long the process ends: nothing else can end such code, and nothing else has run meanwhile."""

SHOWN_FRAMES = 3
"""Of code that holds it: the innermost one may be the standard library's."""
HELD_ADVICE = (
    "It cannot be interrupted, and nothing else runs meanwhile. Await what is slow, or make it a synchronous "
    "environment (InThread), which has a thread of its own"
)


class DeadlinePassed(TaskError):
    """The call took longer than it may. It was given up and goes on alone, or nowhere."""


WAITING: Counter[str] = Counter()
"""Calls under way, by name. Of the whole process, as the event loop is."""


@contextlib.contextmanager
def waiting_for(name: str) -> Iterator[None]:
    """Counts a call, so that a run which stands still can say what for."""
    WAITING[name] += 1
    try:
        yield
    finally:
        WAITING[name] -= 1
        if not WAITING[name]:
            del WAITING[name]


def describe_waiting() -> str:
    """What is waited for now, the most frequent first; '' when it is nothing."""
    return ", ".join(f"{count} x {name}" for name, count in WAITING.most_common(5))


def first_error(error: BaseException) -> BaseException:
    """The one that a user should read, of an exception that may be a group of groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def is_end_of_task(error: BaseException) -> bool:
    """Whether an exception ends the current task from outside: a cancellation that somebody asked for, or its loop is
    gone. The same types raised by users' code are errors like any other."""
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0
    return isinstance(error, GeneratorExit)


def describe_error(error: BaseException) -> str:
    text = written_out(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def explain_error(error: BaseException) -> str:
    """'ZeroDivisionError: division by zero, in worlds.py, line 12': what users' code raised, and the innermost line of
    its author. What Temper raises on purpose says all of that itself."""
    if isinstance(error, TemperError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_NOT_THE_USERS)] or frames
    if not own:
        return describe_error(error)
    path = own[-1].filename
    near = os.path.relpath(path) if Path(path).is_relative_to(Path.cwd()) else path
    return f"{describe_error(error)}, in {near}, line {own[-1].lineno}"


_NOT_THE_USERS = (
    str(Path(__file__).parent) + os.sep,
    *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")},
    os.path.join(sys.prefix, "lib"),
    "<frozen",
)
"""Where files begin that the user did not write: Temper, Python, installed packages."""


async def call(work: Awaitable[Any], seconds: float, name: str) -> Any:
    """What users' code returns or raises as an Exception, or DeadlinePassed after `seconds`.

    It runs in a task of its own: a coroutine that swallows its cancellation must not keep its caller.
    """
    steps = _Steps(work, name)
    task = asyncio.ensure_future(steps.run())
    _RUNNING.add(task)
    task.add_done_callback(_forget)
    try:
        with waiting_for(name):
            await asyncio.wait({task}, timeout=seconds)
    finally:
        if is_late := not task.done():  # the deadline, or the caller was cancelled
            task.cancel()
            asyncio.get_running_loop().call_later(GRACE_SECONDS, steps.leave, task)
    if is_late:
        raise DeadlinePassed(f"{name} took longer than {seconds:g} s")
    if task.cancelled():  # by itself: passed on, it would look as if the whole episode was
        raise TaskError(f"{name} cancelled itself")
    return await task


class _Steps:
    """Awaits a coroutine step by step. Left, it is not resumed, whatever it waits for."""

    def __init__(self, work: Awaitable[Any], name: str) -> None:
        self._steps = _awaited(work).__await__()
        self._name = name
        self._is_left = False

    async def run(self) -> Any:
        return await self

    def leave(self, task: asyncio.Future[Any]) -> None:
        if task.done():
            return
        self._is_left = True
        _keep_for_ever(self)
        task.cancel()

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._steps
        thrown: BaseException | None = None
        while True:
            try:
                with WATCH.inside(self._name):
                    waited = steps.send(None) if thrown is None else steps.throw(thrown)
            except StopIteration as end:
                return end.value
            except (SystemExit, KeyboardInterrupt) as error:  # would end the event loop
                raise TaskError(f"{describe_error(error)} in {self._name}") from error
            thrown = None
            try:
                yield waited
            except BaseException as error:
                thrown = error
            if self._is_left:
                raise asyncio.CancelledError


async def _awaited(work: Awaitable[Any]) -> Any:
    return await work


def _keep_for_ever(unending: object) -> None:
    """Also beyond the end of the interpreter: a coroutine that is collected is entered once more, to be closed, and one
    that swallows that too would spin there without end."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(unending))


_RUNNING: set[asyncio.Future[Any]] = set()
"""The loop itself holds tasks only weakly."""


def _forget(task: asyncio.Future[Any]) -> None:
    _RUNNING.discard(task)
    if not task.cancelled():
        task.exception()  # read, or a task that failed after its deadline would be reported as never looked at


class LoopWatch:
    """Names code that holds the event loop. It cannot be interrupted, and everything else stands still meanwhile."""

    def __init__(
        self,
        *,
        notice_seconds: float = HELD_NOTICE_SECONDS,
        limit_seconds: float = HELD_LIMIT_SECONDS,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self._notice_seconds = notice_seconds
        self._limit_seconds = limit_seconds
        self._end = end
        self._inside: dict[int, tuple[str, float]] = {}
        """By thread: what runs in its loop, and since when."""
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Around one step of users' code in the event loop."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="watch over the event loop", daemon=True)
            self._thread.start()
        thread = threading.get_ident()
        self._inside[thread] = (name, time.monotonic())
        try:
            yield
        finally:
            self._inside.pop(thread, None)

    def _watch(self) -> None:
        told = None
        while True:
            time.sleep(min(1.0, self._notice_seconds / 4))
            for thread, seen in list(self._inside.items()):
                held = time.monotonic() - seen[1]
                if held > self._notice_seconds and seen is not told:
                    told = seen
                    _tell_of(thread, seen[0], held, HELD_ADVICE)
                if held > self._limit_seconds:
                    _tell_of(thread, seen[0], held, "The run ends here; --resume goes on from its last checkpoint")
                    self._end(BackendError.exit_code)
                    return


def _tell_of(thread: int, name: str, held: float, advice: str) -> None:
    stack = traceback.extract_stack(sys._current_frames().get(thread), limit=SHOWN_FRAMES)
    where = ", called".join(f" at {frame.filename}:{frame.lineno} in {frame.name}" for frame in reversed(stack))
    told = f"temper: {name} has held the event loop for {held:.0f} s{where}. {advice}."
    SafeConsole(stderr=True, soft_wrap=True).print(told, highlight=False)


WATCH = LoopWatch()
"""Of the whole process, as the event loop is."""


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """In an event loop of its own."""
    with EventLoop() as loop:
        return loop.run(main)


class EventLoop:
    """asyncio.Runner, but what will not be cancelled is not waited for, and sys.exit in some task is no quiet end. What
    one run() leaves open is there in the next."""

    def __enter__(self) -> EventLoop:
        self._runner = asyncio.Runner()
        self._runner.__enter__()
        return self

    def run(self, main: Coroutine[Any, Any, Result]) -> Result:
        try:
            return self._runner.run(main)
        except SystemExit as error:
            raise BackendError(
                f"code in the event loop called sys.exit({error.code!r}). Raise an exception there instead; the run is "
                "not finished"
            ) from error

    def __exit__(self, *_: object) -> None:
        try:
            self._runner.run(_end_others())
        finally:
            self._runner.close()


async def _end_others() -> None:
    """Ends all other tasks, within a bound. Runner.close() waits for those it knows as long as they please."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=GRACE_SECONDS)
    for task in others:
        if not task.done():
            _keep_for_ever(task)
            asyncio._unregister_task(task)  # type: ignore[attr-defined]
