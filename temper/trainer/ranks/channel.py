"""What rank 0 says to the other trainer ranks, and what they answer.

Owns: the order of words, who failed first, deadlines. Refuses: tensors (sums.py), and what a word means (ranked.py).
Nothing here is a collective: a rank that is late, stopped or gone holds nobody up for longer than a deadline. Words
are pickles: ranks trust each other, and each word is sealed with a key that they share, so that nobody else is heard.
"""

from __future__ import annotations

import hashlib
import hmac
import pickle
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from torch.distributed import DistError, DistNetworkError, DistStoreError, Store  # type: ignore[attr-defined]

from temper.errors import BackendError, OutOfMemory
from temper.trainer.ranks.beats import find_silent

PIECE_BYTES = 4 << 20
"""A store takes values of at most 8 MB."""
LISTENING_SECONDS = 60.0
"""How long one question for the next word lasts; it is asked again as long as rank 0 keeps the store."""
FIRST_WAIT, LONGEST_WAIT = 1e-3, 0.05
KEY_VARIABLE = "TEMPER_RANK_KEY"
"""Where ranks find their key."""
DIGEST_BYTES = 16
GRACE_SECONDS = 5.0
"""How long a rank that was cut off by another's failure waits to hear of it."""
Asked = ParamSpec("Asked")
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Failure:
    """Of a rank: what went wrong there."""

    rank: int
    report: str
    """A traceback, or how its process ended."""
    is_lost: bool = False
    """Whether its process is gone or silent, rather than raised an error."""
    full_in: str = ""
    """Phase in which its GPU had no room, if that is what went wrong."""
    is_cut_off: bool = False
    """Whether it says no more than that an exchange with others broke: one of them is the cause."""


class RankFailure(BackendError):
    """A trainer rank failed, and with it the step."""

    def __init__(self, failure: Failure, verb: str, world: int) -> None:
        doing = "was lost" if failure.is_lost else "failed"
        self.reason = f"trainer rank {failure.rank} of {world} {doing} in {verb}: {failure.report.strip()}."
        self.is_lost = failure.is_lost
        self.full: OutOfMemory | None = None
        """That the rank's GPU had no room, if it was so."""
        if failure.full_in:
            last = failure.report.strip().splitlines()[-1]
            self.full = OutOfMemory(failure.full_in, f"trainer rank {failure.rank} of {world}: {last}")
        super().__init__(f"{self.reason}\nNothing of this step was kept; --resume goes on from the last checkpoint")


class StoreGone(BackendError):
    """Nothing can be said to other ranks any more."""


def is_cut_off(error: BaseException) -> bool:
    """Whether an error says no more than that others cannot be reached."""
    return isinstance(error, DistError | StoreGone) or any(name in str(error).lower() for name in ("gloo", "nccl"))


def _here(rank: int) -> str:
    return f"here/{rank}"


def _lost(ranks: Sequence[int], how_long: str) -> Failure:
    named = "it" if len(ranks) == 1 else f"ranks {list(ranks)}"
    return Failure(ranks[0], f"nothing was heard of {named} {how_long}", True)


def _over_store(
    speak: Callable[Concatenate[Channel, Asked], Answer],
) -> Callable[Concatenate[Channel, Asked], Answer]:
    """StoreGone where the store is gone: rank 0 keeps it, or its launcher."""

    @wraps(speak)
    def checked(self: Channel, /, *args: Asked.args, **named: Asked.kwargs) -> Answer:
        try:
            return speak(self, *args, **named)
        except DistNetworkError as error:
            keeper = "its launcher" if self.rank == 0 else "rank 0 or its launcher"
            raise StoreGone(
                f"the store in which trainer ranks meet is gone, and {keeper} with it: {error}. Go on with --resume"
            ) from error

    return checked


