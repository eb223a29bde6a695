"""No sampler: for stages whose model draws no tokens, such as a reward model.

Owns: the Sampler protocol where it has nothing to do. Refuses: generating.
"""

from __future__ import annotations

from collections.abc import Mapping

from temper.errors import BackendError
from temper.types import Completion, Publication, Request


class NoSampler:
    """Implements protocols.Sampler; only follows the version."""

    def __init__(self) -> None:
        self.version = 0

    async def generate(self, request: Request) -> Completion:
        raise BackendError(f"request {request.id}: this stage's model has no language-model head to draw tokens with")

    async def abort(self, request_id: str) -> None:
        """There are no requests."""

    async def interrupt(self, request_id: str) -> None:
        """There are no requests."""

    async def load(self, publication: Publication) -> None:
        self.version = publication.version

    def stats(self) -> Mapping[str, float]:
        return {"kv_use": 0.0, "preemptions": 0.0, "prefill_tokens": 0.0, "decode_tokens": 0.0, "steps": 0.0}

    async def close(self) -> None:
        """Nothing to close."""
