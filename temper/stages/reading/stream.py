"""What all sources that read a stream of tasks have in common: nothing runs ahead, and the stream is their state.

Owns: the parts of protocols.BatchSource that such a source has no say in. Refuses: batches.
"""

from __future__ import annotations

from collections.abc import Mapping

from temper.rollout.draws import TaskStream
from temper.types import Scalar


class StreamSource:
    """To be given a `take`."""

    def __init__(self, stream: TaskStream) -> None:
        self._stream = stream

    @property
    def num_queued(self) -> int | None:
        """Nothing is drawn, so nothing waits."""
        return None

    async def start(self) -> None:
        """Nothing runs ahead."""

    async def release(self, version: int) -> None:
        """Nothing waits for the weights."""

    def state(self) -> dict[str, Scalar | list[Scalar]]:
        return self._stream.state()

    def load_state(self, state: Mapping[str, Scalar | list[Scalar]]) -> None:
        self._stream.load_state(state)

    async def close(self) -> None:
        """Nothing to close."""
