"""How often held-out answers look back at themselves, by phase of training: before it, and after each stage.

Owns: which evaluations these are, and their lines. Refuses: finding the signs (batching/reflection.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from temper.types import EvaluationResult

SIGNS = ("reflection", "backtracking")
WIDTH = 26
"""Characters of a column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    name: str
    """Such as "start", "after 1 sft", "before 2 rl" (where stages before it were not evaluated)."""
    asked: str
    """Name of the evaluation."""
    shares: Mapping[str, tuple[float, float, float]]
    """Share of its answers with a sign, and the 95% interval, by sign."""


def phases_of(evaluations: Sequence[EvaluationResult], stages: Mapping[int, str]) -> tuple[Phase, ...]:
    """Of answers that were sampled, or greedy ones where none were. Empty where nobody looked for signs."""
    looked = [result for result in evaluations if all(sign in result.details for sign in SIGNS)]
    if not looked:
        return ()
    most = max(result.samples_per_prompt for result in looked)
    asked = next(result.name for result in looked if result.samples_per_prompt == most)
    own = [result for result in looked if result.name == asked]
    named = {result.stage: f"{result.stage + 1} {stages.get(result.stage, '')}".strip() for result in own}
    first = "start" if own[0].stage == 0 else f"before {named[own[0].stage]}"
    start = [_phase(first, own[0])] if own[0].step == 0 else []
    last = {result.stage: result for result in own if result.step}
    return (*start, *(_phase(f"after {named[stage]}", result) for stage, result in last.items()))


def _phase(name: str, result: EvaluationResult) -> Phase:
    shares = {}
    for sign in SIGNS:
        found = result.details[sign]
        assert isinstance(found, Mapping), "a share has an interval"
        shares[sign] = (found["score"], found["low"], found["high"])
    return Phase(name=name, asked=result.name, shares=shares)


def phase_lines(phases: Sequence[Phase]) -> list[str]:
    """Nothing where no answer has a sign: a model that never says such words is most of them."""
    if not any(share for phase in phases for share, _, _ in phase.shares.values()):
        return []
    rows = [(f"{phases[0].asked} answers with signs of", [phase.name for phase in phases])]
    rows += [(sign, [_percent(*phase.shares[sign]) for phase in phases]) for sign in SIGNS]
    return ["", *(f"  {name:<32}{''.join(f'{cell:<{WIDTH}}' for cell in cells)}".rstrip() for name, cells in rows)]


def _percent(share: float, low: float, high: float) -> str:
    return f"{100 * share:.1f}% [{100 * low:.1f}, {100 * high:.1f}]"
