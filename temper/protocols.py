"""The seams. A new backend is a new file behind one of these, never an `if` in the loop.

Owns: what the loop may ask of a sampler, a trainer, a source of batches, an environment, a reward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
        decode_tok_s.
        """
        ...

    async def close(self) -> None: ...


@runtime_checkable
class SharesDevice(Protocol):
    """A sampler that computes where the trainer does."""

    def resting(self) -> AbstractContextManager[None]:
        """Inside it draws nothing; requests wait."""
        ...


class Trainer(Protocol):
    """Batch in, report out."""

    @property
    def version(self) -> int:
        """Optimiser steps published so far."""
        ...

    def score(
        self, samples: Sequence[Sample], who: Literal["policy", "reference", "teacher", "critic"]
    ) -> Sequence[Sequence[float]]:
        """Log-probability of each drawn token of each row (0.0 elsewhere), or its value; without gradient."""
        ...

    def step(self, batch: Batch) -> TrainResult:
        """One optimiser step per entry of batch.updates. Raises BackendError on a non-finite gradient."""
        ...

    def publish(self) -> Publication: ...

    def save(self, folder: Path) -> None:
        """Writes all of its state into an existing, empty folder."""
        ...

    def load(self, folder: Path) -> None: ...


class BatchSource(Protocol):
    """Where the loop gets its batches: rollouts for RL, examples for SFT."""

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


class Env(Protocol):
    """One episode of one task. Single-use: started once, closed always."""

    async def start(self, task: Task, seed: int) -> EnvOpening: ...

    async def step(self, message: Message) -> EnvReply: ...

    async def close(self) -> None: ...


@runtime_checkable
class PreparedReward(Protocol):
    """A reward that has something to prove before it is trained on, e.g. that its judge agrees with people."""

    async def start(self) -> Mapping[str, float]:
        """What it measured. Raises UserError when it is not fit to be trained on."""
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


@runtime_checkable
class LabelledReward(Protocol):
    """A reward whose agreement with people is measured before the run and again during it."""

    @property
    def labels(self) -> LabelledCases: ...


class VerdictLog(Protocol):
    def take(self) -> list[dict[str, Scalar]]:
        """One record per verdict since the last call."""
        ...

    def metrics(self) -> dict[str, float]:
        """Counts since the start."""
        ...


@runtime_checkable
class LoggedReward(Protocol):
    """A reward that keeps a record of every verdict."""

    @property
    def log(self) -> VerdictLog: ...


@runtime_checkable
class FrozenReward(Protocol):
    """A reward whose question must not change within a run."""

    @property
    def fingerprint(self) -> str:
        """Of the prompt, the model asked and how it is asked."""
        ...


@runtime_checkable
class LearningReward(Protocol):
    """A reward that changes with what it sees. Groups come in draw order, never from evaluation."""

    async def evolve(self, group: Group) -> object: ...

    def state(self) -> dict[str, Scalar | list[Scalar]]: ...

    def load_state(self, state: Mapping[str, Scalar | list[Scalar]]) -> None: ...


@runtime_checkable
class SavedReward(Protocol):
    """A learning reward whose state is too large for state(): weights of a model."""

    def save(self, folder: Path) -> None:
        """Writes all of it into an existing, empty folder."""
        ...

    def load(self, folder: Path) -> None: ...


@runtime_checkable
class TurnReward(Protocol):
    """A reward that can pay the turns of an episode beside scoring the whole of it."""

    @property
    def pays_turns(self) -> bool:
        """True: its weight scales what it pays the turns, and it adds nothing to the score of the trajectory."""
        ...

    async def score_turns(self, task: Task, trajectory: Trajectory) -> tuple[Score, Sequence[float | None]]:
        """The score, for the record, and what each turn is paid, None for nothing. Asked in place of score(), never
        beside it: a judge costs money. Without a score nothing is paid."""
        ...


class RewardFn(Protocol):
    """Scores a finished trajectory. Failures are Score.error(reason), never a number."""

    name: str

    async def score(self, task: Task, trajectory: Trajectory) -> Score: ...

    def check(self, task: Task) -> str | None:
        """Why this task can never be scored (an unparsable gold answer), or None. Called when data is loaded."""
        ...

    async def close(self) -> None: ...
