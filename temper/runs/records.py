"""What a run notes beside its steps: transcripts for people to read, alarms, what judges said, histories of prompts.

Owns: records that are written (store/run_store.py) and come back (reader.py) as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from temper.types import EventKind, Message, Scalar

AuditKind = Literal["top", "random"]
AlarmLevel = Literal["note", "warn", "pause", "stop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRecord:
    """One held-out transcript, kept because its reward was among the highest or because chance chose it."""

    stage: int
    step: int
    evaluation: str
    """Name of the evaluation it belongs to."""
    kind: AuditKind
    place: int
    """Number inside its kind, from 0; the highest reward first."""
    task_id: str
    prompt: tuple[Message, ...]
    text: str
    """Untrusted: whoever shows it escapes it."""
    reward: float | None
    """Score by the training reward; None: it could not score the transcript."""
    heldout: float | None
    """Score by the held-out verifier, which is the training reward unless the recipe names another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectRecord:
    """What an attempt at a held-out task did to the world, or was refused. What training did is with its rollouts."""

    stage: int
    step: int
    evaluation: str
    place: int
    """Number inside its evaluation, from 0."""
    task_id: str
    member: int
    """Which attempt at that task."""
    turn: int | None
    """None: it stands in no turn, as what a step did that did not come back."""
    kind: EventKind
    name: str
    """Of the tool."""
    detail: str
    """Untrusted: whoever shows it escapes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmRecord:
    """A rule that fired. One rule fires at most once a step."""

    stage: int
    step: int
    time: float
    """Seconds since 1970."""
    rule: str
    level: AlarmLevel
    value: float | None
    """What was measured; None: it was not a number."""
    text: str
    """What the rule saw."""
    meaning: str
    """What that usually means."""
    advice: str
    """What to try."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictRecord:
    """What a judge or a learned reward said of one response, or of one step or criterion of it."""

    stage: int
    step: int
    """Step that trained or dropped its group; in an evaluation, the step that was evaluated."""
    part: str
    """Part of the reward; "heldout/..." when the held-out verifier asked."""
    task_id: str
    group_id: str
    """Group of the rollout; in an evaluation, the task. "labelled": the judge was measured on its labelled set.
    "parity", "parity/...": a trial before training."""
    member: int
    kind: str
    """Kind of the score, as in Score."""
    value: float | None
    reason: str | None
    """Why there is no value."""
    fingerprint: str
    """Fingerprint of prompt, model and decoding; empty when the reward has none."""
    detail: Mapping[str, Scalar] = field(default_factory=dict)
    """What else the reward noted: the criterion, the step, both orders of a comparison ..."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRecord:
    """How a prompt stood after one of the steps that consumed a group of it; fields as in PromptHistory."""

    stage: int
    task_id: str
    step: int
    source: str
    draws: int
    attempts: int
    passed: float
    rate: float | None
