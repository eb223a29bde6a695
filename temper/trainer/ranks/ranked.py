"""A trainer of several ranks: rank 0 says each verb of the protocol to the others, and all do it together.

Owns: which verbs need all ranks, and in which order they are said. Refuses: what a rank computes (local.py), and how
ranks are started (cluster/ranks.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

from temper.errors import BackendError, TemperError
from temper.trainer.local import LocalTrainer, Updates
from temper.trainer.memory import find_full
from temper.trainer.ranks.channel import Channel, RankFailure
from temper.types import Batch, Publication, Sample, TrainResult

Result = TypeVar("Result")
OPEN, END = "open", "end"
"""Words beside the trainer's verbs: a stage begins; the run is over."""
ELSEWHERE = "a pass outside of the step"
VERBS = ("prepack", "step", "score", "warm_up", "observe", "gather", "save")


class Together:
    """Does one thing at a time on all ranks."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._one_verb = threading.RLock()
        """Credit and a canary are scored by two threads; ranks do what they are told in one order."""

    def do(self, verb: str, payload: object, own: Callable[[], Result]) -> Result:
        """Our own part, while the others do theirs. Raises the failure of the rank that failed first."""
        with self._one_verb:
            self._channel.tell(verb, payload)
            try:
                result = own()
            except TemperError:
                raise  # of the recipe or its data: every rank finds it
            except Exception as error:
                raise self._channel.blame(error) from error
            self._channel.confirm()
            return result

    def find_gone(self) -> RankFailure | None:
        """A rank that failed, or is gone without a word. It takes some seconds to be sure."""
        failure = self._channel.find_gone()
        return None if failure is None else RankFailure(failure, "the run", self._channel.world)


class RankedTrainer:
    """Implements protocols.Trainer on rank 0."""

    def __init__(self, own: LocalTrainer, together: Together) -> None:
        self._own, self._together = own, together
        self._sent: Updates | None = None
        """What the other ranks have packed already."""

    @property
    def version(self) -> int:
        return self._own.version

    @property
    def scales(self) -> Mapping[str, float]:
        return self._own.scales

    def score(
        self, samples: Sequence[Sample], who: Literal["policy", "reference", "teacher", "critic", "routers"]
    ) -> list[Sequence[float]]:
        return self._together.do("score", (samples, who), lambda: self._own.score(samples, who))

    def prepack(self, updates: Updates) -> None:
        self._together.do("prepack", (updates,), lambda: self._own.prepack(updates))
        self._sent = updates

    def step(self, batch: Batch) -> TrainResult:
        """The others need the rows alone, not the groups that they come from."""
        sent, self._sent = self._sent, None
        payload = () if sent is batch.updates else (Batch(updates=batch.updates),)
        return self._together.do("step", payload, lambda: self._own.step(batch))

    def warm_up(self, rows: Sequence[Sample]) -> None:
        self._together.do("warm_up", (rows,), lambda: self._own.warm_up(rows))

    def observe(self, score: float) -> None:
        self._together.do("observe", (score,), lambda: self._own.observe(score))

    def publish(self) -> Publication:
        if not self._own.is_cut:
            return self._own.publish()
        return self._own.publish_gathered(
            lambda names: self._together.do("gather", (names,), lambda: self._own.gather(names))
        )

    def save(self, folder: Path) -> None:
        if not self._own.is_cut:
            return self._own.save(folder)
        return self._together.do("save", (folder,), lambda: self._own.save(folder))

    def load(self, folder: Path) -> None:
        """All ranks load when they open a stage."""
        raise AssertionError("a trainer of several ranks is opened with its checkpoint")

    def peak_memory_bytes(self) -> int:
        """Of rank 0: it has the largest share, and the sampler beside it."""
        return self._own.peak_memory_bytes()

    @property
    def peak_is_since_start(self) -> bool:
        return self._own.peak_is_since_start


def follow(channel: Channel, open_trainer: Callable[[Any], LocalTrainer]) -> Any:
    """Does on this rank what rank 0 says, until the run is over; returns what it says then.

    open_trainer: from what comes with the word "open". Raises what went wrong here, after it was told.
    """
    trainer: LocalTrainer | None = None
    ready: Updates | None = None
    while True:
        verb, payload = channel.hear()
        if verb == END:
            channel.done()
            return payload
        try:
            if verb == OPEN:
                trainer = None  # first: two models may not fit
                trainer = open_trainer(payload)
            else:
                assert trainer is not None, f"{verb} before a stage was opened"
                assert verb in VERBS, f"{verb} is no verb of a trainer"
                if verb == "prepack":
                    (ready,) = payload
                elif verb == "step" and not payload:
                    assert ready is not None, "a step without rows"
                    payload = (Batch(updates=ready),)
                getattr(trainer, verb)(*payload)
        except BaseException as error:
            full = find_full(error, ELSEWHERE)
            with suppress(BackendError):  # rank 0 is gone, and what went wrong here is said here
                channel.failed(error, full_in="" if full is None else full.phase)
            raise
        channel.done()
