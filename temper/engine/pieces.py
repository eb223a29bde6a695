"""One completion of two pieces: drawn one after the other, with or without a text between them.

Owns: what is left to ask for behind the first, columns that stay parallel, and stop texts that begin in the first piece
and end in the second. Refuses: drawing them (fleet/fleet.py, rollout/).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from temper.engine.local.sequence import StopTexts
from temper.errors import BackendError
from temper.types import Column, Completion, Finish, Ragged, Request, array_of, join_ragged, no_lists
from temper.types.columns import ragged
from temper.types.routes import continue_routes, end_routes

Decode = Callable[[Sequence[int]], str]

COLUMNS = ("token_ids", "logprobs", "versions", "entropies")
LISTS = ("top_ids", "top_logprobs", "keep_ids")


class PiecedAnswer:
    """One answer, drawn piece after piece. A stop text ends it that begins in one and ends in the next."""

    def __init__(self, request: Request, decode: Decode | None) -> None:
        """decode: text of token ids, for requests with stop texts."""
        self._request, self._decode = request, decode
        self.so_far: Completion | None = None
        """All pieces as one; None: there is none yet."""

    def rest(self) -> Request:
        """What is left to ask for: same id, the tokens so far behind the prompt, what is left of the budget."""
        if self.so_far is None:
            return self._request
        left = self._request.params.max_new_tokens - len(self.so_far.token_ids)
        assert left > 0, "a completion as long as it may be is no longer drawn"
        return Request(
            id=self._request.id,
            prompt_ids=(*self._request.prompt_ids, *self.so_far.token_ids),
            params=replace(self._request.params, max_new_tokens=left),
        )

    def add(self, piece: Completion) -> Completion:
        """One piece of what rest() asked for; returns all of them as one."""
        self.so_far = piece if self.so_far is None else self._joined(self.so_far, piece)
        return self.so_far

    def ended(self, finish: Finish) -> Completion:
        """The answer as it is, of a request that was ended while nobody drew it."""
        if self.so_far is not None:
            return replace(self.so_far, finish=finish)
        return Completion(prompt_ids=self._request.prompt_ids, token_ids=(), logprobs=(), versions=(), finish=finish)

    def _joined(self, first: Completion, second: Completion) -> Completion:
        whole, stop = as_asked(join(first, (), second), self._request), self._request.params.stop
        if not stop or not first.token_ids:
            return whole
        if self._decode is None:
            raise BackendError(f"stop={list(stop)} needs text, and who joins pieces was given none")
        return cut_at_stop(whole, len(first.token_ids), stop, self._decode)


def join(first: Completion, given: Sequence[int], second: Completion) -> Completion:
    """What was drawn, what was put in (nothing: the second goes on where the first ended), and what was drawn behind
    it. Where nothing was drawn behind a text, nobody saw it, and it is left out."""
    if not second.token_ids:
        return replace(first, finish=second.finish)
    if not first.token_ids and not given:
        routes = second.routes if first.routes is None else _join_routes(first, second)
        return replace(second, prompt_ids=first.prompt_ids, routes=routes)
    start, size = len(first.token_ids), len(given)
    lists: dict[str, Any] = {name: _join_lists(first, size, second, name) for name in LISTS}
    has_entropies = first.entropies is not None and second.entropies is not None
    return replace(
        first,
        token_ids=_join_columns(first.token_ids, given, second.token_ids),
        logprobs=_join_columns(first.logprobs, [0.0] * size, second.logprobs),
        versions=_join_columns(first.versions, [-1] * size, second.versions),
        finish=second.finish,
        entropies=_join_columns(first.entropies or (), [0.0] * size, second.entropies or ()) if has_entropies else None,
        injected=range(start, start + size),
        routes=_join_routes(first, second),
        **lists,
    )


def as_asked(completion: Completion, request: Request) -> Completion:
    """With the prompt and the limit of the whole answer, in place of those of its pieces."""
    params = None if completion.params is None else request.params
    return replace(completion, prompt_ids=request.prompt_ids, params=params)


def cut_at_stop(completion: Completion, seam: int, stop: Sequence[str], decode: Decode) -> Completion:
    """Ends it where a stop text ends that began before the seam: the sampler, to whom the first piece is a part of the
    prompt, saw only what came behind it."""
    texts, ids = StopTexts(tuple(stop), decode), completion.token_ids
    behind = seam + len(completion.injected)
    before, drawn = ids[max(0, behind - texts.window) : behind], ids[behind : behind + texts.window]
    num_drawn = texts.end([*before], [*drawn])
    if num_drawn is None:
        return completion
    columns = {name: getattr(completion, name) for name in (*COLUMNS, *LISTS)}
    end = behind + num_drawn
    routes = completion.routes
    if routes is not None:
        routes = end_routes(routes, len(completion.prompt_ids) + end)
    cut: dict[str, Any] = {name: None if column is None else column[:end] for name, column in columns.items()}
    return replace(completion, finish=Finish.STOP, routes=routes, **cut)


def _join_columns(first: Sequence[Any], given: Sequence[Any], second: Sequence[Any]) -> Column[Any]:
    drawn = array_of(first)
    return Column(np.concatenate((drawn, np.array(given, dtype=drawn.dtype), array_of(second, drawn.dtype))))


def _join_routes(first: Completion, second: Completion) -> Ragged[Any] | None:
    """To the second the first is a part of its prompt. Tokens keep the routes by which they were computed first: those
    by which the next one was drawn."""
    if first.routes is None or second.routes is None:
        return None
    return continue_routes(ragged(first.routes), ragged(second.routes))


def _join_lists(first: Completion, size: int, second: Completion, name: str) -> Ragged[Any] | None:
    before, behind = getattr(first, name), getattr(second, name)
    if before is None or behind is None:
        return None
    return join_ragged([before, no_lists(size, before), behind])
