"""A batch ahead is the same batch, and its state is that of what was taken."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from temper.errors import UserError
from temper.stages.reading.ahead import Ahead
from temper.stages.reading.stream import StreamSource
from temper.types import Batch


class Counting(StreamSource):
    """Batch n has the metric n."""

    def __init__(self, last: int = 100) -> None:
        self.taken, self._last = 0, last
        self.in_main_thread: list[bool] = []

    async def take(self, step: int) -> Batch:
        self.in_main_thread.append(threading.current_thread() is threading.main_thread())
        if self.taken == self._last:
            raise UserError("no more")
        self.taken += 1
        return Batch(updates=(), metrics={"n": float(self.taken), "step": float(step)})

    def state(self) -> dict[str, Any]:
        return {"taken": self.taken}

    def load_state(self, state: Any) -> None:
        self.taken = int(state["taken"])


def test_batches_come_in_order_and_are_made_beside_the_trainer() -> None:
    async def run() -> None:
        inner = Counting()
        source = Ahead(inner)
        await source.start()
        for step in (1, 2, 3):
            batch = await source.take(step)
            assert batch.metrics == {"n": step, "step": step}
            assert source.state() == {"taken": step}, "what was taken, not what was made"
        await source.close()
        assert inner.taken == 4
        assert not any(inner.in_main_thread)

    asyncio.run(run())


def test_a_resumed_source_goes_on_behind_what_was_taken() -> None:
    async def run() -> None:
        source = Ahead(Counting())
        await source.take(1)
        await source.take(2)
        state = source.state()
        await source.close()
        again = Ahead(Counting())
        again.load_state(state)
        assert again.state() == state
        assert (await again.take(3)).metrics["n"] == 3
        await again.close()

    asyncio.run(run())


def test_what_goes_wrong_ahead_is_said_in_its_own_step_or_never() -> None:
    async def run() -> None:
        source = Ahead(Counting(last=2))
        await source.take(1)
        await source.take(2)
        with pytest.raises(UserError, match="no more"):
            await source.take(3)
        await source.close()
        unasked = Ahead(Counting(last=1))
        await unasked.take(1)
        await unasked.close()

    asyncio.run(run())
