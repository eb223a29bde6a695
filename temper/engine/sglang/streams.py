"""Requests on one SGLang server: one is one stream of answers, by the weights of its time.

Owns: reading streams to their end or to where they break off, ending them early, counting. Refuses: completions that
publications cut into several requests (engine.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections import Counter

from temper.engine.fleet.member import SamplerLost
from temper.engine.sglang.client import SglangClient
from temper.engine.sglang.wire import PartialCompletion, body_of, check_drawn
from temper.engine.told_routes import ToldRoutes
from temper.errors import BackendError
from temper.types import Finish, Request

COUNTED = ("prefill_tokens", "cached_tokens", "decode_tokens", "requests", "preemptions", "cuts")


@dataclasses.dataclass(slots=True, kw_only=True)
class Active:
    """A generate() under way, over all the requests that it takes."""

    rid: str = ""
    """Id of the request on the server now; '' for none. All ids have one length: the server aborts by prefix."""
    wanted: Finish | None = None
    """How its caller wants it to end."""
    is_cut: bool = False
    """Whether a publication ends the current request; another one then goes on under the new weights."""


class RequestStreams:
    def __init__(self, client: SglangClient, *, seed: int, control_seconds: float, routes: ToldRoutes | None) -> None:
        """routes: those that are asked for with every request; None: none."""
        self._client, self._seed, self._control_seconds, self._routes = client, seed, control_seconds, routes
        self.counts: Counter[str] = Counter()
        """Since the last stats()."""

    async def draw(self, request: Request, active: Active) -> PartialCompletion:
        """What is told of it, checked; to its end, or with what was lost. SamplerLost when nothing was told."""
        rid, drawn = active.rid, PartialCompletion()
        body = body_of(rid, request, seed=self._seed, tells_routes=self._routes is not None)
        try:
            async with contextlib.aclosing(self._client.stream("/generate", body)) as events:
                async for event in events:
                    drawn.add(event)
                    # An abort that came before the server knew the request was ignored there, so it is repeated.
                    if drawn.finish_reason is None and (active.is_cut or active.wanted is not None):
                        await self.abort(rid)
        except SamplerLost as error:
            if not drawn.meta:
                raise
            drawn.lost = error if drawn.finish_reason is None else None  # with its end it is whole
        except asyncio.CancelledError:
            with contextlib.suppress(BackendError):
                await asyncio.shield(self.abort(rid))
            raise
        finally:
            active.rid = ""
        check_drawn(drawn, rid, request)
        self._count(drawn)
        if self._routes is not None:
            drawn.read_routes(self._routes, len(request.prompt_ids))
        return drawn

    async def abort(self, rid: str) -> None:
        await self._client.post("/abort_request", {"rid": rid}, seconds=self._control_seconds)

    async def abort_all(self, seconds: float) -> None:
        await self._client.post("/abort_request", {"abort_all": True}, seconds=seconds)

    def stats(self) -> dict[str, float]:
        counts = {name: float(self.counts[name]) for name in COUNTED}
        self.counts.clear()
        asked = counts["cached_tokens"] + counts["prefill_tokens"]
        return counts | {"prefix_hit_rate": counts["cached_tokens"] / asked if asked else 0.0}

    def _count(self, drawn: PartialCompletion) -> None:
        cached = int(drawn.meta.get("cached_tokens") or 0)
        self.counts["requests"] += 1
        self.counts["cached_tokens"] += cached
        self.counts["prefill_tokens"] += int(drawn.meta.get("prompt_tokens") or 0) - cached
        self.counts["decode_tokens"] += len(drawn.token_ids)
        self.counts["preemptions"] += int(drawn.meta.get("num_retractions") or 0)
