"""Users' code ends its own call and nothing else: deadlines, exits, cancellations, refusals, loops."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from temper import calls
from temper.calls import DeadlinePassed, LoopWatch, call, describe_waiting, is_end_of_task, run, waiting_for
from temper.errors import BackendError, TaskError


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "GRACE_SECONDS", 0.1)


class Stubborn:
    """A retry loop that swallows everything, its cancellation included."""

    def __init__(self) -> None:
        self.tries = 0

    async def retry(self) -> None:
        while True:
            try:
                self.tries += 1
                await asyncio.sleep(0.01)
            except:  # noqa: E722 - the fault under test
                continue


def test_a_loop_that_swallows_its_cancellation_is_left_and_never_resumed() -> None:
    stubborn = Stubborn()

    async def play() -> tuple[int, int]:
        with pytest.raises(DeadlinePassed, match="the tool took longer"):
            await call(stubborn.retry(), 0.05, "the tool")
        await asyncio.sleep(0.3)
        before = stubborn.tries
        await asyncio.sleep(0.1)
        return before, stubborn.tries

    before, after = asyncio.run(play())
    assert 0 < before == after


def test_one_that_only_needs_time_to_clean_up_gets_it() -> None:
    cleaned = []

    async def tidy() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.02)
            cleaned.append(True)

    async def play() -> None:
        with pytest.raises(DeadlinePassed):
            await call(tidy(), 0.01, "the tool")
        await asyncio.sleep(0.08)

    asyncio.run(play())
    assert cleaned == [True]


def test_a_cancelled_caller_does_not_wait_for_what_it_called() -> None:
    async def play() -> float:
        caller = asyncio.ensure_future(call(Stubborn().retry(), 60, "the tool"))
        await asyncio.sleep(0.02)
        started = time.monotonic()
        caller.cancel()
        await asyncio.wait({caller}, timeout=10)
        assert caller.cancelled()
        return time.monotonic() - started

    assert run(play()) < 5


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, asyncio.CancelledError])
@pytest.mark.parametrize("is_late", [False, True])
def test_what_would_end_the_loop_or_the_task_is_an_error_of_the_call(kind: type[BaseException], is_late: bool) -> None:
    async def leave() -> None:
        if is_late:
            await asyncio.sleep(0)
        raise kind

    async def play() -> None:
        await call(leave(), 5, "the tool")

    with pytest.raises(TaskError, match="the tool"):
        asyncio.run(play())


def test_a_cancellation_that_somebody_asked_for_is_told_from_one_that_is_raised() -> None:
    async def outcome(work: Callable[[], Any]) -> bool:
        try:
            await work()
        except BaseException as error:
            return is_end_of_task(error)
        raise AssertionError("nothing was raised")

    async def raised() -> None:
        raise asyncio.CancelledError

    async def play() -> tuple[bool, bool]:
        own = await outcome(raised)
        task = asyncio.ensure_future(outcome(lambda: asyncio.sleep(60)))
        await asyncio.sleep(0)
        task.cancel()
        return own, await task

    assert asyncio.run(play()) == (False, True)


def test_the_end_of_a_loop_is_bounded_also_for_tasks_that_users_code_made() -> None:
    stubborn = Stubborn()

    async def play() -> str:
        stubborn.task = asyncio.ensure_future(stubborn.retry())  # type: ignore[attr-defined]
        await asyncio.sleep(0.02)
        return "done"

    started = time.monotonic()
    assert run(play()) == "done"
    assert time.monotonic() - started < 30


def test_an_exit_in_a_task_that_users_code_made_is_no_quiet_end() -> None:
    async def leave() -> None:
        sys.exit(0)

    tasks: list[asyncio.Future[None]] = []

    async def play() -> None:
        tasks.append(asyncio.ensure_future(leave()))
        await asyncio.sleep(1)

    with pytest.raises(BackendError, match=r"sys.exit\(0\)"):
        run(play())
    assert isinstance(tasks[0].exception(), SystemExit)


def test_what_is_waited_for_is_counted_while_it_is() -> None:
    async def play() -> str:
        work = [asyncio.ensure_future(call(asyncio.sleep(0.05), 5, "step() of x")) for _ in range(3)]
        await asyncio.sleep(0.01)
        with waiting_for('reward "y"'):
            said = describe_waiting()
        await asyncio.gather(*work)
        return said

    assert asyncio.run(play()) == '3 x step() of x, 1 x reward "y"'
    assert describe_waiting() == ""


def test_code_that_holds_the_event_loop_is_named_and_at_last_ends_the_process(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ended, codes = threading.Event(), []

    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    watch = LoopWatch(notice_seconds=0.05, limit_seconds=0.2, end=end)
    with watch.inside('step() of env "busy"'):
        while not ended.is_set():  # holds its thread
            pass
    said = capsys.readouterr().err
    assert codes == [BackendError.exit_code]
    assert 'step() of env "busy" has held the event loop' in said
    assert "test_calls.py" in said
