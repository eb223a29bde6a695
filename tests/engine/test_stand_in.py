"""A stand-in says one short thing that its tokenizer can write, and is taken for a sampler."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from temper.engine.stand_in import StandIn, short_answer
from temper.models.tiny import character_tokenizer
from temper.rollout.episode import require_as_asked
from temper.tasks.render import decode_ids
from temper.types import Finish, Request, SamplingParams


@pytest.mark.parametrize(("alphabet", "text"), [("abcko", "ok"), ("0123", "0"), ("xyz", "x")])
def test_the_answer_is_one_that_the_tokenizer_can_write(alphabet: str, text: str) -> None:
    tokenizer = character_tokenizer(alphabet)
    decode = partial(decode_ids, tokenizer)
    assert decode(short_answer(tokenizer, decode)) == text


@pytest.mark.parametrize(
    ("most", "tokens", "finish"), [(8, [5, 6, 1], Finish.STOP), (3, [5, 6, 1], Finish.STOP), (2, [5, 6], Finish.LENGTH)]
)
def test_it_ends_with_a_stop_token_where_there_is_room(most: int, tokens: list[int], finish: Finish) -> None:
    sampler = StandIn((5, 6))
    params = SamplingParams(temperature=0.0, max_new_tokens=most, stop_ids=(1, 2))
    request = Request(id="r", prompt_ids=(3,), params=params)
    completion = asyncio.run(sampler.generate(request))
    require_as_asked(request, completion)
    assert (list(completion.token_ids), completion.finish) == (tokens, finish)
    assert sampler.num_answered == 1
