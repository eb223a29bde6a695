"""What is asked of the engine for a request that was understood.

Owns: limits, parameters and names of requests. Refuses: answers that the context cannot hold.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from temper.serve.asked import ChatRequest
from temper.serve.refusals import CONTEXT_FULL, Refused
from temper.types import Request, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    model: str
    """The name that clients must ask for; empty: any."""
    stop_ids: tuple[int, ...]
    max_length: int
    """Longest sequence, prompt included."""
    max_in_flight: int
    """Completions that may run or wait; more are told to come back."""


class Ordering(Protocol):
    async def order(self, name: str, prompts: Sequence[tuple[int, ...]], asked: ChatRequest) -> list[Request]:
        """The request for each choice, or Refused, and then nothing is used up. `name`: unique in the life of the
        server. prompts: one for each choice."""
        ...

    def give_back(self, request: Request) -> None:
        """Says that a request has ended, whether it was drawn or not."""
        ...


class AsAsked:
    """Implements Ordering: what the client asked for."""

    def __init__(self, limits: ServerLimits) -> None:
        self._limits = limits

    async def order(self, name: str, prompts: Sequence[tuple[int, ...]], asked: ChatRequest) -> list[Request]:
        return [self._order(f"{name}/{index}", index, ids, asked) for index, ids in enumerate(prompts)]

    def give_back(self, request: Request) -> None:
        """A server that answers everybody counts nothing."""

    def _order(self, name: str, index: int, prompt_ids: tuple[int, ...], asked: ChatRequest) -> Request:
        room, wanted = self._limits.max_length - len(prompt_ids), asked.params.max_new_tokens
        if room < max(wanted, 1):
            raise Refused(
                f"the prompt has {len(prompt_ids)} tokens and {max(wanted, 1)} more are asked for; prompt and "
                f"answer together may have {self._limits.max_length}",
                param=asked.prompt_name,
                code=CONTEXT_FULL,
            )
        params = replace(asked.params, max_new_tokens=wanted or room, stop_ids=self._limits.stop_ids)
        request_id = name if asked.seed is None else _seeded_id(asked.seed, index, prompt_ids, params)
        return Request(id=request_id, prompt_ids=prompt_ids, params=params)


def _seeded_id(seed: int, index: int, prompt_ids: tuple[int, ...], params: SamplingParams) -> str:
    """The engine keys its randomness by the id: equal requests with an equal seed draw the same, and so do two of which
    one asks for the likeliest tokens as well."""
    told = repr((seed, index, prompt_ids, replace(params, top_logprobs=0))).encode()
    return f"seed-{hashlib.blake2b(told, digest_size=16).hexdigest()}"
