"""One completion of several pieces is the one that nobody interrupted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from temper.engine.pieces import Decode, PiecedAnswer, join
from temper.errors import BackendError
from temper.types import Completion, Finish, Request, SamplingParams


def piece(tokens: list[int], finish: Finish, **more: Any) -> Completion:
    return Completion(
        prompt_ids=(5,), token_ids=tokens, logprobs=[-1.0] * len(tokens), versions=[0] * len(tokens), finish=finish,
        **more,
    )  # fmt: skip


def joined(request: Request, decode: Decode | None, *parts: Completion) -> Completion:
    pieces = PiecedAnswer(request, decode)
    return [pieces.add(part) for part in parts][-1]


def test_the_rest_is_asked_for_with_what_is_left_of_the_budget() -> None:
    request = Request(id="a", prompt_ids=(5,), params=SamplingParams(max_new_tokens=10, stop_ids=(1,)))
    pieces = PiecedAnswer(request, None)
    assert pieces.rest() is request
    pieces.add(piece([7, 8, 9], Finish.INTERRUPT))
    rest = pieces.rest()
    assert (rest.id, rest.prompt_ids, rest.params.max_new_tokens) == ("a", (5, 7, 8, 9), 7)
    assert replace(rest.params, max_new_tokens=10) == request.params


def test_a_stop_text_over_two_pieces_ends_the_answer() -> None:
    request = Request(id="a", prompt_ids=(5,), params=SamplingParams(max_new_tokens=10, stop=("END",)))
    texts = {7: "E", 8: "N", 9: "D", 2: "x"}

    def decode(ids: Any) -> str:
        return "".join(texts[token] for token in ids)

    whole = joined(request, decode, piece([2, 7], Finish.INTERRUPT), piece([8, 9, 2, 2], Finish.LENGTH))
    assert (list(whole.token_ids), whole.finish) == ([2, 7, 8, 9], Finish.STOP)
    assert len(whole.logprobs) == len(whole.versions) == 4
    other = joined(request, decode, piece([2, 7], Finish.INTERRUPT), piece([2, 2], Finish.LENGTH))
    assert (list(other.token_ids), other.finish) == ([2, 7, 2, 2], Finish.LENGTH)


def test_a_piece_without_tokens_adds_nothing() -> None:
    request = Request(id="a", prompt_ids=(5,), params=SamplingParams(max_new_tokens=10, top_k=2))
    drawn = piece([7], Finish.STOP, keep_ids=[[7, 8]])
    for pieces in ((piece([], Finish.INTERRUPT), drawn), (drawn, piece([], Finish.ABORT))):
        whole = joined(request, None, *pieces)
        assert whole.keep_ids is not None
        assert [list(kept) for kept in whole.keep_ids] == [[7, 8]]
        assert whole.finish is pieces[1].finish


def test_what_was_ended_before_it_began_leaves_the_routes_of_what_follows() -> None:
    request = Request(id="a", prompt_ids=(5,), params=SamplingParams(max_new_tokens=10))
    unseen = PiecedAnswer(request, None).ended(Finish.INTERRUPT)
    assert unseen.routes is None
    assert join(unseen, (), piece([7, 8], Finish.STOP, routes=[[1], [2], []])).routes == [[1], [2], []]


def test_a_stop_text_over_two_pieces_needs_somebody_who_reads() -> None:
    request = Request(id="a", prompt_ids=(5,), params=SamplingParams(max_new_tokens=10, stop=("END",)))
    with pytest.raises(BackendError, match="needs text"):
        joined(request, None, piece([2, 7], Finish.INTERRUPT), piece([8], Finish.LENGTH))


def test_what_is_ended_between_two_pieces_is_what_was_drawn() -> None:
    request = Request(id="a", prompt_ids=(5,), params=SamplingParams(max_new_tokens=10))
    pieces = PiecedAnswer(request, None)
    assert (list(pieces.ended(Finish.ABORT).token_ids), pieces.ended(Finish.ABORT).prompt_ids) == ([], (5,))
    pieces.add(piece([7, 8], Finish.INTERRUPT))
    ended = pieces.ended(Finish.ABORT)
    assert (list(ended.token_ids), ended.finish) == ([7, 8], Finish.ABORT)
