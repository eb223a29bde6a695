"""What a fleet asks of each of its samplers.

Owns: the protocol, and how a sampler says that it is lost. Refuses: implementations (process/client.py,
sglang/member.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from temper.engine.digests import Digests
from temper.errors import BackendError
from temper.types import Completion, Publication, Request

if TYPE_CHECKING:
    from temper.engine.local.warming import ExpectedRequests


class SamplerLost(BackendError):
    """A sampler that has ended, that cannot be reached, or that was given up because it did not answer."""

    def __init__(self, why: str, so_far: Completion | None = None) -> None:
        """so_far: what it had told of the answer that was asked for."""
        super().__init__(f"{why}. Nothing that was drawn since the last checkpoint counts; go on with --resume")
        self.why, self.so_far = why, so_far


class Member(Protocol):
    """One sampler of a fleet, from its start to its end. Every method but the last may raise SamplerLost; then another
    is started in its place, and this one is closed."""

    name: str

    async def opened(self, silent_seconds: float) -> None:
        """Returns when it can take weights over. silent_seconds: after which one that gives no sign of life is lost."""
        ...

    async def generate(self, request: Request) -> Completion: ...

    async def abort(self, request_id: str) -> None: ...

    async def interrupt(self, request_id: str) -> None: ...

    async def feed(self, publication: Publication, published: Digests, seconds: float) -> list[str]:
        """Takes the weights over and shows that it holds them. Names of tensors that it holds with other numbers.

        published: sums of the tensors, each known once it was handed over. seconds: of silence after which it is lost.
        """
        ...

    async def differences(self, published: Digests, seconds: float) -> list[str]:
        """Names of tensors that it holds with other numbers than it was fed last."""
        ...

    def stats(self) -> Mapping[str, float]:
        """As of protocols.Sampler."""
        ...

    async def warm_up(
        self, expected: ExpectedRequests, tell: Callable[[int, int], None], silent_seconds: float
    ) -> None:
        """silent_seconds: after which one that gives no sign of life is lost."""
        ...

    async def ping(self, seconds: float) -> None:
        """Returns when it answers, and raises SamplerLost when it does not for so long."""
        ...

    async def rest(self, seconds: float) -> None:
        """Stale again: the trainer that fed it is gone."""
        ...

    async def close(self) -> None: ...
