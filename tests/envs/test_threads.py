"""A hanging environment costs one thread: nobody else waits, the count is bounded, and episodes share nothing."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from temper.calls import DeadlinePassed
from temper.envs.single_turn import SingleTurn
from temper.envs.threads import (
    Abandoned,
    InThread,
    check_isolation_of_episodes,
    run_in_thread,
    run_with_deadline,
)
from temper.errors import BackendError, TaskError, UserError
from temper.protocols import EnvOpening, EnvReply
from temper.types import Message, Task

TASK = Task(id="t", messages=(Message(role="user", content="go"),), extra={"size": 1})
HELLO = Message(role="assistant", content="hello")


@pytest.fixture
def gate() -> threading.Event:
    """Hanging code waits here; opened at the end so that no thread outlives its test."""
    event = threading.Event()
    yield event  # type: ignore[misc]
    event.set()


@dataclass
class Sync:
    """Notes in which thread it is called."""

    fault: Callable[[], object] = lambda: None
    threads: list[int] = field(default_factory=list)
    is_closed: bool = False

    def start(self, task: Task, seed: int) -> EnvOpening:
        self.threads.append(threading.get_ident())
        return EnvOpening(messages=task.messages)

    def step(self, message: Message) -> EnvReply:
        self.threads.append(threading.get_ident())
        self.fault()
        return EnvReply(messages=(Message(role="user", content=message.content.upper()),))

    def close(self) -> None:
        self.threads.append(threading.get_ident())
        self.is_closed = True


def test_a_synchronous_environment_plays_in_one_thread_of_its_own() -> None:
    async def play() -> Sync:
        inner = Sync()
        env = InThread(lambda: inner)
        assert (await env.start(TASK, 0)).messages == TASK.messages
        assert (await env.step(HELLO)).messages[0].content == "HELLO"
        await env.close()
        return inner

    inner = asyncio.run(play())
    assert inner.is_closed
    assert len(set(inner.threads)) == 1
    assert threading.get_ident() not in inner.threads


def test_a_hanging_environment_blocks_no_other_and_closes_when_it_comes_back(gate: threading.Event) -> None:
    async def play() -> tuple[Sync, Abandoned]:
        abandoned = Abandoned()
        stuck = Sync(fault=lambda: gate.wait(30))
        hanging = InThread(lambda: stuck, seconds=0.1, abandoned=abandoned)
        healthy = InThread(Sync, seconds=30, abandoned=abandoned)
        await hanging.start(TASK, 0)
        await healthy.start(TASK, 0)
        waiting = asyncio.ensure_future(hanging.step(HELLO))
        for _ in range(20):
            await healthy.step(HELLO)
        with pytest.raises(DeadlinePassed, match="longer than"):
            await waiting
        await healthy.close()
        await hanging.close()  # returns at once
        assert not stuck.is_closed
        assert abandoned.count == 1
        gate.set()
        async with asyncio.timeout(10):
            while abandoned.count:
                await asyncio.sleep(0.01)
        return stuck, abandoned

    stuck, abandoned = asyncio.run(play())
    assert stuck.is_closed
    assert abandoned.count == 0


def test_too_many_hanging_threads_stop_the_run_and_name_the_culprit(gate: threading.Event) -> None:
    async def play() -> None:
        abandoned = Abandoned(limit=3)
        for _ in range(3):
            with pytest.raises(DeadlinePassed):
                await run_in_thread(lambda: gate.wait(30), seconds=0.01, name="tool slow", abandoned=abandoned)
        with pytest.raises(BackendError, match="3 in tool slow"):
            await run_in_thread(lambda: 1, seconds=1, name="tool quick", abandoned=abandoned)
        with pytest.raises(BackendError):
            await InThread(Sync, abandoned=abandoned).start(TASK, 0)

    asyncio.run(play())


def test_a_cancelled_episode_gives_its_thread_up(gate: threading.Event) -> None:
    async def play() -> int:
        abandoned = Abandoned()
        env = InThread(lambda: Sync(fault=lambda: gate.wait(30)), abandoned=abandoned)
        await env.start(TASK, 0)

        async def turn() -> None:
            try:
                await env.step(HELLO)
            finally:
                await env.close()

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(turn(), 0.05)
        return abandoned.count

    assert asyncio.run(play()) == 1


def test_what_the_code_raises_reaches_the_caller_and_an_exit_ends_nothing() -> None:
    async def fail(function: Callable[[], object]) -> None:
        await run_in_thread(function, seconds=5, name="tool")

    with pytest.raises(ZeroDivisionError):
        asyncio.run(fail(lambda: 1 // 0))
    with pytest.raises(RuntimeError, match="StopIteration"):
        asyncio.run(fail(lambda: next(iter(()))))
    with pytest.raises(TaskError, match="SystemExit"):
        asyncio.run(fail(lambda: sys.exit(0)))


def test_an_async_function_that_refuses_to_be_cancelled_is_not_waited_for() -> None:
    async def stubborn() -> None:
        for _ in range(50):
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                continue
            return

    async def play() -> None:
        with pytest.raises(DeadlinePassed):
            await run_with_deadline(stubborn, 0.01, "tool stubborn")

    asyncio.run(play())


def test_an_async_function_that_cancels_itself_or_exits_ends_nothing_but_its_episode() -> None:
    async def cancel() -> None:
        raise asyncio.CancelledError

    async def leave() -> None:
        sys.exit(0)

    for function in (cancel, leave):
        with pytest.raises(TaskError):
            asyncio.run(run_with_deadline(function, 5, "tool"))


def test_functions_of_every_kind_are_awaited() -> None:
    async def answer() -> int:
        return 3

    async def play() -> list[int]:
        return [await run_with_deadline(function, 5, "tool") for function in (answer, lambda: answer(), lambda: 3)]

    assert asyncio.run(play()) == [3, 3, 3]


SEEN: list[str] = []


class Leaky:
    """Planted: remembers in a list that all episodes share."""

    async def start(self, task: Task, seed: int) -> EnvOpening:
        return EnvOpening(messages=task.messages)

    async def step(self, message: Message) -> EnvReply:
        SEEN.append(message.content)
        return EnvReply(messages=(Message(role="user", content=f"you said {len(set(SEEN))} things"),))

    async def close(self) -> None:
        SEEN.clear() if self.cleans_up else None

    cleans_up = False


class LeakyBesides(Leaky):
    """Planted: cleans up when it closes, so only episodes that run at the same time meet."""

    cleans_up = True


class Scribbler(SingleTurn):
    """Planted: writes into the task."""

    async def step(self, message: Message) -> EnvReply:
        TASK.extra["size"] += 1  # type: ignore[index, operator]
        return EnvReply(is_done=True)


def check(make: Callable[[], object]) -> None:
    SEEN.clear()
    check_task = Task(id="t", messages=TASK.messages, extra=TASK.extra)
    asyncio.run(check_isolation_of_episodes(make, check_task, said=("a", "b"), other=("x", "y", "z")))  # type: ignore[arg-type]


def test_an_environment_that_keeps_to_itself_passes() -> None:
    check(SingleTurn)
    check(lambda: InThread(Sync))


@pytest.mark.parametrize(
    ("make", "reason"),
    [(Leaky, "after another episode"), (LeakyBesides, "beside another episode"), (Scribbler, "changed its task")],
)
def test_an_environment_that_leaks_is_caught(make: Callable[[], object], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        check(make)
