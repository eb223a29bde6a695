"""A sampler that draws nothing and takes the time of drawing it, on any number of GPUs.

Owns: the Sampler protocol over replicas: routing, versions, interrupting, aborting, pausing. Refuses: what a replica
computes in which second (replica.py), and what is said: tokens are all alike.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from temper.errors import TaskError
from temper.simulate.lengths import Lengths
from temper.simulate.replica import DrawnRow, Replica
from temper.simulate.speeds import Speeds
from temper.types import Column, Completion, Finish, Publication, Request

_MEMBER = re.compile(r"^(?P<group>.*)/(?P<member>[^/]*)/\d+$")
"""Of a request's id: the group, and the member's place or "greedy"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerLimits:
    replicas: int = 1
    """GPUs that draw, each with the whole model."""
    max_running: int
    """Sequences of one replica."""
    kv_tokens: int = 0
    """Tokens in the cache of one replica; 0: no limit."""
    longest: int = 0
    """Tokens of a sequence at most, prompt included; 0: no limit."""


class SimulatedSampler:
    """Implements protocols.Sampler and protocols.SharesDevice."""

    def __init__(self, speeds: Speeds, lengths: Lengths, limits: SamplerLimits) -> None:
        self._speeds, self._lengths, self._limits = speeds, lengths, limits
        self._replicas = [
            Replica(speeds, max_running=limits.max_running, kv_tokens=limits.kv_tokens) for _ in range(limits.replicas)
        ]
        self._loads = np.zeros(limits.replicas, np.int64)
        self._version = 0
        self._live: dict[str, tuple[int, DrawnRow, asyncio.Future[Completion], Request]] = {}
        self._paused: dict[str, int] = {}
        """Tokens that interrupted requests have drawn, until they come back."""
        self._last = self.totals()

    @property
    def version(self) -> int:
        return self._version

    async def generate(self, request: Request) -> Completion:
        if request.id in self._live:
            raise TaskError(f'a request with the id "{request.id}" is running already: give each request its own id')
        done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        place = int(self._loads.argmin())
        row = DrawnRow(
            prompt=request.prompt_ids,
            prompt_tokens=len(request.prompt_ids),
            tokens=self._tokens(request),
            finished=lambda row: self._end(request.id, len(row.versions), None),
        )
        self._live[request.id] = (place, row, done, request)
        self._loads[place] += 1
        self._replicas[place].add(row)
        try:
            # Unblocked by: the replica's timer, or whoever ends the request.
            return await done
        finally:
            if request.id in self._live and self._live[request.id][1] is row:
                await self.abort(request.id)

    async def abort(self, request_id: str) -> None:
        self._stop(request_id, Finish.ABORT)

    async def interrupt(self, request_id: str) -> None:
        self._stop(request_id, Finish.INTERRUPT)

    async def load(self, publication: Publication) -> None:
        with self.paused():
            await asyncio.sleep(self._speeds.publish)
        for replica in self._replicas:
            replica.change_weights(publication.version)
        self._version = publication.version

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._hold()
        try:
            yield
        finally:
            self._go_on()

    def hold_for(self, seconds: float) -> None:
        """Draws nothing for so long."""
        self._hold()
        asyncio.get_running_loop().call_later(seconds, self._go_on)

    def _hold(self) -> None:
        for replica in self._replicas:
            replica.hold()

    def _go_on(self) -> None:
        for replica in self._replicas:
            replica.go_on()

    def stats(self) -> Mapping[str, float]:
        totals = self.totals()
        new = {name: value - self._last[name] for name, value in totals.items()}
        self._last = totals
        busy = max(new["busy_seconds"], 1e-9)
        return {
            "decode_tokens": new["decode_tokens"],
            "decode_tok_s": new["decode_tokens"] * self._limits.replicas / busy,
            "running": float(sum(replica.num_running for replica in self._replicas)),
            "waiting": float(sum(replica.load - replica.num_running for replica in self._replicas)),
            "occupancy": new["row_seconds"] / busy / self._limits.max_running,
            "kv_use": max(replica.kv_use for replica in self._replicas),
            "preemptions": 0.0,
        }

    def totals(self) -> dict[str, float]:
        """Over all replicas, since the start."""
        return {
            "busy_seconds": sum(replica.busy_seconds for replica in self._replicas),
            "row_seconds": sum(replica.row_seconds for replica in self._replicas),
            "decode_tokens": sum(replica.decoded for replica in self._replicas),
        }

    async def close(self) -> None:
        for request_id in list(self._live):
            await self.abort(request_id)

    def _tokens(self, request: Request) -> int:
        """How many it will draw."""
        left = self._left(request)
        room = self._limits.longest - len(request.prompt_ids) if self._limits.longest else left
        return max(1, min(left, room, request.params.max_new_tokens))

    def _left(self, request: Request) -> int:
        """How many the answer still has: what its name says, less what it has drawn before it was interrupted."""
        found = _MEMBER.match(request.id)
        group, member = (found["group"], found["member"]) if found else (request.id, "0")
        # A baseline is no member of its group; what is not numbered is one more than the last.
        length = self._lengths(group, int(member) if member.isdecimal() else len(group))
        return length - self._paused.get(request.id, 0)

    def _stop(self, request_id: str, finish: Finish) -> None:
        if request_id not in self._live:
            return
        place, row, _, _ = self._live[request_id]
        drawn = self._replicas[place].remove(row)
        if finish is Finish.INTERRUPT:
            self._paused[request_id] = self._paused.get(request_id, 0) + drawn
        self._end(request_id, drawn, finish)

    def _end(self, request_id: str, drawn: int, finish: Finish | None) -> None:
        """`finish` None: it came to its own end."""
        place, row, done, request = self._live.pop(request_id)
        self._loads[place] -= 1
        if finish is None:  # an answer that ends with the last token that it may have is whole
            is_cut = drawn >= request.params.max_new_tokens and drawn < self._left(request)
            finish = Finish.LENGTH if is_cut else Finish.STOP
        if finish is not Finish.INTERRUPT:
            self._paused.pop(request_id, None)
        if not done.done():
            done.set_result(
                Completion(
                    prompt_ids=request.prompt_ids,
                    token_ids=Column[int](np.zeros(drawn, np.int32)),
                    logprobs=Column[float](np.zeros(drawn, np.float32)),
                    versions=Column[int](row.versions),
                    finish=finish,
                    params=request.params,
                )
            )
