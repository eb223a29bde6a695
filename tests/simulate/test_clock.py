"""Virtual time: it jumps, deadlines follow it, and work in threads takes as long as it says."""

from __future__ import annotations

import asyncio
import time

import pytest

from temper.simulate.clock import Deadlock, run_virtual, spend


def now() -> float:
    return asyncio.get_running_loop().time()


def test_a_day_of_sleep_takes_no_time() -> None:
    async def sleep() -> float:
        await asyncio.sleep(86_400.0)
        return now()

    started = time.process_time()
    assert run_virtual(sleep()) == pytest.approx(86_400.0)
    assert time.process_time() - started < 5.0


def test_timers_ring_in_their_order_and_at_their_time() -> None:
    async def run() -> list[tuple[str, float]]:
        rung: list[tuple[str, float]] = []

        async def ring(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            rung.append((name, now()))

        await asyncio.gather(ring("third", 1e6), ring("first", 0.25), ring("second", 3.0))
        return rung

    assert run_virtual(run()) == [("first", 0.25), ("second", 3.0), ("third", pytest.approx(1e6))]


def test_deadlines_pass_on_virtual_time() -> None:
    async def run() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(600.0):
                await asyncio.sleep(601.0)
        return now()

    assert run_virtual(run()) == pytest.approx(600.0)


def test_work_in_a_thread_takes_the_time_that_it_spends_while_others_go_on() -> None:
    def work() -> str:
        spend(7.0)
        spend(0.5)
        return "done"

    async def run() -> tuple[str, float, float]:
        other = asyncio.create_task(asyncio.sleep(2.0, result=None))
        other.add_done_callback(lambda _: ends.append(now()))
        ends: list[float] = []
        said = await asyncio.to_thread(work)
        return said, now(), ends[0]

    assert run_virtual(run()) == ("done", pytest.approx(7.5), pytest.approx(2.0))


def test_work_that_fails_raises_after_its_time() -> None:
    def work() -> None:
        spend(3.0)
        raise ValueError("no")

    async def run() -> float:
        with pytest.raises(ValueError, match="no"):
            await asyncio.to_thread(work)
        return now()

    assert run_virtual(run()) == pytest.approx(3.0)


def test_a_wait_that_nothing_ends_is_found_at_once() -> None:
    async def run() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Deadlock, match="no deadline would end it"):
        run_virtual(run())


def test_a_clock_that_shows_years_still_moves_on() -> None:
    """Beside years a microsecond is lost in rounding: a timer that is due must ring all the same."""

    async def run() -> int:
        await asyncio.sleep(1e9)
        for _ in range(100):
            await asyncio.sleep(1e-8)
        return 100

    assert run_virtual(run()) == 100
