"""A burst is taken up in order, a few in each turn of the event loop; nobody is forgotten."""

from __future__ import annotations

import asyncio

from temper.turnstile import Turnstile, take_turn


async def turn_of_each(turnstile: Turnstile, count: int, cancelled: int | None = None) -> list[tuple[int, int]]:
    """Who passed, and in which turn of the event loop."""
    passed: list[tuple[int, int]] = []
    turn = 0

    async def one(number: int) -> None:
        await turnstile.enter()
        passed.append((number, turn))

    tasks = [asyncio.create_task(one(number)) for number in range(count)]
    while len(passed) < count - (cancelled is not None):
        await asyncio.sleep(0)
        turn += 1
        if turn == 1 and cancelled is not None:
            tasks[cancelled].cancel()
        assert turn < 100, "somebody is forgotten"
    return passed


def test_a_burst_passes_in_order_a_few_in_each_turn() -> None:
    passed = asyncio.run(turn_of_each(Turnstile(4), 11))
    assert [number for number, _ in passed] == list(range(11))
    turns = [turn for _, turn in passed]
    assert max(map(turns.count, turns)) == 4
    assert len(set(turns)) == 3


def test_few_do_not_wait_and_one_who_left_the_queue_takes_no_place() -> None:
    assert [turn for _, turn in asyncio.run(turn_of_each(Turnstile(4), 4))] == [0] * 4
    passed = asyncio.run(turn_of_each(Turnstile(2), 6, cancelled=3))
    assert [number for number, _ in passed] == [0, 1, 2, 4, 5]
    assert len({turn for _, turn in passed}) == 3


def test_it_is_as_new_when_the_burst_is_over() -> None:
    async def twice() -> list[list[tuple[int, int]]]:
        turnstile = Turnstile(4)
        first = await turn_of_each(turnstile, 6)
        await asyncio.sleep(0.01)
        return [first, await turn_of_each(turnstile, 6)]

    first, second = asyncio.run(twice())
    assert first == second


def test_every_event_loop_has_its_own() -> None:
    async def leave() -> None:
        for _ in range(40):
            asyncio.ensure_future(take_turn())  # noqa: RUF006 - a loop that ends in the middle of a burst
        await asyncio.sleep(0)

    asyncio.run(leave())
    asyncio.run(asyncio.wait_for(take_turn(), 1.0))
