"""One completion in several pieces: a request that is interrupted goes on where it stopped, and its caller never knows.

Owns: what goes on: same id, prompt and tokens so far, what is left of the budget. Refuses: making one completion of the
pieces (pieces.py), and deciding when to interrupt (partial.py).
"""

from __future__ import annotations

import asyncio
import dataclasses

from temper.engine.wrapped import WrappedSampler
from temper.errors import BackendError
from temper.protocols import Sampler
from temper.rollout.episode import require_as_asked
from temper.rollout.pieces import Decode, as_asked, cut_at_stop, join
from temper.types import Completion, Finish, Request

LONGEST_PAUSE_SECONDS = 7 * 24 * 3600.0
"""A trainer that needs longer is dead."""


class Pauses:
    """Which requests are under way, and whether they may be."""

    def __init__(self) -> None:
        self._may_draw = asyncio.Event()
        self._may_draw.set()
        self._under_way: dict[str, Sampler] = {}
        self._interrupted: set[str] = set()
        self._num_interrupted = self._num_prefilled_again = 0

    async def start(self) -> None:
        """Interrupts every request. None starts or goes on before end()."""
        self._may_draw.clear()
        for request_id, sampler in [*self._under_way.items()]:
            self._interrupted.add(request_id)
            await sampler.interrupt(request_id)

    def end(self) -> None:
        self._may_draw.set()

    async def draw(self, sampler: Sampler, request: Request) -> tuple[Completion, bool]:
        """One piece, and whether there was a pause in it: then it is not the last.

        Waits for: the end of the pause. Unblocked by: the next weights, within a deadline.
        """
        async with asyncio.timeout(LONGEST_PAUSE_SECONDS):
            await self._may_draw.wait()
        self._under_way[request.id] = sampler
        try:
            completion = await sampler.generate(request)
        finally:
            del self._under_way[request.id]
            was_interrupted = request.id in self._interrupted
            self._interrupted.discard(request.id)
        is_paused = was_interrupted and completion.finish is Finish.INTERRUPT
        self._num_interrupted += is_paused
        return completion, is_paused

    def count_again(self, num_tokens: int) -> None:
        self._num_prefilled_again += num_tokens

    def counts(self) -> tuple[int, int]:
        """Requests that were interrupted, and tokens that were computed again, since the last call."""
        counts = self._num_interrupted, self._num_prefilled_again
        self._num_interrupted = self._num_prefilled_again = 0
        return counts


class JoinedSampler(WrappedSampler):
    """Another one, through any number of pauses."""

    def __init__(self, sampler: Sampler, pauses: Pauses, decode: Decode | None) -> None:
        super().__init__(sampler)
        self._pauses, self._decode = pauses, decode

    async def generate(self, request: Request) -> Completion:
        so_far: Completion | None = None
        while True:
            asked = request if so_far is None else rest_of(request, so_far)
            if so_far is not None and so_far.token_ids:
                self._pauses.count_again(len(asked.prompt_ids))
            piece, is_paused = await self._pauses.draw(self._sampler, asked)
            require_as_asked(asked, piece)
            so_far = piece if so_far is None else joined(request, so_far, piece, self._decode)
            if not is_paused or so_far.finish is not Finish.INTERRUPT:
                return so_far


def rest_of(request: Request, so_far: Completion) -> Request:
    """What is left to ask for."""
    left = request.params.max_new_tokens - len(so_far.token_ids)
    assert left > 0, "a completion as long as it may be is no longer drawn"
    return Request(
        id=request.id,
        prompt_ids=(*request.prompt_ids, *so_far.token_ids),
        params=dataclasses.replace(request.params, max_new_tokens=left),
    )


def joined(request: Request, first: Completion, second: Completion, decode: Decode | None) -> Completion:
    """Two pieces as one, which a stop text ends that begins in the first and ends in the second."""
    whole = as_asked(join(first, (), second), request)
    if not request.params.stop or not first.token_ids:
        return whole
    if decode is None:
        raise BackendError(f"stop={list(request.params.stop)} needs text, and partial rollouts were given none")
    return cut_at_stop(whole, len(first.token_ids), request.params.stop, decode)
