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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

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


def _is_of_a_collective(error: Exception) -> bool:
    return isinstance(error, DistError) or any(name in str(error).lower() for name in ("gloo", "nccl"))


class Channel:
    """One end of it. Each rank has one, over the same store."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world: int,
        *,
        seconds: float,
        find_lost: Callable[[], Failure | None] = lambda: None,
        key: bytes = b"",
    ) -> None:
        """seconds: that a word may take on any rank. find_lost: the first process of ours that has ended, where this
        rank started them. key: the same on all ranks; at most 64 bytes."""
        self._store, self.rank, self.world, self._key = store, rank, world, key
        self.seconds, self._find_lost = seconds, find_lost
        self._number = 0
        self._pieces = 0
        self._verb = "start"

    # Rank 0.

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

    def confirm(self) -> None:
        """Waits for: every rank's answer to the last word. Raises RankFailure for the first that failed, or for those
        that did not answer in time."""
        end, wait = time.monotonic() + self.seconds, FIRST_WAIT
        waiting = list(range(1, self.world))
        while waiting := [rank for rank in waiting if not self._store.check([self._answer_of(rank)])]:
            if (failure := self.find_failure()) is not None:
                raise RankFailure(failure, self._verb, self.world)
            if time.monotonic() > end:
                raise RankFailure(self._silent(waiting, f"for {self.seconds:g} s"), self._verb, self.world)
            time.sleep(wait)
            wait = min(LONGEST_WAIT, 2 * wait)

    def find_failure(self) -> Failure | None:
        """The first rank that said it failed; else one whose process has ended."""
        try:
            if self._store.check(["failure/1"]):
                found: Failure = self._unseal("failure/1", self._store.get("failure/1"))
                return found
        except DistNetworkError as error:  # it was the launcher's
            raise BackendError(f"the store in which trainer ranks meet is gone, and its launcher: {error}") from error
        return self._find_lost()

    def find_silent(self) -> Failure | None:
        """A rank that gives no sign of life, though no process of ours is known to have ended."""
        others = range(1, self.world)
        return self._silent(others, "any more") if find_silent(self._store, others) else None

    def blame(self, error: Exception) -> Exception:
        """What to raise for an error of our own: the failure of another rank, where that is its cause. A rank that
        fails leaves, and those who wait for it in a collective are told no more than that a connection closed, or
        after a while that nothing came."""
        end = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < end:
            if (failure := self.find_failure()) is not None:
                return RankFailure(failure, self._verb, self.world)
            time.sleep(LONGEST_WAIT)
        if not _is_of_a_collective(error):
            return error
        waiting = [rank for rank in range(1, self.world) if not self._store.check([self._answer_of(rank)])]
        silent = self._silent(waiting or range(1, self.world), f"any more: {error}")
        return RankFailure(silent, self._verb, self.world)

    # Other ranks.

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
            except DistNetworkError as error:
                raise BackendError(f"rank {self.rank}: rank 0 is gone: {error}") from error
        pieces = int(self._store.get(key))
        said = b"".join(self._store.get(f"{key}/{piece}") for piece in range(pieces))
        verb, payload = self._unseal(key, said)
        return verb, payload

    def done(self) -> None:
        self._store.set(self._answer_of(self.rank), "done")

    def failed(self, report: str, *, full_in: str = "") -> None:
        """The first to fail is the one that counts: others fail because it is gone."""
        place = self._store.add("failures", 1)
        failure = Failure(self.rank, report, full_in=full_in)
        name = f"failure/{place}"
        self._store.set(name, self._seal(name, failure))  # type: ignore[arg-type]

    # All of them.

    def _silent(self, waiting: Sequence[int], how_long: str) -> Failure:
        """Of those without an answer the ones that do not even beat: the others wait for them."""
        silent = find_silent(self._store, waiting) or list(waiting)
        named = "it" if len(silent) == 1 else f"ranks {silent}"
        return Failure(silent[0], f"nothing was heard of {named} {how_long}", True)

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
