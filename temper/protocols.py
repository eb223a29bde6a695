"""The seams. A new backend is a new file behind one of these, never an `if` in the loop.

Owns: what the loop may ask of a sampler, a trainer, a source of batches, an environment, a reward.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from temper.types import (
    Batch,
    Completion,
    Event,
    Group,
    Message,
    Publication,
    Request,
    Sample,
    Scalar,
    Score,
    Status,
    Task,
    TrainResult,
    Trajectory,
)


class Sampler(Protocol):
    """Token ids in; tokens, log-probabilities and versions out."""

    @property
    def version(self) -> int:
        """Version of the weights that draw the next token."""
        ...

    async def generate(self, request: Request) -> Completion:
        """Draws one completion. Concurrent calls are batched together; equal prompts are prefilled once."""
        ...

    async def abort(self, request_id: str) -> None:
        """Ends a request; its generate() returns what was drawn so far with finish ABORT. Unknown ids are ignored."""
        ...

    async def interrupt(self, request_id: str) -> None:
        """Pauses a request: its generate() returns what was drawn so far with finish INTERRUPT. A new request with the
        same id whose prompt ends with those tokens goes on as if nothing had happened."""
        ...

    async def load(self, publication: Publication) -> None:
        """Takes over the weights, all or none. Returns when the next token will be drawn by them."""
        ...

    def stats(self) -> Mapping[str, float]:
        """Counts since the last call, finite numbers by name. Every name is optional: what a sampler cannot count it
        leaves out, and names of its own are ignored.

        Totals: prefill_tokens, decode_tokens, preemptions (requests that lost their cache). Means over its steps:
        running, waiting (requests), occupancy (share of its rows). Shares: kv_use (of the cache, at its peak),
        prefix_hit_rate (of prompt tokens, found in the cache). Tokens per second of its own steps: prefill_tok_s,
        decode_tok_s. Seconds with a request in flight in which it could draw: drawing_seconds (engine/in_flight.py).
        """
        ...

    async def close(self) -> None: ...


@runtime_checkable
class HasTools(Protocol):
    """An environment whose tools may do what cannot be undone."""

    def allow(self, names: Collection[str], *, must_exist: bool) -> None:
        """Before start(). These run without being asked about. must_exist: a name that no such tool has is refused."""
        ...

    @property
    def dry_tools(self) -> Sequence[str]:
        """Names of the tools of a started one whose calls are only described."""
        ...


@runtime_checkable
class SharesDevice(Protocol):
    """A sampler that computes where the trainer does."""

    def paused(self) -> AbstractContextManager[None]:
        """Inside it draws nothing; requests wait."""
        ...


@runtime_checkable
class HoldsCopies(Protocol):
    """A sampler with weights of its own elsewhere."""

    async def differences(self) -> Sequence[str]:
        """Tensors that it holds with other numbers than were published last, and where."""
        ...


class Trainer(Protocol):
    """Batch in, report out."""

    @property
    def version(self) -> int:
        """Optimiser steps published so far."""
        ...

    def score(
        self, samples: Sequence[Sample], who: Literal["policy", "reference", "teacher", "critic", "routers"]
    ) -> Sequence[Sequence[float]]:
        """Log-probability of each drawn token of each row (0.0 elsewhere), or its value; without gradient.

        "routers": of the recorded experts that each was drawn by, the share that the policy's routers would not choose.
        """
        ...

    def step(self, batch: Batch) -> TrainResult:
        """One optimiser step per entry of batch.updates. Raises BackendError on a non-finite gradient."""
        ...

    def publish(self) -> Publication: ...

    @property
    def scales(self) -> Mapping[str, float]:
        """Coefficients that credit is computed with, as controllers have set them."""
        ...

    def prepack(self, updates: tuple[tuple[Sample, ...], ...]) -> None:
        """May lay the rows of a batch that is trained next end to end, while a sampler draws. May do nothing."""
        ...

    def warm_up(self, rows: Sequence[Sample]) -> None:
        """May put rows that nobody drew through the passes of a step, so that the first step finds everything compiled
        and allocated. Weights, the state of the optimiser and every count stay as they were."""
        ...

    def observe(self, score: float) -> None:
        """The held-out mean of the training reward: references that wait for progress go by it."""
        ...

    def peak_memory_bytes(self) -> int:
        """Most that was held at once since the last call, of the device or of the process."""
        ...

    @property
    def peak_is_since_start(self) -> bool:
        """Whether the system cannot start its count anew: the peak is then that of the whole process."""
        ...

    def save(self, folder: Path) -> None:
        """Writes all of its state into an existing, empty folder."""
        ...

    def load(self, folder: Path) -> None: ...


class BatchSource(Protocol):
    """Where the loop gets its batches: rollouts for RL, examples for SFT."""

    @property
    def num_queued(self) -> int | None:
        """Groups that wait to be trained; None: it draws nothing."""
        ...

    async def start(self) -> None: ...

    async def take(self, step: int) -> Batch:
        """The batch of this step. Waits for at most the configured deadline, then raises BackendError."""
        ...

    async def release(self, version: int) -> None:
        """The new weights are live. Not earlier: a slot freed before admits work that is stale at birth."""
        ...

    def state(self) -> dict[str, Scalar | list[Scalar]]:
        """What a checkpoint needs to go on at exactly this point."""
        ...

    def load_state(self, state: Mapping[str, Scalar | list[Scalar]]) -> None: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvOpening:
    """How an episode begins."""

    messages: tuple[Message, ...]
    """What the policy sees first."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """JSON schemas of the tools it may call, as chat templates take them."""
    state: str | None = None
    """Name of the state that the world is in now: episodes of one task are in the same state where it is the same,
    whatever was said on the way. None: only equal conversations are in the same state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvReply:
    """What an environment answers to one message of the policy."""

    messages: tuple[Message, ...] = ()
    """Shown to the policy next; never trained on."""
    reward: float | None = None
    """Reward of this turn; None when only the end is scored."""
    is_done: bool = False
    events: tuple[Event, ...] = ()
    """What happened on the way: tool calls, errors, denials, side effects."""
    status: Status | None = None
    """How the episode ended, when is_done and not as it should, e.g. BAD_FORMAT. None: COMPLETED."""
    result: str | None = None
    """What rewards judge if the episode ends here, cut off or not, instead of the last message. None: as before."""
    state: str | None = None
    """As in EnvOpening, for the turn that comes next."""


