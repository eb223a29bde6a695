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


def reflection_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Shares of responses with at least one such sign, in anything the policy said."""
    if not trajectories:
        return {}
    said = ["\n".join(turn.message.content for turn in trajectory.turns) for trajectory in trajectories]
    return {
        "gen/reflection_rate": statistics.fmean(bool(REFLECTION.search(text)) for text in said),
        "gen/backtracking_rate": statistics.fmean(bool(BACKTRACKING.search(text)) for text in said),
    }
