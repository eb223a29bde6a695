"""What happens in an environment beside its words: calls, failures, and what was done to the world.

Owns: the kinds, and which of them are never forgotten. Refuses: deciding what a kind costs or ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum


class EventKind(StrEnum):
    """What happened in an environment beside its words."""

    TOOL_CALL = "tool_call"
    TOOL_ERROR = "tool_error"
    """The tool ran and failed."""
    TOOL_TIMEOUT = "tool_timeout"
    BAD_CALL = "bad_call"
    """The policy asked for something that is not a tool, or with arguments that do not fit."""
    DENIED = "denied"
    """Asked for and refused: a limit, a missing permission."""
    DESCRIBED = "described"
    """Refused, too: an irreversible act that nobody approved. What it would have done is in the detail."""
    SIDE_EFFECT = "side_effect"
    """Something outside the conversation changed."""
    MODEL_CALL = "model_call"
    """The environment asked a model by itself: a judge, or a user that a model plays."""
    REPLAYED = "replayed"
    """The episode was begun anew, for its environment's process was lost. The cost is what the lost play has cost."""


REFUSED = (EventKind.DENIED, EventKind.DESCRIBED)
LASTING = (EventKind.SIDE_EFFECT, *REFUSED)
"""What is never forgotten: what was done to the world, and what was refused. Attempts that failed did it, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    kind: EventKind
    name: str
    """Name of the tool or of the thing changed."""
    detail: str = ""
    seconds: float = 0.0
    cost: float = 0.0
    """In whatever unit the environment charges."""


def lasting(events: Iterable[Event], where: str = "") -> tuple[Event, ...]:
    """Those that outlive an attempt: LASTING ones, and plays that were lost. `where` is told first in each."""
    kept = (event for event in events if event.kind in (*LASTING, EventKind.REPLAYED))
    return tuple(replace(event, detail=f"{where}: {event.detail}") if where else event for event in kept)
