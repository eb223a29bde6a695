"""What an episode may draw: refused calls use nothing up, and a call waits for what others hold and may not draw."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from temper.envs.agents.allowance import Allowance, LimitReached
from temper.errors import TaskError
from temper.types import Status


def run(play: Callable[[Allowance], Awaitable[None]], *, max_calls: int = 8, max_tokens: int = 10) -> None:
    async def main() -> None:
        await play(Allowance(max_calls=max_calls, max_tokens=max_tokens, told="no tokens", seconds=30.0))

    asyncio.run(main())


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_call_is_granted_what_it_wants_while_there_is_so_much() -> None:
    async def play(allowance: Allowance) -> None:
        assert await allowance.take([4]) == [4]
        assert await allowance.take([6]) == [6]
        allowance.end_call(4, 4)
        allowance.end_call(6, 6)
        with pytest.raises(LimitReached, match=r"^no tokens$") as refused:
            await allowance.take([1])
        assert refused.value.status is Status.TRUNCATED_LENGTH

    run(play)


def test_a_call_waits_for_what_others_hold_and_do_not_draw() -> None:
    async def play(allowance: Allowance) -> None:
        await allowance.take([8])
        waiting = asyncio.ensure_future(allowance.take([8]))
        await settle()
        assert not waiting.done(), "2 are free beside what is held: too few for the whole answer"
        allowance.end_call(8, 2)
        assert await waiting == [8], "the other drew 2 of 10"

    run(play)


def test_a_call_that_waited_gets_what_is_really_left_or_is_refused() -> None:
    async def play(allowance: Allowance) -> None:
        await allowance.take([10])
        first, second = (asyncio.ensure_future(allowance.take([8])) for _ in range(2))
        await settle()
        allowance.end_call(10, 7)
        assert await first == [3]
        await settle()
        assert not second.done()
        allowance.end_call(3, 3)
        with pytest.raises(LimitReached):
            await second

    run(play)


def test_calls_that_wait_go_in_the_order_they_came_in() -> None:
    async def play(allowance: Allowance) -> None:
        await allowance.take([9])
        large, small = asyncio.ensure_future(allowance.take([9])), asyncio.ensure_future(allowance.take([1]))
        await settle()
        assert not small.done(), "one that wants little would keep a larger one waiting for good"
        allowance.end_call(9, 0)
        assert (await large, await small) == ([9], [1])

    run(play)


def test_a_call_whose_client_has_gone_holds_up_nobody() -> None:
    async def play(allowance: Allowance) -> None:
        await allowance.take([9])
        gone, other = asyncio.ensure_future(allowance.take([9])), asyncio.ensure_future(allowance.take([1]))
        await settle()
        gone.cancel()
        assert await other == [1]

    run(play)


def test_what_is_refused_or_given_back_uses_nothing_up() -> None:
    async def play(allowance: Allowance) -> None:
        for _ in range(3):
            with pytest.raises(LimitReached, match="made its 2 calls") as refused:
                await allowance.take([1, 1, 1])
            assert refused.value.status is None, "no episode has so many"
            (held,) = await allowance.take([10])
            allowance.give_back(held)
        assert await allowance.take([5, 5]) == [5, 5]
        with pytest.raises(LimitReached, match=r"made its 2 calls \(rollout.max_turns\)$") as refused:
            await allowance.take([1])
        assert refused.value.status is Status.TRUNCATED_TURNS

    run(play, max_calls=2)


def test_answers_of_one_call_share_what_is_left_or_none_is_begun() -> None:
    async def play(allowance: Allowance) -> None:
        assert await allowance.take([2, 80, 80]) == [2, 4, 4]
        allowance.end_call(10, 8)
        for count, status in ((3, Status.TRUNCATED_LENGTH), (11, None)):
            with pytest.raises(LimitReached, match=f"no tokens, but for 2, and {count} answers") as refused:
                await allowance.take([1] * count)
            assert refused.value.status is status, "what was drawn is why, where an episode has so much at all"
        assert await allowance.take([80]) == [2]

    run(play, max_calls=20)


def test_nobody_waits_after_the_end_of_an_episode() -> None:
    async def play(allowance: Allowance) -> None:
        await allowance.take([10])
        waiting = asyncio.ensure_future(allowance.take([1]))
        await settle()
        allowance.end()
        with pytest.raises(TaskError, match="over"):
            await waiting

    run(play)


def test_without_a_limit_of_tokens_nobody_waits() -> None:
    async def play(allowance: Allowance) -> None:
        assert [await allowance.take([80]) for _ in range(3)] == [[80]] * 3

    run(play, max_tokens=0)