class Env(Protocol):
    """One episode of one task. Single-use: started once, closed always."""

    async def start(self, task: Task, seed: int) -> EnvOpening: ...

    async def step(self, message: Message) -> EnvReply: ...

    async def close(self) -> tuple[Event, ...] | None:
        """May return what it did in a step that did not come back, so that it is recorded all the same."""
        ...


@runtime_checkable
class Charges(Protocol):
    """An environment whose calls may cost something."""

    def limit_cost(self, most: float) -> None:
        """Called before start(). A call that would pass it is refused, and ends the episode as cut. Raises UserError,
        or start() does, when nothing in it has a cost."""
        ...


@runtime_checkable
class MayBeLost(Protocol):
    """An environment in a process that may be lost, whereupon its episode is played anew with another."""

    def replay(self, *, spent: float, alone: bool) -> None:
        """Called before start() of such a play. spent: what the lost ones have cost, which counts for what the episode
        may cost. alone: no other episode may live in its process."""
        ...


class LabelledCases(Protocol):
    async def measure(self) -> Mapping[str, float]:
        """How far the reward agrees with people now, and by how much less than when the run began. {}: nothing was
        measured then."""
        ...

    def state(self) -> dict[str, Scalar]:
        """The agreement when the run began, for a checkpoint."""
        ...

    def load_state(self, state: Mapping[str, Scalar]) -> None: ...


class VerdictLog(Protocol):
    def take(self) -> list[dict[str, Scalar]]:
        """One record per verdict since the last call."""
        ...

    def metrics(self) -> dict[str, float]:
        """Counts since the start."""
        ...


class Reward(ABC):
    """Scores finished trajectories. A reward has a name and score(); it overrides what else it has, and the rest does
    nothing.

    Failures are Score.error(reason), never a number.
    """

    name: str
    pays_turns: bool = False
    """True: its weight scales what score_turns() pays the turns, and it adds nothing to the score of the trajectory."""
    learns: bool = False
    """Whether the same answer may be worth something else later: evolve(), state() and load_state() are then called."""
    fingerprint: str = ""
    """Identifies a question that must not change within a run: its prompt, the model asked and how it is asked. Empty:
    there is no such question."""
    labels: LabelledCases | None = None
    """Cases that people judged, for measuring agreement before the run and again during it."""
    log: VerdictLog | None = None
    """Where every verdict is kept."""

    @abstractmethod
    async def score(self, task: Task, trajectory: Trajectory) -> Score: ...

    async def score_turns(self, task: Task, trajectory: Trajectory) -> tuple[Score, Sequence[float | None]]:
        """The score, for the record, and what each turn is paid, None for nothing. Asked in place of score() where
        pays_turns is true, never beside it: a judge costs money. Without a score nothing is paid."""
        raise AssertionError(f"{type(self).__name__} has pays_turns and no score_turns()")

    def check(self, task: Task) -> str | None:
        """Why this task can never be scored (an unparsable gold answer), or None. Called when data is loaded."""
        return None

    async def start(self) -> Mapping[str, float]:
        """What was measured before training. Raises UserError for a reward that is not fit to be trained on."""
        return {}

    async def evolve(self, group: Group) -> object:
        """Learns from a trained group. Groups come in draw order, never from evaluation. What is returned is for tests
        and logs."""
        return None

    def state(self) -> dict[str, Scalar | list[Scalar]]:
        """What was learned, for a checkpoint."""
        return {}

    def load_state(self, state: Mapping[str, Scalar | list[Scalar]]) -> None:
        pass

    def save(self, folder: Path) -> None:
        """Writes what is too large for state(), the weights of a model, into the folder, which it makes."""

    def load(self, folder: Path) -> None:
        pass

    async def close(self) -> None:
        pass
