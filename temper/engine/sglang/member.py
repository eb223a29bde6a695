"""An SGLang server as one sampler of a fleet.

Owns: waiting for the server, at first and when it was lost. Refuses: starting it: its owner does. What is lost is said
by the client (client.py); a server that comes back is a new member, which looks at it anew and is stale until fed.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from temper.engine.digests import Digests
from temper.engine.fleet.member import SamplerLost
from temper.engine.sglang.checkpoints import Checkpoints
from temper.engine.sglang.engine import SglangEngine, SglangSettings
from temper.errors import BackendError
from temper.types import Completion, Publication, Request

if TYPE_CHECKING:
    from temper.engine.local.warming import ExpectedRequests

POLL_SECONDS = 1.0
"""Between two calls at an address where nobody answers."""


class SglangMember:
    """Implements engine.fleet.member.Member."""

    def __init__(self, address: str, settings: SglangSettings, checkpoints: Checkpoints) -> None:
        self._engine, self._start_seconds = SglangEngine(address, settings, checkpoints), settings.start_seconds
        self.name, self._is_closed = self._engine.name, False

    async def opened(self, silent_seconds: float) -> None:
        """Waits for: a server that answers there, for start_seconds. UserError when it cannot be trained with."""
        end = time.monotonic() + self._start_seconds
        while True:
            try:
                return await self._engine.start()
            except SamplerLost as error:
                if self._is_closed or time.monotonic() > end:
                    raise SamplerLost(f"{error.why} (nothing for {self._start_seconds:g} s)") from error
            await asyncio.sleep(POLL_SECONDS)

    async def generate(self, request: Request) -> Completion:
        return await self._engine.generate(request)

    async def abort(self, request_id: str) -> None:
        with contextlib.suppress(SamplerLost):  # whoever waits for the answer is told
            await self._engine.abort(request_id)

    async def interrupt(self, request_id: str) -> None:
        with contextlib.suppress(SamplerLost):
            await self._engine.interrupt(request_id)

    async def feed(self, publication: Publication, published: Digests, seconds: float) -> list[str]:
        """A server proves by itself what it took over, before it draws, and BackendError says what it did not. While it
        reads weights it gives no sign of life: the settings say how long that may take."""
        await self.opened(seconds)
        await self._engine.load(publication)
        return []

    async def differences(self, published: Digests, seconds: float) -> list[str]:
        return await self._engine.differences(seconds)

    def stats(self) -> Mapping[str, float]:
        return self._engine.stats()

    async def warm_up(
        self, expected: ExpectedRequests, tell: Callable[[int, int], None], silent_seconds: float
    ) -> None:
        """A server has warmed up before it answers."""

    async def ping(self, seconds: float) -> None:
        try:
            await self._engine.check(seconds)
        except SamplerLost:
            raise
        except BackendError as error:  # it answers, and not as a server does: so does a proxy before one that is dead
            raise SamplerLost(str(error)) from error

    async def rest(self, seconds: float) -> None:
        self._engine.forget()

    async def close(self) -> None:
        self._is_closed = True
        await self._engine.close()
