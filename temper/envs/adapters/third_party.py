"""The rim around other people's packages: importing them, calling them with deadlines, naming what they raise.

Owns: the install line, TaskError with the third party's words, the seed of an episode. Refuses: waiting for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from temper.calls import DeadlinePassed
from temper.envs.threads import Worker
from temper.errors import TaskError, TemperError, UserError, install_line
from temper.types import Task

Result = TypeVar("Result")


def require_package(module: str, *, extra: str, package: str, what: str) -> Any:
    """The module, or a UserError with the line that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"{what} needs the package {package} ({error}). Run: {install_line(extra)}") from error


def episode_seed(task: Task, seed: int) -> int:
    """The task's own seed when its generator chose one, else one that depends on run and task and nothing else.

    Every member of a group starts from the same state: advantages compare answers, not luck at the start.
    """
    own = task.extra.get("episode_seed")
    return own if isinstance(own, int) else derived_seed(seed, task.id)


def derived_seed(seed: int, name: str | int) -> int:
    """31 bits: what every package takes."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=4).digest(), "big") >> 1


def failure(what: str, error: BaseException) -> TaskError:
    """The error in the third party's own words. Of an exception group, the first: the others follow."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return TaskError(f"{what} failed: {type(error).__name__}: {str(error) or 'no message'}")


async def within(work: Awaitable[Result], *, seconds: float, what: str) -> Result:
    """The result of an asynchronous call before its deadline; TaskError otherwise."""
    deadline = asyncio.timeout(seconds)
    try:
        async with deadline:
            return await work
    except TimeoutError as error:
        if not deadline.expired():  # the package's own
            raise failure(what, error) from error
        raise DeadlinePassed(f"{what} took longer than {seconds:g} s") from error
    except TemperError:
        raise
    except Exception as error:
        raise failure(what, error) from error


async def close_within(work: Awaitable[Any], *, seconds: float) -> None:
    """For close(): what was played and paid stays so, whatever goes wrong on the way out."""
    with contextlib.suppress(TaskError):
        await within(work, seconds=seconds, what="close")


class EpisodeThread:
    """The daemon thread in which one episode's synchronous package runs. One that hangs blocks nobody else."""

    def __init__(self, name: str, *, seconds: float) -> None:
        self._name = name
        self._seconds = seconds
        self._worker: Worker | None = None

    async def call(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """What the function returns; DeadlinePassed or another TaskError otherwise."""
        if self._worker is None:
            self._worker = Worker(self._name)
        try:
            return await self._worker.call(partial(function, *arguments), self._seconds)  # type: ignore[no-any-return]
        except TemperError:
            raise
        except Exception as error:
            raise failure(self._name, error) from error

    async def close(self, last: Callable[[], Any] | None = None) -> None:
        """Makes the last call and ends the thread; one that hangs makes it when it comes back."""
        worker, self._worker = self._worker, None
        if worker is None:
            return
        if last is not None and not worker.is_stuck:
            await close_within(worker.call(last, self._seconds), seconds=self._seconds + 1.0)
            last = None
        worker.stop(last)
