"""Best-of-N at inference: N answers, a reward, the best is said. The choice is that of rejection sampling.

Owns: the pick of each prompt, what N buys on average, and how far from the sampler it may lead. Refuses: drawing
(attempts.py) and the rule itself (rollout/selection.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from temper.evals.scores import ROUNDING, Metric, best_of_k, mean_interval, powers_to, share_interval
from temper.rollout.selection import Attempt, Selection, best, choose, normalised
from temper.runs.results import PromptResult

BEST = Selection(name="best()", rule=best(), answer_of=lambda text: None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pick:
    """What is said to one prompt."""

    task_id: str
    prompt: str
    text: str | None
    """None: no sample could be scored, and `reason` says why."""
    score: float | None
    index: int | None
    """Which sample it is, from 0."""
    scores: tuple[float | None, ...]
    """Scores of all samples; None: could not be scored."""
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BestOfGain:
    """What choosing among n answers is worth."""

    n: int
    score: float
    """Expected score of the best of n, mean over prompts with that many scored samples."""
    low: float
    """95% interval, prompts as the unit; infinite for a single prompt whose scores have no bounds."""
    high: float
    kl_bound: float
    """Largest KL divergence, in nats, that the choice's distribution can have from the sampler's."""
    tokens: float
    """Drawn per prompt."""
    num_prompts: int


def kl_bound(n: int) -> float:
    """KL of best-of-n to its sampler is at most ln n - (n - 1) / n, and equal to it when no two scores are equal."""
    assert n >= 1, f"best-of-n needs n >= 1, got {n}"
    return math.log(n) - (n - 1) / n


def pick(prompt: PromptResult, selection: Selection = BEST) -> Pick:
    """The best scored sample; of equal ones the first. A sample that could not be scored is never said."""
    scored = [(place, sample) for place, sample in enumerate(prompt.samples) if sample.score is not None]
    attempts = [
        Attempt(score=sample.score or 0.0, said=normalised([sample.text]), answer=sample.answer) for _, sample in scored
    ]
    chosen = choose(selection, attempts).kept[:1]
    found = [scored[place] for place in chosen]
    reasons = [sample.reason for sample in prompt.samples if sample.reason is not None]
    missing = reasons[0] if reasons else f"no sample passed {selection.name}"
    return Pick(
        task_id=prompt.task_id,
        prompt=prompt.prompt,
        text=found[0][1].text if found else None,
        score=found[0][1].score if found else None,
        index=found[0][0] if found else None,
        scores=tuple(sample.score for sample in prompt.samples),
        reason=None if found else missing,
    )


def gains(prompts: Sequence[PromptResult]) -> list[BestOfGain]:
    """Best of 1, 2, 4, ... up to all samples: the expectation over all subsets, not the luck of the first few."""
    scores = [[sample.score for sample in prompt.samples if sample.score is not None] for prompt in prompts]
    tokens = fmean(fmean(sample.num_tokens for sample in prompt.samples) for prompt in prompts)
    found = []
    for n in powers_to(max(map(len, scores))) if any(scores) else ():
        enough = [own for own in scores if len(own) >= n]
        interval = _interval([best_of_k(own, n) for own in enough], sum(map(len, enough)))
        found.append(
            BestOfGain(
                n=n,
                score=interval["score"],
                low=interval["low"],
                high=interval["high"],
                kl_bound=kl_bound(n),
                tokens=n * tokens,
                num_prompts=len(enough),
            )
        )
    return found


def _interval(values: Sequence[float], num_samples: int) -> Metric:
    if all(-ROUNDING <= value <= 1 + ROUNDING for value in values):
        return share_interval(values, num_samples)
    if len(values) > 1:
        return mean_interval(values)
    return {"score": values[0], "low": -math.inf, "high": math.inf, "prompts": 1}
