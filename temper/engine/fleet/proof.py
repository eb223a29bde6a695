"""Whether the samplers of a fleet hold what was published.

Owns: what was published last, and the comparison with what a sampler holds. Refuses: deciding what becomes of one that
holds other numbers (fleet.py). A canary's few prompts may pass by one of many samplers; this asks each.
"""

from __future__ import annotations

from collections.abc import Collection

from temper.engine.digests import Digests, differing, digested
from temper.engine.process.client import ProcessSampler
from temper.types import Publication

MAX_NAMED = 3
"""Tensors written out in an error; the others are counted."""


class Proof:
    def __init__(self, quantized: Collection[str]) -> None:
        """quantized: names of tensors of which samplers hold float8."""
        self._quantized, self._digests = quantized, Digests()

    def begin(self, publication: Publication) -> Publication:
        """The same, to be handed over: it is added up on its way."""
        publication, self._digests = digested(publication, self._quantized)
        return publication

    async def feed(self, sampler: ProcessSampler, publication: Publication, seconds: float) -> list[str]:
        """Hands over what begin() returned. Names of tensors that the sampler then holds with other numbers."""
        await sampler.load(publication, seconds)
        return differing(self._digests.read(), await sampler.digests(seconds))

    async def look(self, sampler: ProcessSampler, seconds: float) -> list[str]:
        """The names, and whose they are, of one that was fed before."""
        names = differing(self._digests.read(), await sampler.digests(seconds))
        return [f"{name} of {sampler.name}" for name in names]


def describe(sampler: ProcessSampler, version: int, names: Collection[str]) -> str:
    listed = ", ".join([*names][:MAX_NAMED]) + (f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else "")
    return f"{sampler.name} holds other numbers than publication {version} in {listed}"
