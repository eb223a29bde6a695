"""Several samplers behind one Sampler: processes, or servers.

Owns: who draws what, that a publication reaches all, that the dead are replaced and their requests drawn elsewhere.
Refuses: starting them (cluster/samplers.py, sglang/member.py), which of them may draw (health.py) and whose turn it is
(routing.py). A request has the random numbers of its name: whoever goes on with it draws what the dead would have.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from temper.engine.digests import Digests, digested
from temper.engine.fleet.counts import Losses, tell_together, together
from temper.engine.fleet.health import Health, Standing
from temper.engine.fleet.member import Member, SamplerLost
from temper.engine.fleet.routing import Router
from temper.engine.pieces import Decode, PiecedAnswer
from temper.errors import BackendError, TemperError
from temper.types import Completion, Finish, Publication, Request

if TYPE_CHECKING:
    from temper.engine.local.warming import ExpectedRequests

Answer = TypeVar("Answer")
PING_SECONDS = 5.0
"""Between two looks whether a sampler still answers."""
REPLACE_SECONDS = 1500.0
"""For one of many to come back when all are lost: to open its model, and to take weights over."""
MAX_NAMED = 3
"""Tensors written out in an error; the others are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    max_restarts: int
    """Of each."""
    silent_seconds: float
    """One that owes an answer for so long is ended."""
    feeds_late: bool
    """Whether the last publication can still be read when the trainer has gone on; if not, who comes back waits for the
    next."""
    quantized: frozenset[str] = frozenset()
    """Published tensors of which they hold float8."""


class _OtherNumbers(BackendError):
    """A sampler holds something else than was published."""


class _Place:
    """One sampler after the other, at one place of the fleet."""

    def __init__(self, sampler: Member) -> None:
        self.sampler, self.health = sampler, Health()
        self.in_flight = 0
        self.replacing: asyncio.Task[None] | None = None


