"""What is put aside at every evaluation, for people: transcripts that earn the most or are typical, and all that was
done to the world.

Owns: which transcripts, and how much of each. Refuses: escaping; whoever shows a transcript does that.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from temper.runs.records import AuditKind, AuditRecord, EffectRecord
from temper.types import LASTING, Message, Score, Task, Trajectory

AUDITS = 20
"""Transcripts of each kind per evaluation."""
MAX_CHARACTERS = 10_000
"""Longest message and longest transcript. A run of a thousand evaluations must not outgrow its disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutAttempt:
    """One attempt at a held-out task, scored twice."""

    task: Task
    trajectory: Trajectory
    """With the training reward as its score."""
    heldout: Score
    """By the held-out verifier; the training reward's score when there is no other."""


def choose(
    attempts: Sequence[HeldOutAttempt], *, evaluation: str, stage: int, step: int, count: int = AUDITS
) -> list[AuditRecord]:
    """The `count` attempts with the highest training reward, and `count` seeded-random ones of all.

    The highest rewards are where a policy that cheats shows; chance shows what the others would hide. Among equal
    rewards the earlier attempt wins, so that a resumed run chooses the same.
    """
    scored = [attempt for attempt in attempts if attempt.trajectory.score.value is not None]
    top = sorted(scored, key=lambda attempt: -(attempt.trajectory.score.value or 0.0))[:count]
    drawn = random.Random(f"audit/{stage}/{step}/{evaluation}").sample(attempts, min(count, len(attempts)))
    kinds: tuple[tuple[AuditKind, Sequence[HeldOutAttempt]], ...] = (("top", top), ("random", drawn))
    return [
        AuditRecord(
            stage=stage,
            step=step,
            evaluation=evaluation,
            kind=kind,
            place=place,
            task_id=attempt.task.id,
            prompt=tuple(Message(role=m.role, content=shorten(m.content), name=m.name) for m in attempt.task.messages),
            text=shorten(transcript(attempt.trajectory)),
            reward=attempt.trajectory.score.value,
            heldout=attempt.heldout.value,
        )
        for kind, chosen in kinds
        for place, attempt in enumerate(chosen)
    ]


def list_effects(attempts: Sequence[HeldOutAttempt], *, evaluation: str, stage: int, step: int) -> list[EffectRecord]:
    """All of them: what was done to the world is never forgotten."""
    done = [
        (one.trajectory, turn, event)
        for one in attempts
        for turn, event in one.trajectory.placed_events
        if event.kind in LASTING
    ]
    return [
        EffectRecord(
            stage=stage,
            step=step,
            evaluation=evaluation,
            place=place,
            task_id=trajectory.task_id,
            member=trajectory.index,
            turn=turn,
            kind=event.kind,
            name=event.name,
            detail=event.detail,
        )
        for place, (trajectory, turn, event) in enumerate(done)
    ]


def transcript(trajectory: Trajectory) -> str:
    """All that was said after the prompt. One turn is just its text; in several, each message is under its role."""
    said = [message for turn in trajectory.turns for message in (turn.message, *turn.replies)]
    if len(said) <= 1:
        return trajectory.text
    return "\n\n".join(f"[{message.role}]\n{message.content}" for message in said)


def shorten(text: str) -> str:
    """Both ends of a long text: how it began, and its answer."""
    left_out = len(text) - MAX_CHARACTERS
    if left_out <= 0:
        return text
    half = MAX_CHARACTERS // 2
    return f"{text[:half]}\n[{left_out} characters left out]\n{text[-half:]}"
