"""How often answers look back at themselves: by words of English that people use when they do.

Owns: the words. They are signs, not proof: a model may say "wait" and not reconsider, and reconsider without a word.
Refuses: judging whether looking back helped; beside the reward these shares say that.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence

from temper.types import Trajectory

REFLECTION = re.compile(
    r"\b(?:wait|hmm+|double[- ]check\w*|re-?check\w*|let me (?:check|verify|see|think)|let's (?:check|verify)"
    r"|to (?:check|verify)|(?:check|verify)(?:ing)? (?:this|that|my|the answer|again))\b",
    re.IGNORECASE,
)
"""Looks again."""
BACKTRACKING = re.compile(
    r"\b(?:on second thought|no, (?:that|this|wait)|(?:that|this)(?:'s| is| was) (?:wrong|incorrect|not right)"
    r"|i (?:made|was) (?:a mistake|an error|wrong)|(?:try|start|begin)(?:ing)? (?:again|over|anew|another|a different)"
    r"|let me (?:redo|restart|correct)|alternatively|go(?:ing)? back)\b",
    re.IGNORECASE,
)
"""Gives up what it said before."""
REFLECTION_PARTS = ("wait", "hmm", "check", "verify", "let me ")
BACKTRACKING_PARTS = (
    "second thought", "no, ", "wrong", "incorrect", "not right", "mistake", "error", "again", "over", "anew",
    "another", "different", "redo", "restart", "correct", "alternatively", "back",
)  # fmt: skip
"""What says either has one of these in it. Most answers have none, and the patterns take ten times as long."""


def looks_back(trajectory: Trajectory) -> tuple[bool, bool]:
    """Whether anything that the policy said reflects, and whether it backtracks."""
    return looks_back_in("\n".join(turn.message.content for turn in trajectory.turns))


def looks_back_in(said: str) -> tuple[bool, bool]:
    folded = said.casefold()
    return (
        any(part in folded for part in REFLECTION_PARTS) and bool(REFLECTION.search(said)),
        any(part in folded for part in BACKTRACKING_PARTS) and bool(BACKTRACKING.search(said)),
    )


def reflection_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Shares of responses with at least one such sign."""
    if not trajectories:
        return {}
    reflects, backtracks = zip(*map(looks_back, trajectories), strict=True)
    return {
        "gen/reflection_rate": statistics.fmean(reflects),
        "gen/backtracking_rate": statistics.fmean(backtracks),
    }
