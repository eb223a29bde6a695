"""Two results on the same prompts: paired differences with intervals, and which prompts changed.

Owns: pairing, the bootstrap over prompts, the tests per prompt. Refuses: results whose budgets differ, and running
anything. Prompts are the unit throughout: samples of one prompt resemble each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean

import numpy as np

from temper.errors import UserError
from temper.evals.comparison.verdict import LARGE_K, Difference, Verdict, judge
from temper.evals.passk import pass_at_k, t_quantile
from temper.evals.scores import CORRECT_AT, ROUNDING, best_of_k, majority_of_k, powers_to
from temper.runs.results import PromptResult, SampleResult, SuiteResult, differing_budget
from temper.types import Scalar, Status

RESAMPLES = 4000
"""How many samples the bootstrap draws, and how many times signs are flipped."""
BLOCK = 500
"""Resamples held in memory together."""

Array = np.ndarray
Samples = Sequence[SampleResult]
IsRight = Callable[[SampleResult], bool]
Metric = Callable[[PromptResult], float | None]
"""A number for one prompt; None where it has none, e.g. pass@8 of a prompt with seven scored samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptChange:
    """One prompt under both models."""

    task_id: str
    prompt: str
    gold: str | None
    base: float
    """Mean score of the scored samples."""
    trained: float
    num_base: int
    """Scored samples."""
    num_trained: int
    p_value: float
    """Fisher's exact test for right and wrong, a permutation test for scores in between."""
    adjusted: float
    """Benjamini and Hochberg: calling all prompts at or below x changed is wrong for at most a share x of them."""
    base_sample: SampleResult
    """One sample of each, from the seed at which they part the most."""
    trained_sample: SampleResult

    @property
    def difference(self) -> float:
        return self.trained - self.base


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Everything the page shows."""

    base: SuiteResult
    trained: SuiteResult
    num_samples: int
    """Most samples that every prompt has in both results."""
    large_k: int
    """The k of the verdict."""
    differences: tuple[Difference, ...]
    """Differences of quality: pass@k, majority, best of k."""
    drift: tuple[Difference, ...]
    """Differences of length and format."""
    prompts: tuple[PromptChange, ...]
    """Strongest evidence first; prompts that one model has no score for are left out."""
    verdict: Verdict

    @property
    def budget(self) -> Mapping[str, Scalar]:
        return self.base.budget

    @property
    def regressions(self) -> tuple[PromptChange, ...]:
        return tuple(change for change in self.prompts if change.difference < 0)

    @property
    def improvements(self) -> tuple[PromptChange, ...]:
        return tuple(change for change in self.prompts if change.difference > 0)


def compare(base: SuiteResult, trained: SuiteResult, *, seed: int = 0) -> Comparison:
    """Compares two results of one suite. Raises UserError, naming what differs, unless they asked the same."""
    pairs = _pairs(base, trained)
    num_samples = min(len(prompt.samples) for pair in pairs for prompt in pair)
    large_k = LARGE_K if num_samples >= LARGE_K else 2 ** (num_samples.bit_length() - 1)
    is_right = _is_right_at(float(base.budget.get("correct_at", CORRECT_AT)))
    quality, drift = _quality(pairs, num_samples, is_right), _drift(is_right)
    rows = paired_differences(pairs, quality | drift, seed=seed)
    differences = tuple(row for row in rows if row.name in quality)
    by_name = {row.name: row for row in differences}
    if "pass@1" not in by_name:
        raise UserError("the two results have no prompt that both could score, so there is nothing to compare")
    return Comparison(
        base=base,
        trained=trained,
        num_samples=num_samples,
        large_k=large_k,
        differences=differences,
        drift=tuple(row for row in rows if row.name in drift),
        prompts=prompt_changes(pairs, seed=seed),
        verdict=judge(by_name["pass@1"], by_name.get(f"pass@{large_k}", by_name["pass@1"]), large_k),
    )


def paired_differences(
    pairs: Sequence[tuple[PromptResult, PromptResult]], metrics: Mapping[str, tuple[str, Metric]], *, seed: int
) -> list[Difference]:
    """Each metric (unit, function of a prompt) under both models. Metrics that no pair of prompts has are left out."""
    values = np.array(
        [[[_number(metric(prompt)) for _, metric in metrics.values()] for prompt in pair] for pair in pairs]
    )
    units = {name: unit for name, (unit, _) in metrics.items()}
    return differences_of(values, units, seed=seed)


def differences_of(
    values: Array, units: Mapping[str, str], *, seed: int, resamples: int = RESAMPLES
) -> list[Difference]:
    """Differences between the models; `values` are by prompt, model (base, trained) and metric, NaN where none."""
    has_both = np.isfinite(values).all(axis=1)
    changes = np.where(has_both, values[:, 1] - values[:, 0], 0.0)
    lows, highs = intervals(changes, has_both, seed, resamples)
    p_values = sign_flip(changes, seed, resamples)
    found = []
    for place, (name, unit) in enumerate(units.items()):
        both = values[has_both[:, place], :, place]
        if not len(both):
            continue
        base, trained = (float(mean) for mean in both.mean(axis=0))
        found.append(
            Difference(
                name=name,
                unit=unit,
                base=base,
                trained=trained,
                low=float(lows[place]),
                high=float(highs[place]),
                p_value=float(p_values[place]),
                num_prompts=len(both),
            )
        )
    return found


def intervals(changes: Array, has_both: Array, seed: int, resamples: int = RESAMPLES) -> tuple[Array, Array]:
    """95% intervals of the column means of `changes` (prompt, metric), by bootstrap over rows where `has_both`.

    The plain percentile interval is too narrow for few prompts by the factor sqrt((n - 1) / n) z / t; its percentiles
    are taken further out by just that much (Hesterberg 2015, expanded percentile interval). One prompt: no bound.
    """
    num_prompts = len(changes)
    random = np.random.default_rng([seed, 0])
    means = []
    for _ in range(resamples // BLOCK):
        weights = random.multinomial(num_prompts, np.full(num_prompts, 1 / num_prompts), size=BLOCK).astype(float)
        counts = weights @ has_both
        means.append(np.where(counts > 0, weights @ changes / np.maximum(counts, 1), np.nan))
    drawn = np.concatenate(means)
    bounds = []
    for column, count in zip(drawn.T, has_both.sum(axis=0), strict=True):
        finite = column[np.isfinite(column)]
        if count < 2 or not len(finite):
            bounds.append((-math.inf, math.inf))
            continue
        z = t_quantile(int(count) - 1) * math.sqrt(count / (count - 1))
        tail = NormalDist().cdf(-z)
        bounds.append(tuple(np.quantile(finite, [tail, 1 - tail])))
    lows, highs = np.array(bounds).T
    return lows, highs


def sign_flip(changes: Array, seed: int, resamples: int = RESAMPLES) -> Array:
    """Two-sided p-value of each column mean (prompt, metric) when the two models are alike on every prompt.

    Then each prompt's difference is as likely as its negative, whatever its size: no normal distribution is assumed,
    and the level is exact also when two prompts out of a hundred carry all of the difference.
    """
    random = np.random.default_rng([seed, 1])
    observed = np.abs(changes.sum(axis=0))
    beyond = np.zeros(changes.shape[1])
    for _ in range(resamples // BLOCK):
        signs = random.integers(0, 2, size=(BLOCK, len(changes))) * 2.0 - 1.0
        # The tolerance: sums of the same numbers in another order differ in the last bit.
        beyond += (np.abs(signs @ changes) >= observed - 1e-9).sum(axis=0)
    return (beyond + 1) / (resamples + 1)


def prompt_changes(pairs: Sequence[tuple[PromptResult, PromptResult]], *, seed: int) -> tuple[PromptChange, ...]:
    """Every prompt that both could score, with its own test, smallest p-value first."""
    scored = [pair for pair in pairs if all(_scores(prompt.samples) for prompt in pair)]
    p_values = [_p_value(*pair, seed=seed + place) for place, pair in enumerate(scored)]
    adjusted = false_discovery(p_values)
    changes = [_change(*pair, p_value, share) for pair, p_value, share in zip(scored, p_values, adjusted, strict=True)]
    return tuple(sorted(changes, key=lambda change: (change.p_value, -abs(change.difference), change.task_id)))


def fisher(right: tuple[int, int], totals: tuple[int, int]) -> float:
    """Fisher's exact test, two-sided: all tables with these margins that are no likelier than the one seen."""
    num_right, (num_base, num_trained) = sum(right), totals

    def ways(base: int) -> int:
        return math.comb(num_base, base) * math.comb(num_trained, num_right - base)

    seen = ways(right[0])
    possible = (ways(base) for base in range(max(0, num_right - num_trained), min(num_base, num_right) + 1))
    return sum(count for count in possible if count <= seen) / math.comb(num_base + num_trained, num_right)