class Channel:
    """One end of it. Each rank has one, over the same store."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world: int,
        *,
        seconds: float,
        find_lost: Callable[[], Sequence[Failure]] = lambda: (),
        key: bytes = b"",
    ) -> None:
        """seconds: that a word may take on any rank. find_lost: processes of ours that have ended, where this rank
        started them. key: the same on all ranks."""
        self._store, self.rank, self.world = store, rank, world
        self._key = hashlib.sha256(key).digest()  # of any length: a digest takes a key of at most 64 bytes
        self.seconds, self._find_lost = seconds, find_lost
        self._number = 0
        self._pieces = 0
        self._verb = "start"
        self._cut_off_since: float | None = None
        """When a rank first said that others had cut it off, and nobody why."""

    # Rank 0.

    @_over_store
    def tell(self, verb: str, payload: object = None) -> None:
        """Says a word to all other ranks. They answer when they have done it: confirm()."""
        self._forget()
        self._number += 1
        self._verb = verb
        said = self._seal(f"word/{self._number}", (verb, payload))
        starts = range(0, len(said), PIECE_BYTES)
        for piece, start in enumerate(starts):
            self._store.set(f"word/{self._number}/{piece}", said[start : start + PIECE_BYTES])  # type: ignore[arg-type]
        self._pieces = len(starts)
        self._store.set(f"word/{self._number}", str(self._pieces))

    @_over_store
    def confirm(self, seconds: float | None = None) -> None:
        """Waits for: every rank's answer to the last word, for so long; None: as for every word. Raises RankFailure for
        the first that failed, or for those that did not answer in time."""
        seconds = self.seconds if seconds is None else seconds
        end, wait = time.monotonic() + seconds, FIRST_WAIT
        waiting = list(range(1, self.world))
        while waiting := [rank for rank in waiting if not self._store.check([self._answer_of(rank)])]:
            if (failure := self.find_failure()) is not None:
                raise RankFailure(failure, self._verb, self.world)
            if time.monotonic() > end:
                raise RankFailure(self._silent(waiting, f"for {seconds:g} s"), self._verb, self.world)
            time.sleep(wait)
            wait = min(LONGEST_WAIT, 2 * wait)

    @_over_store
    def find_failure(self) -> Failure | None:
        """The rank that is the cause, once that can be told: the first that said what went wrong there, or one whose
        process has ended. Who was cut off says so at once, the cause perhaps a moment later."""
        told = self._told()
        if (cause := self._cause(told)) is not None or not told:
            return cause
        now = time.monotonic()
        self._cut_off_since = self._cut_off_since or now
        return None if now - self._cut_off_since < GRACE_SECONDS else self.find_gone()

    @_over_store
    def find_gone(self) -> Failure | None:
        """What went wrong on another rank, though nobody may say it: who does not even beat; else the first that was
        cut off. It takes some seconds to be sure."""
        silent = find_silent(self._store, range(1, self.world))
        told = self._told()  # only now: others may have been cut off meanwhile
        speaking = {failure.rank for failure in told}
        silent = [rank for rank in silent if rank not in speaking]
        return self._cause(told) or (_lost(silent, "any more") if silent else next(iter(told), None))

    @_over_store
    def blame(self, error: Exception) -> Exception:
        """What to raise for an error of our own: the failure of another rank, where that is its cause. A rank that
        fails leaves, and those who wait for it in a collective are told no more than that a connection closed, or
        after a while that nothing came."""
        end = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < end:
            if (failure := self.find_failure()) is not None:
                return RankFailure(failure, self._verb, self.world)
            time.sleep(LONGEST_WAIT)
        if not is_cut_off(error):
            return error
        waiting = [rank for rank in range(1, self.world) if not self._store.check([self._answer_of(rank)])]
        silent = self.find_gone() or self._silent(waiting or range(1, self.world), f"any more: {error}")
        return RankFailure(silent, self._verb, self.world)

    # Other ranks.

    @_over_store
    def hear(self) -> tuple[str, Any]:
        """Waits for: the next word of rank 0, for as long as that keeps the store. BackendError when it is gone."""
        self._number += 1
        key = f"word/{self._number}"
        while True:
            try:
                self._store.wait([key], timedelta(seconds=LISTENING_SECONDS))
                break
            except DistStoreError:
                continue  # nothing to do for a minute: rank 0 waits for rollouts
        pieces = int(self._store.get(key))
        said = b"".join(self._store.get(f"{key}/{piece}") for piece in range(pieces))
        verb, payload = self._unseal(key, said)
        return verb, payload

    @_over_store
    def done(self) -> None:
        self._store.set(self._answer_of(self.rank), "done")

    @_over_store
    def failed(self, error: BaseException, *, full_in: str = "") -> None:
        """The first to fail is the one that counts: others fail because it is gone."""
        place = self._store.add("failures", 1)
        report = "".join(traceback.format_exception(error))
        failure = Failure(self.rank, report, full_in=full_in, is_cut_off=not full_in and is_cut_off(error))
        name = f"failure/{place}"
        self._store.set(name, self._seal(name, failure))  # type: ignore[arg-type]

    def _told(self) -> list[Failure]:
        """What ranks said of their failures, the first first."""
        told: list[Failure] = []
        while self._store.check([name := f"failure/{len(told) + 1}"]):
            told.append(self._unseal(name, self._store.get(name)))
        return told

    def _cause(self, told: Sequence[Failure]) -> Failure | None:
        """Who said what went wrong, or ended without a word."""
        speaking = {failure.rank for failure in told}
        causes = [failure for failure in told if not failure.is_cut_off]
        causes += [lost for lost in self._find_lost() if lost.rank not in speaking]
        return next(iter(causes), None)

    # All of them.

    @_over_store
    def sign_in(self) -> None:
        """Says that this rank is there."""
        self._store.set(_here(self.rank), self._seal(_here(self.rank), self.rank))  # type: ignore[arg-type]

    @_over_store
    def missing(self) -> list[int]:
        """Ranks that have not signed in."""
        return [rank for rank in range(self.world) if not self._store.check([_here(rank)])]

    @_over_store
    def require_one_key(self) -> None:
        """BackendError where ranks have other keys. Said at once: rank 0 would wait for the answer to a word that
        another rank does not read."""
        for rank in range(self.world):
            self._unseal(_here(rank), self._store.get(_here(rank)))

    def _silent(self, waiting: Sequence[int], how_long: str) -> Failure:
        """Of those without an answer the ones that do not even beat: the others wait for them."""
        return _lost(find_silent(self._store, waiting) or list(waiting), how_long)

    def _seal(self, name: str, value: object) -> bytes:
        said = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
        return self._digest(name, said) + said

    def _unseal(self, name: str, sealed: bytes) -> Any:
        digest, said = sealed[:DIGEST_BYTES], sealed[DIGEST_BYTES:]
        if not hmac.compare_digest(digest, self._digest(name, said)):
            raise BackendError(
                f'"{name}" in the store of the trainer ranks was written by somebody who does not have their key. '
                f"Where a launcher starts them, {KEY_VARIABLE} must be the same for all"
            )
        return pickle.loads(said)

    def _digest(self, name: str, said: bytes) -> bytes:
        digest = hashlib.blake2b(name.encode() + b"\0", key=self._key, digest_size=DIGEST_BYTES)
        digest.update(said)
        return digest.digest()

    def _answer_of(self, rank: int) -> str:
        return f"answer/{self._number}/{rank}"

    def _forget(self) -> None:
        """What all have heard and answered is deleted: a run says thousands of words."""
        if self._number == 0:
            return
        pieces = [f"word/{self._number}/{piece}" for piece in range(self._pieces)]
        for key in (f"word/{self._number}", *pieces, *(self._answer_of(rank) for rank in range(1, self.world))):
            self._store.delete_key(key)
