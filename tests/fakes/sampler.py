"""A sampler without a model: scripted tokens, deterministic, instant or slow. For tests of everything above the seam.

Owns: the Sampler protocol's behaviour where no weights are needed. Refuses: pretending to be a language model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from temper.types import Completion, Finish, Publication, Request

Script = Callable[[Request], list[int]]


async def _at_once(request: Request) -> None:
    """No delay."""


class FakeSampler:
    """Implements protocols.Sampler. `script` decides the tokens, `delay` when they are ready."""

    def __init__(self, script: Script, *, delay: Callable[[Request], Awaitable[None]] = _at_once) -> None:
        self._script = script
        self._delay = delay
        self._version = 0
        self._aborted: set[str] = set()
        self._interrupted: set[str] = set()
        self.requests: list[Request] = []

    @property
    def version(self) -> int:
        return self._version

    async def generate(self, request: Request) -> Completion:
        self.requests.append(request)
        version = self._version
        await self._delay(request)
        await asyncio.sleep(0)
        tokens = self._script(request)[: request.params.max_new_tokens]
        is_stopped = bool(tokens) and tokens[-1] in request.params.stop_ids
        finish = Finish.STOP if is_stopped else Finish.LENGTH
        num_top = request.params.top_logprobs
        return Completion(
            prompt_ids=request.prompt_ids,
            token_ids=tokens,
            logprobs=[-1.0] * len(tokens),
            # The first token by the weights of the start, the rest by those of the end: as in a real engine.
            versions=[version] + [self._version] * (len(tokens) - 1) if tokens else [],
            finish=self._ended(request.id) or finish,
            top_ids=[_top_ids(token, num_top) for token in tokens] if num_top else None,
            top_logprobs=[[-1.0 - rank for rank in range(num_top)] for _ in tokens] if num_top else None,
            keep_ids=[[token, token + 1] for token in tokens] if request.params.is_truncated else None,
            params=request.params,
        )

    def _ended(self, request_id: str) -> Finish | None:
        if request_id in self._aborted:
            return Finish.ABORT
        return Finish.INTERRUPT if request_id in self._interrupted else None

    async def abort(self, request_id: str) -> None:
        self._aborted.add(request_id)

    async def interrupt(self, request_id: str) -> None:
        self._interrupted.add(request_id)

    async def load(self, publication: Publication) -> None:
        self._version = publication.version

    def stats(self) -> Mapping[str, float]:
        return {"kv_use": 0.0, "preemptions": 0.0, "prefill_tokens": 0.0, "decode_tokens": 0.0, "steps": 0.0}

    async def close(self) -> None:
        """Nothing to close."""


def _top_ids(token: int, count: int) -> list[int]:
    """The drawn token, then the lowest other ids. Probabilities exp(-1), exp(-2), ... sum to less than one."""
    return [token, *(other for other in range(count) if other != token)][:count]
