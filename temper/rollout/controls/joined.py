"""One completion in several pieces: a request that is interrupted goes on where it stopped, and its caller never knows.

Owns: which requests are under way, and that they go on. Refuses: making one completion of the pieces
(engine/pieces.py), and deciding when to interrupt (partial.py).
"""

from __future__ import annotations

import asyncio

from temper.engine.pieces import Decode, PiecedAnswer
from temper.engine.wrapped import WrappedSampler
from temper.protocols import Sampler
from temper.rollout.episode import require_as_asked
from temper.rollout.plays import standing_still
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
        if not self._may_draw.is_set():
            # The trainer's time is not the episode's: else the longest answers, which this is for, would run out of it.
            with standing_still():
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
        pieces, has_begun = PiecedAnswer(request, self._decode), False
        while True:
            asked = pieces.rest()
            if has_begun:
                self._pauses.count_again(len(asked.prompt_ids))
            piece, is_paused = await self._pauses.draw(self._sampler, asked)
            require_as_asked(asked, piece)
            so_far = pieces.add(piece)
            if not is_paused or so_far.finish is not Finish.INTERRUPT:
                return so_far
            has_begun = len(so_far.token_ids) > 0