def false_discovery(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values of Benjamini and Hochberg 1995, in the order given."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__, reverse=True)
    adjusted, lowest = [1.0] * len(p_values), 1.0
    for larger, place in enumerate(order):
        lowest = min(lowest, p_values[place] * len(p_values) / (len(p_values) - larger))
        adjusted[place] = lowest
    return adjusted


def _pairs(base: SuiteResult, trained: SuiteResult) -> list[tuple[PromptResult, PromptResult]]:
    if differing := differing_budget(base, trained):
        raise UserError(
            f"{base.checkpoint} and {trained.checkpoint} were not asked the same way: {'; '.join(differing)}. "
            f"Evaluate both again with equal settings, or give temper compare the two checkpoints"
        )
    # By place: the hash of the prompts covers their order, and names of tasks change with the file they are read from.
    pairs = list(zip(base.prompts, trained.prompts, strict=False))
    if len(base.prompts) != len(trained.prompts) or any(ours.prompt != theirs.prompt for ours, theirs in pairs):
        raise UserError(f"the prompts of {base.checkpoint} and {trained.checkpoint} are not the same. Evaluate again")
    if not all(prompt.samples for pair in pairs for prompt in pair) or not pairs:
        raise UserError(f"{base.checkpoint}: the result has no prompts, or prompts without samples. Evaluate again")
    return pairs


def _scores(samples: Sequence[SampleResult]) -> list[float]:
    return [sample.score for sample in samples if sample.score is not None]


def _is_right_at(least: float) -> IsRight:
    return lambda sample: sample.score is not None and sample.score >= least - ROUNDING


def _quality(
    pairs: Sequence[tuple[PromptResult, PromptResult]], num_samples: int, is_right: IsRight
) -> dict[str, tuple[str, Metric]]:
    """The metrics that these results have. Best-of-k of right and wrong is pass@k, and is not said twice."""

    def passes(scored: Samples, k: int) -> float:
        return pass_at_k(len(scored), sum(map(is_right, scored)), k)

    def votes(scored: Samples, k: int) -> float:
        return majority_of_k([sample.answer for sample in scored], [float(is_right(sample)) for sample in scored], k)

    def best(scored: Samples, k: int) -> float:
        return best_of_k(_scores(scored), k)

    samples = [sample for pair in pairs for prompt in pair for sample in prompt.samples]
    counts = powers_to(num_samples)
    quality = {f"pass@{k}": ("%", _of_scored(k, passes)) for k in counts}
    if any(sample.answer is not None for sample in samples):
        quality |= {f"maj@{k}": ("%", _of_scored(k, votes)) for k in counts[1:]}
    if any(sample.score not in (None, 0.0, 1.0) for sample in samples):
        quality["mean score"] = ("", _of_scored(1, best))  # the best of one is the mean
        quality |= {f"best@{k}": ("", _of_scored(k, best)) for k in counts[1:]}
    return quality


def _of_scored(k: int, metric: Callable[[Samples, int], float]) -> Metric:
    """The metric of a prompt's scored samples; None when there are fewer than k."""

    def of_prompt(prompt: PromptResult) -> float | None:
        scored = [sample for sample in prompt.samples if sample.score is not None]
        return metric(scored, k) if len(scored) >= k else None

    return of_prompt


def _drift(is_right: IsRight) -> dict[str, tuple[str, Metric]]:
    """What changes beside being right. Lengths of right answers are of prompts that both get right at times."""
    return {
        "length": ("tokens", _length(lambda sample: True)),
        "length of right answers": ("tokens", _length(is_right)),
        "length of wrong answers": ("tokens", _length(lambda s: s.score is not None and not is_right(s))),
        "cut at the token limit": ("%", _share(lambda sample: sample.status == Status.TRUNCATED_LENGTH)),
        "bad format": ("%", _share(lambda sample: sample.status == Status.BAD_FORMAT)),
        "no answer stated": ("%", _share(lambda sample: sample.answer is None)),
        "unscorable": ("%", _share(lambda sample: sample.score is None)),
    }


def _share(is_one: Callable[[SampleResult], bool]) -> Metric:
    return lambda prompt: fmean(is_one(sample) for sample in prompt.samples)


def _length(is_one: Callable[[SampleResult], bool]) -> Metric:
    def of_prompt(prompt: PromptResult) -> float | None:
        lengths = [sample.num_tokens for sample in prompt.samples if is_one(sample)]
        return fmean(lengths) if lengths else None

    return of_prompt


def _p_value(base: PromptResult, trained: PromptResult, *, seed: int) -> float:
    ours, theirs = _scores(base.samples), _scores(trained.samples)
    if all(score in (0.0, 1.0) for score in (*ours, *theirs)):
        return fisher((int(sum(ours)), int(sum(theirs))), (len(ours), len(theirs)))
    random = np.random.default_rng([seed, 2])
    together = np.tile(np.array([*ours, *theirs]), (RESAMPLES, 1))
    gaps = _gap(random.permuted(together, axis=1), len(ours))
    seen = abs(fmean(theirs) - fmean(ours))
    return float((gaps >= seen - 1e-9).sum() + 1) / (RESAMPLES + 1)


def _gap(scores: Array, num_base: int) -> Array:
    gaps: Array = np.abs(scores[:, num_base:].mean(axis=1) - scores[:, :num_base].mean(axis=1))
    return gaps


def _change(base: PromptResult, trained: PromptResult, p_value: float, adjusted: float) -> PromptChange:
    ours, theirs = _scores(base.samples), _scores(trained.samples)
    is_worse = fmean(theirs) < fmean(ours)
    # The seed at which they part the most in the direction of the change; the first one when none does.
    seeds = list(zip(base.samples, trained.samples, strict=False))
    shown = max(seeds, key=lambda pair: _parting(*pair) * (-1 if is_worse else 1))
    return PromptChange(
        task_id=base.task_id,
        prompt=base.prompt,
        gold=base.gold,
        base=fmean(ours),
        trained=fmean(theirs),
        num_base=len(ours),
        num_trained=len(theirs),
        p_value=p_value,
        adjusted=adjusted,
        base_sample=shown[0],
        trained_sample=shown[1],
    )


def _parting(base: SampleResult, trained: SampleResult) -> float:
    return 0.0 if base.score is None or trained.score is None else trained.score - base.score


def _number(value: float | None) -> float:
    return math.nan if value is None else value
