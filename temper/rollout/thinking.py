"""Answers whose thinking is closed at a budget: a text is put in, and the answer goes on (ScaleRL, Qwen3).

Owns: when an answer is interrupted, and what is put in. Refuses: making one completion of the pieces (pieces.py), what
is trained of it (batching/rows.py), and encoding the text (build/thinking.py).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from temper.engine.pieces import Decode, as_asked, cut_at_stop, join
from temper.errors import ContextFull
from temper.types import Completion, Finish, Request, Trajectory, array_of

Generate = Callable[[Request], Awaitable[Completion]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    budget: int
    """Tokens that an answer may draw before its thinking is closed."""
    closing_ids: tuple[int, ...]
    """What is put in then."""
    end: str
    """An answer in which this text stands has closed its thinking itself."""
    end_ids: tuple[int, ...]
    """The same in tokens: some are left out of a text."""

    def is_over(self, token_ids: Sequence[int], decode: Decode) -> bool:
        if self.end in decode(token_ids):
            return True
        ids, end = array_of(token_ids), np.array(self.end_ids)
        windows = np.lib.stride_tricks.sliding_window_view(ids, len(end)) if len(ids) >= len(end) else ids[:0, None]
        return bool((windows == end).all(1).any())

    def has_room(self, max_new_tokens: int) -> bool:
        """Whether something can be drawn behind the closing text."""
        return max_new_tokens > self.budget + len(self.closing_ids)


def was_closed(trajectory: Trajectory) -> bool:
    """Whether its thinking was closed in some turn."""
    return any(len(turn.completion.injected) for turn in trajectory.turns)


async def draw(generate: Generate, request: Request, thinking: Thinking | None, decode: Decode) -> Completion:
    """The completion of a request, at most max_new_tokens long with what was put in.

    The second part has the id of the first: a sampler goes on with its random numbers, so that an answer that closed
    its thinking in time is the one that would have been drawn without a budget.
    """
    params = request.params
    if thinking is None or not thinking.has_room(params.max_new_tokens):
        return await generate(request)
    first = await generate(replace(request, params=replace(params, max_new_tokens=thinking.budget)))
    if first.finish is not Finish.LENGTH or len(first.token_ids) < thinking.budget:
        return as_asked(first, request)  # ended by itself or from outside, or the context is full
    given = () if thinking.is_over(first.token_ids, decode) else thinking.closing_ids
    left = params.max_new_tokens - thinking.budget - len(given)
    prompt_ids = (*request.prompt_ids, *first.token_ids, *given)
    try:
        second = await generate(replace(request, prompt_ids=prompt_ids, params=replace(params, max_new_tokens=left)))
    except ContextFull:
        return as_asked(first, request)
    joined = as_asked(join(first, given, second), request)
    return cut_at_stop(joined, len(first.token_ids), params.stop, decode) if params.stop else joined
