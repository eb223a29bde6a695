"""Given texts made into rows while the trainer works on the batch before them.

Owns: one batch ahead, and the state of what was taken. Refuses: batches (the source inside).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from temper.protocols import BatchSource
from temper.types import Batch, Scalar

State = dict[str, Scalar | list[Scalar]]

CLOSING_SECONDS = 60.0
"""For a batch that nobody will take."""


class Ahead:
    """Implements protocols.BatchSource over a source that waits for nobody.

    Its state is that of the batches that were taken: one that was made and not taken is made again after a resume.
    """

    def __init__(self, source: BatchSource) -> None:
        self._source = source
        self._state = source.state()
        self._making: asyncio.Task[tuple[Batch, State]] | None = None

    @property
    def num_queued(self) -> int | None:
        return self._source.num_queued

    async def start(self) -> None:
        await self._source.start()

    async def take(self, step: int) -> Batch:
        """Waits for: rows of given texts, which are computed here. Raises what making them raised, in their step."""
        making, self._making = self._making, None
        batch, self._state = await (making or self._make(step))
        self._making = asyncio.create_task(self._make(step + 1))
        return batch

    async def _make(self, step: int) -> tuple[Batch, State]:
        def make() -> tuple[Batch, State]:
            return asyncio.run(self._source.take(step)), self._source.state()

        return await asyncio.to_thread(make)

    async def release(self, version: int) -> None:
        await self._source.release(version)

    def state(self) -> State:
        return self._state

    def load_state(self, state: Mapping[str, Scalar | list[Scalar]]) -> None:
        assert self._making is None, "a state is loaded before anything is taken"
        self._source.load_state(state)
        self._state = self._source.state()

    async def close(self) -> None:
        if self._making is not None:
            await asyncio.wait([self._making], timeout=CLOSING_SECONDS)
            if self._making.done() and not self._making.cancelled():
                self._making.exception()  # nobody took it, so nobody wants to know
        await self._source.close()