class Fleet:
    """Implements protocols.Sampler. One event loop asks it."""

    def __init__(
        self,
        start: Callable[[int], Member],
        num_samplers: int,
        settings: FleetSettings,
        *,
        note: Callable[[str], None] = lambda text: None,
        closed: Callable[[], None] = lambda: None,
        decode: Decode | None = None,
    ) -> None:
        """start: begins the sampler of a place, without waiting for it. note: told of every end. closed: called once,
        at the end. decode: text of token ids, for requests with stop texts that go on elsewhere."""
        self._start, self._note, self._closed, self._decode = start, note, closed, decode
        self._settings, self._silent_seconds = settings, settings.silent_seconds
        self._places = [_Place(start(number)) for number in range(num_samplers)]
        self._router = Router()
        self._where: dict[str, _Place | None] = {}
        """Where each request is drawn; None: it waits for a sampler."""
        self._stopped: dict[str, Finish] = {}
        """Requests that were ended: while they wait, and if whoever draws them is lost before it answers."""
        self._publishing, self._changed = asyncio.Lock(), asyncio.Condition()
        self._last: Publication | None = None
        self._published = Digests()
        """Sums of the last publication: a canary's few prompts may pass by one of many samplers, this asks each."""
        self._watching: asyncio.Task[None] | None = None
        self._is_closed = False
        self._losses = Losses()

    @property
    def version(self) -> int:
        return 0 if self._last is None else self._last.version

    async def generate(self, request: Request) -> Completion:
        """Waits for: a sampler that is ready, and its answer. Unblocked by: the answer, or the end of all samplers."""
        self._where[request.id] = None
        try:
            return await self._draw(request)
        finally:
            self._where.pop(request.id, None)
            self._stopped.pop(request.id, None)

    async def abort(self, request_id: str) -> None:
        await self._end(request_id, Finish.ABORT)

    async def interrupt(self, request_id: str) -> None:
        await self._end(request_id, Finish.INTERRUPT)

    async def load(self, publication: Publication) -> None:
        """All that live show that they hold it, or it fails. One that ends on the way is replaced, and fed when it is
        back."""
        async with self._publishing:
            before = self._last, self._published
            publication, self._published = digested(publication, self._settings.quantized)
            self._last = publication
            living = [place for place in self._places if place.health.standing in (Standing.STALE, Standing.READY)]
            answers = await asyncio.gather(
                *(self._feed(place, publication) for place in living), return_exceptions=True
            )
            if refused := [answer for answer in answers if isinstance(answer, BaseException)]:
                self._last, self._published = before
                raise refused[0]
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch(), name="watch over samplers")
        await self._some_ready()

    def stats(self) -> Mapping[str, float]:
        """Of all together. Since the last call: restarts, requests that went to another, and their tokens that did."""
        counts = [place.sampler.stats() for place in self._places if place.health.standing is Standing.READY]
        return together(counts, len(self._places)) | {"samplers": float(len(counts))} | self._losses.take()

    async def warm_up(self, expected: ExpectedRequests, tell: Callable[[int, int], None]) -> None:
        """Every sampler for all rows: when others end it draws them all. One that ends on the way is replaced, and the
        one in its place compiles when it draws."""
        warming = zip(self._places, tell_together(len(self._places), tell), strict=True)
        await asyncio.gather(
            *(self._asked(p, partial(_warm, expected, told, self._silent_seconds)) for p, told in warming)
        )

    async def differences(self) -> list[str]:
        """Tensors that a sampler holds with other numbers than were published, and which sampler."""
        async with self._publishing:
            ready = [place for place in self._places if place.health.standing is Standing.READY]
            looks = (self._asked(p, lambda s: s.differences(self._published, self._silent_seconds)) for p in ready)
            found = zip(ready, await asyncio.gather(*looks), strict=True)
            return [f"{name} of {place.sampler.name}" for place, names in found for name in names or ()]

    async def rest(self) -> None:
        """Back to before the first publication, with the same processes: the trainer that fed them is gone. Nothing is
        watched over meanwhile: nobody may hear the answers."""
        self._stop_watching()
        async with self._publishing:
            self._last, self._router = None, Router()
            living = [place for place in self._places if place.health.standing in (Standing.STALE, Standing.READY)]
            await asyncio.gather(*(self._rest(place) for place in living))

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._stop_watching()
        await asyncio.gather(*(place.sampler.close() for place in self._places))
        replacing = [place.replacing for place in self._places if place.replacing is not None]
        await asyncio.gather(*replacing, return_exceptions=True)  # what they waited for has been closed
        self._closed()

    async def _draw(self, request: Request) -> Completion:
        """Where a sampler ends, another goes on behind what it had told."""
        pieces = PiecedAnswer(request, self._decode)
        while True:
            await self._some_ready(request.id)
            if finish := self._stopped.get(request.id):
                return pieces.ended(finish)
            asked = pieces.rest()
            ready = {n: p.in_flight for n, p in enumerate(self._places) if p.health.standing is Standing.READY}
            number = self._router.choose(asked.prompt_ids, ready)
            place, sampler = self._places[number], self._places[number].sampler
            self._where[request.id] = place
            place.in_flight += 1
            try:
                completion = await sampler.generate(asked)
            except SamplerLost as error:
                self._ended(place, sampler, error)
                self._where[request.id] = None
                self._losses.reissued += 1
                if error.so_far is not None:
                    self._losses.rescued += len(error.so_far.token_ids)
                    if (so_far := pieces.add(error.so_far)).finish is Finish.STOP:  # over two pieces of the dead
                        return so_far
                continue
            finally:
                place.in_flight -= 1
            self._router.drawn(asked.prompt_ids, completion.token_ids, number)
            return pieces.add(completion)

    async def _end(self, request_id: str, finish: Finish) -> None:
        if request_id not in self._where:
            return
        place, self._stopped[request_id] = self._where[request_id], finish
        if place is None:
            async with self._changed:
                self._changed.notify_all()
        elif finish is Finish.ABORT:
            await place.sampler.abort(request_id)
        else:
            await place.sampler.interrupt(request_id)

    async def _some_ready(self, request_id: str = "") -> None:
        """Waits for: a sampler that is ready. Unblocked by: the end of the last that could be, of the request, or of
        the time that one has to open its model."""
        try:
            async with asyncio.timeout(REPLACE_SECONDS), self._changed:
                while not self._is_any_ready() and request_id not in self._stopped:
                    await self._changed.wait()
        except TimeoutError as error:
            raise SamplerLost(
                f"no sampler came back within {REPLACE_SECONDS:g} s: {_obituary(self._places, self._settings)}"
            ) from error

    def _is_any_ready(self) -> bool:
        """Raises SamplerLost when none can be any more."""
        if self._is_closed:
            raise SamplerLost("the samplers were closed")
        standings = {place.health.standing for place in self._places}
        if Standing.READY in standings:
            return True
        if self._last is None:
            raise BackendError("the samplers are stale: publish weights before asking for tokens")
        if standings == {Standing.GONE} or not self._settings.feeds_late:
            raise SamplerLost(_obituary(self._places, self._settings))
        return False

    async def _feed(self, place: _Place, publication: Publication) -> None:
        """Raises what a living sampler says against it, and _OtherNumbers for one that then holds something else."""
        # A watch that pings would find nothing out: whoever takes weights over answers nothing else.
        if wrong := await self._asked(place, lambda s: s.feed(publication, self._published, self._silent_seconds)):
            raise _OtherNumbers(_describe(place.sampler.name, publication.version, wrong))
        place.health = place.health.fed(publication.version)
        async with self._changed:
            self._changed.notify_all()

    async def _rest(self, place: _Place) -> None:
        await self._asked(place, lambda sampler: sampler.rest(self._silent_seconds))
        place.health = place.health.starved()

    async def _asked(self, place: _Place, ask: Callable[[Member], Awaitable[Answer]]) -> Answer | None:
        """None: it has ended."""
        sampler = place.sampler
        try:
            return await ask(sampler)
        except SamplerLost as error:
            self._ended(place, sampler, error)
            return None

    def _stop_watching(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None

    def _ended(self, place: _Place, sampler: Member, error: SamplerLost) -> None:
        """Once for each sampler that ends: every request that it drew comes here."""
        if place.sampler is not sampler or place.health.standing in (Standing.LOST, Standing.GONE) or self._is_closed:
            return
        place.health = place.health.ended(error.why, max_restarts=self._settings.max_restarts)
        self._router.forget(self._places.index(place))
        self._note(f"{error.why}; {_consequences(place, self._places)}")
        if place.replacing is None or place.replacing.done():
            place.replacing = asyncio.create_task(self._replace(place), name="replacement of a sampler")

    async def _replace(self, place: _Place) -> None:
        """Until one lives at that place, or none may be started any more. Publications do not wait for one that opens
        its model: it is fed when it has."""
        while place.health.standing is Standing.LOST and not self._is_closed:
            try:
                await place.sampler.close()
                if self._is_closed:
                    return
                self._losses.sampler_restarts += 1
                place.sampler = self._start(self._places.index(place))
                await place.sampler.opened(self._silent_seconds)
            except Exception as error:  # Ray's and the system's, too: unseen, all wait for one that nobody starts
                if self._is_closed:
                    return
                place.health = place.health.restarted().ended(_why(error), max_restarts=self._settings.max_restarts)
                self._note(_why(error))
                continue
            place.health = place.health.restarted()
            try:
                async with self._publishing:
                    if self._settings.feeds_late and self._last is not None and place.health.version is None:
                        await self._feed(place, self._last)
            except _OtherNumbers as error:
                # Where it reads the trainer's own memory the next step may have begun, and that is no error.
                self._note(f"{error}; it waits for the next publication")
            except Exception as error:  # it does not take what the others took, or there is no room to hand it over
                place.health = place.health.ended(_why(error), max_restarts=self._settings.max_restarts)
                self._note(f"{place.sampler.name} was not fed, and is ended: {error}")
        async with self._changed:
            self._changed.notify_all()

    async def _watch(self) -> None:
        """Finds those that ended or stopped while nobody asked them for tokens."""
        while True:
            await asyncio.sleep(PING_SECONDS)
            if not self._publishing.locked():
                ready = [place for place in self._places if place.health.standing is Standing.READY]
                pings = (self._asked(place, lambda sampler: sampler.ping(self._silent_seconds)) for place in ready)
                await asyncio.gather(*pings)


async def _warm(expected: ExpectedRequests, tell: Callable[[int, int], None], seconds: float, sampler: Member) -> None:
    await sampler.opened(seconds)
    await sampler.warm_up(expected, tell, seconds)


def _why(error: Exception) -> str:
    return str(error) if isinstance(error, TemperError) else f"no other sampler could take its place: {error!r}"


def _describe(who: str, version: int, names: Collection[str]) -> str:
    listed = ", ".join([*names][:MAX_NAMED]) + (f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else "")
    return f"{who} holds other numbers than publication {version} in {listed}. Nothing was drawn with them"


def _consequences(place: _Place, places: Sequence[_Place]) -> str:
    then = "another takes its place" if place.health.standing is Standing.LOST else "it is not replaced any more"
    go = "go to another" if any(each.health.standing is Standing.READY for each in places) else "wait for it"
    return then + (f". {place.in_flight} requests {go}" if place.in_flight else "")


def _obituary(places: Sequence[_Place], settings: FleetSettings) -> str:
    ends = "; ".join(dict.fromkeys(place.health.why for place in places if place.health.why))
    tries = f", after {settings.max_restarts} restarts each" if settings.feeds_late else ""
    return f"no sampler is left to draw{tries}: {ends}"
