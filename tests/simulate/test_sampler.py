"""The simulated sampler: seconds that can be worked out by hand, versions, limits, interruptions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from temper.simulate.clock import run_virtual
from temper.simulate.lengths import Lengths, fixed
from temper.simulate.sampler import SamplerLimits, SimulatedSampler
from temper.simulate.speeds import Speeds
from temper.types import Completion, Finish, Publication, Request, SamplingParams

PLAIN = Speeds(decode_step=1.0, decode_row=0.5, train_token=0.0)
BY_MEMBER: Lengths = lambda group, member: member  # noqa: E731


def request(member: int, prompt: int = 3, group: str = "g", longest: int = 1000) -> Request:
    params = SamplingParams(max_new_tokens=longest)
    return Request(id=f"stage 0/{group}/{member}/0", prompt_ids=(7,) * prompt, params=params)


def now() -> float:
    return asyncio.get_running_loop().time()


def run(
    play: Callable[[SimulatedSampler], Awaitable[Any]],
    *,
    speeds: Speeds = PLAIN,
    lengths: Lengths = BY_MEMBER,
    max_running: int = 8,
    **limits: int,
) -> Any:
    async def main() -> Any:
        return await play(SimulatedSampler(speeds, lengths, SamplerLimits(max_running=max_running, **limits)))

    return run_virtual(main())


async def ends(sampler: SimulatedSampler, *requests: Request) -> list[float]:
    """When each was answered."""

    async def ask(one: Request) -> float:
        await sampler.generate(one)
        return now()

    return await asyncio.gather(*map(ask, requests))


def test_fewer_sequences_are_faster_together() -> None:
    # Worked: three rows take 1 + 1.5 s a step, and the first ends after 2 of them; two take 2 s, one takes 1.5 s.
    found = run(lambda sampler: ends(sampler, request(2), request(5), request(6)))
    assert found == pytest.approx([5.0, 5.0 + 3 * 2.0, 5.0 + 3 * 2.0 + 1.5])


def test_what_exceeds_max_running_waits_its_turn() -> None:
    found = run(lambda sampler: ends(sampler, request(2), request(4), request(3)), max_running=2)
    # Worked: two rows for 2 steps of 2 s; the third takes the free place, both end after 2 and 3 more steps.
    assert found == pytest.approx([4.0, 8.0, 8.0 + 1.5])


def test_the_cache_limits_who_runs_together() -> None:
    found = run(lambda sampler: ends(sampler, request(4), request(4, group="h")), kv_tokens=13)
    assert found == pytest.approx([6.0, 12.0]), "7 tokens each: two do not fit into 13"


def test_equal_prompts_are_computed_once_until_the_weights_change() -> None:
    speeds = Speeds(decode_step=1.0, decode_row=0.0, prefill_token=0.1, train_token=0.0)
    same = run(lambda sampler: ends(sampler, request(2, 30), request(2, 30, "h")), speeds=speeds)
    other = run(lambda sampler: ends(sampler, request(2, 30), request(2, 20, "h")), speeds=speeds)
    assert same == pytest.approx([5.0, 5.0])
    assert other == pytest.approx([7.0, 7.0])

    async def after_a_load(sampler: SimulatedSampler) -> float:
        await ends(sampler, request(2, 30))
        await sampler.load(Publication(version=1, tensors={}))
        return (await ends(sampler, request(2, 30, "h")))[0]

    assert run(after_a_load, speeds=speeds) == pytest.approx(10.0)


def test_the_cache_that_grows_makes_steps_slower() -> None:
    speeds = Speeds(decode_step=1.0, decode_row=0.0, decode_kv=0.1, train_token=0.0)
    # Worked: 10 steps over a cache of 3 to 13 tokens, 8 in the mean.
    assert run(lambda sampler: ends(sampler, request(10)), speeds=speeds) == pytest.approx([10 * 1.8])


def test_replicas_share_the_requests() -> None:
    found = run(lambda sampler: ends(sampler, *(request(6, group=f"g{i}") for i in range(4))), replicas=4)
    assert found == pytest.approx([9.0] * 4), "each alone on its GPU: 6 steps of 1.5 s"


def test_tokens_bear_the_version_that_drew_them() -> None:
    async def play(sampler: SimulatedSampler) -> tuple[Completion, int]:
        asked = asyncio.create_task(sampler.generate(request(6)))
        await asyncio.sleep(2 * 1.5 + 0.1)  # two tokens drawn, the third begun
        await sampler.load(Publication(version=4, tensors={}))
        return await asked, sampler.version

    completion, version = run(play)
    assert list(completion.versions) == [0, 0, 0, 4, 4, 4]
    assert completion.finish is Finish.STOP
    assert version == 4


def test_nothing_is_drawn_while_the_trainer_has_the_device() -> None:
    async def play(sampler: SimulatedSampler) -> float:
        asked = asyncio.create_task(sampler.generate(request(4)))
        await asyncio.sleep(2.0)
        with sampler.paused():
            await asyncio.sleep(100.0)
        await asked
        return now()

    assert run(play) == pytest.approx(106.0)


def test_weights_take_time_to_arrive() -> None:
    speeds = Speeds(decode_step=1.0, decode_row=0.0, publish=10.0, train_token=0.0)

    async def play(sampler: SimulatedSampler) -> tuple[list[int], float]:
        asked = asyncio.create_task(sampler.generate(request(3)))
        await asyncio.sleep(1.0)
        await sampler.load(Publication(version=1, tensors={}))
        return list((await asked).versions), now()

    assert run(play, speeds=speeds) == ([0, 1, 1], pytest.approx(13.0))


def test_an_interrupted_request_goes_on_where_it_was() -> None:
    async def play(sampler: SimulatedSampler) -> tuple[Completion, Completion, Completion, float]:
        whole = request(9)
        asked = asyncio.create_task(sampler.generate(whole))
        await asyncio.sleep(4 * 1.5)
        await sampler.interrupt(whole.id)
        first = await asked
        resumed = Request(id=whole.id, prompt_ids=(*whole.prompt_ids, *first.token_ids), params=whole.params)
        asked = asyncio.create_task(sampler.generate(resumed))
        await asyncio.sleep(2 * 1.5)
        await sampler.interrupt(whole.id)
        second = await asked
        return first, second, await sampler.generate(resumed), now()

    first, second, third, seconds = run(play)
    assert [len(part.token_ids) for part in (first, second, third)] == [4, 2, 3], "nine in all"
    assert (first.finish, second.finish, third.finish) == (Finish.INTERRUPT, Finish.INTERRUPT, Finish.STOP)
    assert seconds == pytest.approx(9 * 1.5)


def test_what_is_aborted_or_given_up_frees_its_place() -> None:
    async def play(sampler: SimulatedSampler) -> tuple[Completion, list[float]]:
        asked = asyncio.create_task(sampler.generate(request(100)))
        given_up = asyncio.create_task(sampler.generate(request(200)))
        await asyncio.sleep(4.0)
        given_up.cancel()
        await sampler.abort(request(100).id)
        await sampler.abort("nobody")
        return await asked, await ends(sampler, request(2))

    aborted, (end,) = run(play, max_running=2)
    assert aborted.finish is Finish.ABORT
    assert len(aborted.token_ids) == 2
    assert end == pytest.approx(4.0 + 3.0), "alone again"


def test_lengths_end_at_the_limit_of_the_request() -> None:
    async def play(sampler: SimulatedSampler) -> Completion:
        return await sampler.generate(request(0, longest=5))

    completion = run(play, lengths=fixed(50))
    assert (len(completion.token_ids), completion.finish) == (5, Finish.LENGTH)
    whole = run(play, lengths=fixed(5))
    assert (len(whole.token_ids), whole.finish) == (5, Finish.STOP), "its last token ends it"


def test_seconds_in_which_it_drew_are_counted() -> None:
    async def play(sampler: SimulatedSampler) -> dict[str, float]:
        await asyncio.sleep(50.0)
        await ends(sampler, request(2), request(4, group="h"))
        return sampler.totals()

    totals = run(play, replicas=2)
    assert totals["busy_seconds"] == pytest.approx(2 * 1.5 + 4 * 1.5)
    assert totals["decode_tokens"] == pytest.approx(6.0)
