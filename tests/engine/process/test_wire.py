"""What is asked and what was drawn arrive as they were sent, to the bit."""

from __future__ import annotations

import asyncio
import dataclasses
import math

import numpy as np
import pytest

from temper.engine.process.wire import (
    HEAD,
    Frame,
    completion_frame,
    completion_of,
    error_frame,
    error_of,
    from_bytes,
    read_frame,
    request_frame,
    requests_of,
    to_bytes,
)
from temper.errors import BackendError, ContextFull, OutOfMemory, TaskError, UserError
from temper.types import Column, Completion, Finish, Ragged, Request, SamplingParams

PARAMS = SamplingParams(
    temperature=0.1 + 0.2, top_p=math.nextafter(1, 0), stop_ids=(3, 5), stop=("\u20ac\n",), top_logprobs=2, entropy=True
)
AWKWARD = np.asarray([-0.0, np.float32(1e-45), -np.inf, np.nan], dtype=np.float32)


def sent(frame: Frame) -> Frame:
    data = to_bytes(frame)
    size, _ = HEAD.unpack(data[: HEAD.size])
    return from_bytes(data[HEAD.size : HEAD.size + size], data[HEAD.size + size :])


def test_a_completion_arrives_with_every_bit_of_its_floats() -> None:
    drawn = Completion(
        prompt_ids=(7, 8),
        token_ids=[1, 2, 3, 4],
        logprobs=AWKWARD,
        versions=[5, 5, 6, 6],
        finish=Finish.INTERRUPT,
        top_ids=[[1], [2, 9], [], [4]],
        top_logprobs=Ragged.of_counts(AWKWARD, np.asarray([1, 2, 0, 1])),
        entropies=np.asarray([0.1, 1 / 3, 5e-324, 2.0]),
        keep_ids=[[1, 2], [2], [3], [4, 5, 6]],
        params=PARAMS,
    )
    got = completion_of(sent(completion_frame(17, drawn)))
    for name in ("token_ids", "logprobs", "versions", "entropies"):
        ours, theirs = getattr(drawn, name), getattr(got, name)
        assert isinstance(ours, Column)
        assert isinstance(theirs, Column)
        assert (ours.array.dtype, ours.array.tobytes()) == (theirs.array.dtype, theirs.array.tobytes()), name
    for name in ("top_ids", "top_logprobs", "keep_ids"):
        lists, back = getattr(drawn, name), getattr(got, name)
        assert isinstance(lists, Ragged)
        assert isinstance(back, Ragged)
        assert (lists.flat.dtype, lists.flat.tobytes()) == (back.flat.dtype, back.flat.tobytes()), name
        assert lists.counts.tolist() == back.counts.tolist()
    assert (got.prompt_ids, got.finish, got.params) == (drawn.prompt_ids, drawn.finish, PARAMS)


def test_what_was_not_asked_for_stays_absent() -> None:
    drawn = Completion(prompt_ids=(7,), token_ids=[], logprobs=[], versions=[], finish=Finish.ABORT)
    got = completion_of(sent(completion_frame(1, drawn)))
    assert (got.top_ids, got.top_logprobs, got.entropies, got.keep_ids, got.params) == (None,) * 5
    assert len(got.token_ids) == 0


def test_requests_arrive_together_in_their_order() -> None:
    asked = [(number, Request(id=f"r/{number}", prompt_ids=(number, 70000), params=PARAMS)) for number in (3, 1, 2)]
    assert requests_of(sent(request_frame(asked))) == asked


@pytest.mark.parametrize(
    "error",
    [UserError("a"), TaskError("b"), ContextFull("c"), BackendError("d"), OutOfMemory("rollout", "e")],
    ids=lambda error: type(error).__name__,
)
def test_an_error_is_raised_again_as_what_it_was(error: Exception) -> None:
    got = error_of(sent(error_frame(1, error)))
    assert (type(got), str(got)) == (type(error), str(error))
    assert getattr(got, "phase", None) == getattr(error, "phase", None)


def test_an_error_that_nobody_planned_for_is_the_engines() -> None:
    got = error_of(sent(error_frame(1, ZeroDivisionError("oh"))))
    assert type(got) is BackendError
    assert "ZeroDivisionError('oh')" in str(got)


def read(data: bytes) -> Frame | None:
    async def fed() -> Frame | None:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return await read_frame(reader)

    return asyncio.run(fed())


def test_half_a_frame_is_a_hung_up_line_and_never_half_an_answer() -> None:
    whole = to_bytes(Frame("loaded", 3, {"version": 9}))
    assert dataclasses.asdict(read(whole) or Frame("")) == dataclasses.asdict(Frame("loaded", 3, {"version": 9}))
    assert all(read(whole[:length]) is None for length in range(len(whole)))


def test_a_stream_out_of_step_is_refused() -> None:
    with pytest.raises(BackendError, match="out of step"):
        read(b"\xff" * 64)
