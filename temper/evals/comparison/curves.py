"""From attempts to curves: accuracy with its interval against the tokens it took, one curve per mode.

Owns: expectations over subsets and the interval over prompts. Refuses: drawing (scaling.py).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean

from temper.errors import UserError
from temper.evals.scaling import ScalingAttempt
from temper.evals.scores import majority_of_k, powers_to, share_interval
from temper.runs.report.plot import Line, Panel

Attempts = Sequence[Sequence[ScalingAttempt]]
"""By task and sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """One way to spend tokens."""

    mode: str
    setting: str
    """How far the mode was turned up, e.g. "8 samples"."""
    accuracy: float
    """Share of right answers, mean over prompts."""
    low: float
    """95% interval, prompts as the unit."""
    high: float
    tokens: float
    """Drawn per prompt, all samples and rounds: what one use of this mode costs."""
    injected: float
    """Tokens put into the model's mouth per prompt; not among `tokens`."""
    num_prompts: int
    """Prompts with enough scored attempts; the others are left out."""
    num_unscorable: int
    """Attempts without a score."""


def _reward(attempt: ScalingAttempt) -> float:
    assert attempt.score.value is not None, "only scored attempts are chosen among"
    return attempt.score.value


KEYS: dict[str, Callable[[ScalingAttempt], float]] = {
    "reward": _reward,
    "logprob": lambda attempt: attempt.mean_logprob,
}
"""What the best attempt has most of."""


def best_of(attempts: Attempts, *, by: str) -> list[CurvePoint]:
    """Best of 1, 2, 4, ... attempts by "reward" (the verifier itself, so what perfect choice could reach) or "logprob".

    The expectation over all subsets of the attempts, not the luck of the first few.
    """
    key = KEYS[by]

    def chosen(scored: Sequence[ScalingAttempt], k: int) -> float:
        return expected_choice([(key(attempt), float(attempt.is_right)) for attempt in scored], k)

    return [_of_subsets(f"best of N by {by}", attempts, k, chosen) for k in _counts(attempts)]


def majority(attempts: Attempts) -> list[CurvePoint]:
    """The commonest answer of 1, 2, 4, ... attempts; ties share the credit."""

    def voted(scored: Sequence[ScalingAttempt], k: int) -> float:
        return majority_of_k([attempt.answer for attempt in scored], [float(attempt.is_right) for attempt in scored], k)

    return [_of_subsets("majority", attempts, k, voted) for k in _counts(attempts)]


def single(mode: str, setting: str, attempts: Attempts) -> CurvePoint:
    """Each attempt as an answer of its own: a budget, or a round of refinement."""
    point = _of_subsets(mode, attempts, 1, lambda scored, k: fmean(attempt.is_right for attempt in scored))
    return dataclasses.replace(point, setting=setting)


def expected_choice(pairs: Sequence[tuple[float, float]], k: int) -> float:
    """Expected value of the (key, value) pair with the largest key among k drawn without replacement; ties by lot."""
    total, below = 0.0, 0
    for _, tied in groupby(sorted(pairs), key=lambda pair: pair[0]):
        values = [value for _, value in tied]
        # Subsets that reach into this group of keys and no further.
        subsets = math.comb(below + len(values), k) - math.comb(below, k)
        total += fmean(values) * (subsets / math.comb(len(pairs), k))
        below += len(values)
    return total


def panel(points: Sequence[CurvePoint], title: str) -> Panel:
    """Accuracy against tokens, one line per mode with its band."""
    lines = []
    for mode in dict.fromkeys(point.mode for point in points):
        own = sorted((point for point in points if point.mode == mode), key=lambda point: point.tokens)
        lines.append(
            Line(
                label=mode,
                xs=[point.tokens for point in own],
                ys=[point.accuracy for point in own],
                low=[point.low for point in own],
                high=[point.high for point in own],
            )
        )
    return Panel(title=title, lines=lines, x_label="tokens drawn per prompt", y_label="accuracy")


def _of_subsets(
    mode: str, attempts: Attempts, k: int, value: Callable[[Sequence[ScalingAttempt], int], float]
) -> CurvePoint:
    scored = [[attempt for attempt in members if attempt.score.is_value] for members in attempts]
    enough = [members for members in scored if len(members) >= k]
    if not enough:
        raise UserError(f"{mode}: no prompt has {k} attempts that could be scored")
    share = share_interval([value(members, k) for members in enough], sum(map(len, enough)))
    return CurvePoint(
        mode=mode,
        setting=f"{k} samples" if k > 1 else "1 sample",
        accuracy=share["score"],
        low=share["low"],
        high=share["high"],
        # Attempts without a score were drawn as well, so they are in the cost.
        tokens=fmean(k * fmean(attempt.num_drawn for attempt in members) for members in attempts),
        injected=fmean(k * fmean(attempt.num_injected for attempt in members) for members in attempts),
        num_prompts=len(enough),
        num_unscorable=sum(len(members) for members in attempts) - sum(map(len, scored)),
    )


def _counts(attempts: Attempts) -> list[int]:
    """1, 2, 4, ... up to the attempts that some prompt has scores for."""
    return powers_to(max(sum(attempt.score.is_value for attempt in members) for members in attempts) or 1)
