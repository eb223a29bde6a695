"""A sampler around another one.

Owns: handing everything on. Refuses: changing anything, which is what its subclasses are for.
"""

from __future__ import annotations

from collections.abc import Mapping

from temper.protocols import Sampler
from temper.types import Completion, Publication, Request


class WrappedSampler:
    """Implements protocols.Sampler. A subclass overrides what it changes."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    @property
    def version(self) -> int:
        return self._sampler.version

    async def generate(self, request: Request) -> Completion:
        return await self._sampler.generate(request)

    async def abort(self, request_id: str) -> None:
        await self._sampler.abort(request_id)

    async def interrupt(self, request_id: str) -> None:
        await self._sampler.interrupt(request_id)

    async def load(self, publication: Publication) -> None:
        await self._sampler.load(publication)

    def stats(self) -> Mapping[str, float]:
        return self._sampler.stats()

    async def close(self) -> None:
        await self._sampler.close()
