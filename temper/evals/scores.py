"""What many samples of many prompts say about a model: pass@k, pass^k, maj@k, best@k and what agents did, each with a
95% interval in which prompts, not samples, are the unit.

Owns: the metrics of a suite, as pure functions. Refuses: running anything.
Shapes: _S subsets, _N samples of one prompt, _A different answers.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, stdev

import numpy as np

from temper.evals.passk import clustered_interval, effective_size, pass_at_k, t_quantile, wilson
from temper.runs.results import PromptResult, SampleResult
from temper.types import REFUSED, EventKind, Status

MAX_SUBSETS = 1000
"""Majority votes over all subsets up to this many, otherwise over this many drawn ones."""
CORRECT_AT = 1.0
"""The score from which a sample is correct."""
ROUNDING = 1e-9

Metric = dict[str, float]
"""score, low, high, and prompts: over how many it is the mean."""


def pass_hat_k(n: int, c: int, k: int) -> float:
    """pass^k: chance that k samples drawn without replacement from n, of which c are correct, are all correct.

    C(c, k) / C(n, k) as a product that does not overflow. For tasks that must succeed every time.
    """
    assert 0 <= c <= n, f"pass^k needs 0 <= c <= n, got c={c}, n={n}"
    assert 1 <= k <= n, f"pass^k needs 1 <= k <= n, got k={k}, n={n}"
    return math.prod((c - i) / (n - i) for i in range(k)) if c >= k else 0.0


def best_of_k(scores: Sequence[float], k: int) -> float:
    """Expected best of k samples drawn without replacement: sum_i C(i-1, k-1) / C(n, k) * s_(i), s ascending.

    The best by its true score, so an upper bound for any way to choose. With 0/1 scores it is pass@k.
    """
    n = len(scores)
    assert 1 <= k <= n, f"best-of-k needs 1 <= k <= n, got k={k}, n={n}"
    return float(np.dot(_best_weights(n, k), np.sort(np.asarray(scores, dtype=np.float64))))


@functools.lru_cache(maxsize=256)
def _best_weights(n: int, k: int) -> np.ndarray:
    """Chance that the i-th smallest is the best of k: from k/n for the largest downwards, so nothing overflows."""
    weights = np.zeros(n)
    weight = k / n
    for i in range(n, k - 1, -1):
        weights[i - 1] = weight
        weight *= (i - k) / (i - 1) if i > 1 else 0.0
    return weights


def majority_of_k(answers: Sequence[str | None], correct: Sequence[float], k: int, *, seed: int = 0) -> float:
    """Expected credit of the commonest answer among k samples drawn without replacement.

    Equal answers vote together; ties share the credit, so neither their order nor luck decides. A sample without an
    answer does not vote, and a vote nobody took part in earns 0. An answer is worth the mean verdict of its samples.
    """
    n = len(answers)
    assert len(correct) == n, "answers and verdicts are of the same samples"
    assert 1 <= k <= n, f"majority needs 1 <= k <= n, got k={k}, n={n}"
    names = list(dict.fromkeys(answer for answer in answers if answer is not None))
    if not names:
        return 0.0
    votes_NA = np.array([[answer == name for name in names] for answer in answers], dtype=np.float64)
    worth_A = np.asarray(correct, dtype=np.float64) @ votes_NA / votes_NA.sum(axis=0)
    counts_SA = _subsets(n, k, seed) @ votes_NA
    most_S = counts_SA.max(axis=1, keepdims=True)
    tied_SA = (counts_SA == most_S) & (most_S > 0)
    return float(np.mean(tied_SA @ worth_A / np.maximum(tied_SA.sum(axis=1), 1)))


@functools.lru_cache(maxsize=64)
def _subsets(n: int, k: int, seed: int) -> np.ndarray:
    """[S, N] of 0 and 1: all subsets of size k when they are few, else MAX_SUBSETS seeded ones."""
    if math.comb(n, k) <= MAX_SUBSETS:
        chosen = np.array(list(itertools.combinations(range(n), k)))
    else:
        chosen = np.random.default_rng([seed, n, k]).random((MAX_SUBSETS, n)).argsort(axis=1)[:, :k]
    members_SN = np.zeros((len(chosen), n))
    np.put_along_axis(members_SN, chosen, 1.0, axis=1)
    return members_SN


def share_interval(values: Sequence[float], num_samples: int) -> Metric:
    """Mean over prompts of values between 0 and 1: Wilson's interval at the effective number of samples.

    num_samples: samples behind all values. The effective number is at most that; the spread between prompts tells it.
    """
    mean, count = fmean(values), len(values)
    error = stdev(values) / math.sqrt(count) if count > 1 else 0.0
    size = effective_size(mean, error, count, num_samples) if count > 1 else 1.0
    # Rounding may put a mean of ones a hair above 1.
    low, high = wilson(min(mean, 1.0) * size, size, t_quantile(max(1, count - 1)))
    return {"score": mean, "low": low, "high": high, "prompts": count}


def mean_interval(values: Sequence[float], *, least: float = -math.inf) -> Metric:
    """Mean over prompts of any values: Student's t. One prompt says nothing about others, so it takes two.

    least: what a value can be at least, e.g. 0 for counts.
    """
    assert len(values) > 1, "an interval of unbounded values needs at least two prompts"
    mean = fmean(values)
    half = t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return {"score": mean, "low": max(least, mean - half), "high": mean + half, "prompts": len(values)}


def ratio_interval(above: Sequence[float], below: Sequence[float]) -> Metric | None:
    """Sum over sum, per prompt, e.g. cost per success; the delta method on the logarithm. None: nothing to divide by.

    On the logarithm the interval stays above 0 and leans the right way when successes are rare.
    """
    count, total = len(above), math.fsum(below)
    if count < 2 or total <= 0 or math.fsum(above) <= 0:
        return None
    ratio = math.fsum(above) / total
    residuals = [a - ratio * b for a, b in zip(above, below, strict=True)]
    error = stdev(residuals) * math.sqrt(count) / (total * ratio)
    factor = math.exp(min(t_quantile(count - 1) * error, 700.0))
    return {"score": ratio, "low": ratio / factor, "high": ratio * factor, "prompts": count}


def powers_to(n: int) -> list[int]:
    """1, 2, 4, ... and n itself."""
    return sorted({*(2**i for i in range(n.bit_length())), n})


def suite_metrics(
    prompts: Sequence[PromptResult], *, correct_at: float = CORRECT_AT, seed: int = 0
) -> dict[str, Metric]:
    """Every metric of a suite, by name. Unscorable samples are in none of the scores; "unscorable" is their share.

    A metric of k samples leaves out prompts with fewer than k scored ones; its "prompts" says how many are in it.
    """
    scored = [[sample for sample in prompt.samples if sample.score is not None] for prompt in prompts]
    scored = [samples for samples in scored if samples]
    metrics: dict[str, Metric] = {}
    if scored:
        metrics |= _sampled_metrics(scored, correct_at, seed)
    return metrics | _attempt_metrics(prompts) | agent_metrics(prompts, correct_at=correct_at)


def _sampled_metrics(scored: Sequence[Sequence[SampleResult]], correct_at: float, seed: int) -> dict[str, Metric]:
    verdicts = [[_is_correct(sample, correct_at) for sample in samples] for samples in scored]
    scores = [[sample.score or 0.0 for sample in samples] for samples in scored]
    answers = [[sample.answer for sample in samples] for samples in scored]
    most = max(map(len, scored))
    mean, low, high = clustered_interval(verdicts)
    metrics: dict[str, Metric] = {"pass@1": {"score": mean, "low": low, "high": high, "prompts": len(scored)}}
    _add(metrics, f"avg@{most}", [fmean(row) for row in scores], sum(map(len, scored)))
    has_answers = any(answer is not None for row in answers for answer in row)
    for k in powers_to(most)[1:]:
        rows = [i for i, samples in enumerate(scored) if len(samples) >= k]
        behind = sum(len(scored[i]) for i in rows)
        counts = [(len(verdicts[i]), int(sum(verdicts[i]))) for i in rows]
        _add(metrics, f"pass@{k}", [pass_at_k(n, c, k) for n, c in counts], behind)
        _add(metrics, f"pass^{k}", [pass_hat_k(n, c, k) for n, c in counts], behind)
        if has_answers:
            _add(metrics, f"maj@{k}", [majority_of_k(answers[i], verdicts[i], k, seed=seed) for i in rows], behind)
        _add(metrics, f"best@{k}", [best_of_k(scores[i], k) for i in rows], behind)
    return metrics


def _add(metrics: dict[str, Metric], name: str, values: Sequence[float], num_samples: int) -> None:
    if all(-ROUNDING <= value <= 1 + ROUNDING for value in values):
        metrics[name] = share_interval(values, num_samples)
    elif len(values) > 1:
        metrics[name] = mean_interval(values)


def _attempt_metrics(prompts: Sequence[PromptResult]) -> dict[str, Metric]:
    """What every suite has: how long attempts were, how many were cut, how many could not be scored, how many look
    back; and with a budget for thinking, of how many it was closed."""
    metrics: dict[str, Metric] = {}
    num_samples = sum(len(prompt.samples) for prompt in prompts)
    for name, measure in ATTEMPTS.items():
        _add(metrics, name, _per_prompt(prompts, measure), num_samples)
    for name, known in SEEN.items():
        if any(known(sample) is not None for prompt in prompts for sample in prompt.samples):
            shares = [fmean(bool(known(sample)) for sample in prompt.samples) for prompt in prompts]
            _add(metrics, name, shares, num_samples)
    if len(prompts) > 1:
        metrics["tokens"] = mean_interval(_per_prompt(prompts, lambda sample: sample.num_tokens), least=0.0)
    return metrics


ATTEMPTS: Mapping[str, Callable[[SampleResult], float]] = {
    "unscorable": lambda sample: float(sample.score is None),
    "truncated": lambda sample: float(sample.status in (Status.TRUNCATED_LENGTH, Status.TRUNCATED_TURNS)),
}

SEEN: Mapping[str, Callable[[SampleResult], bool | None]] = {
    "closed": lambda sample: sample.is_closed,
    "reflection": lambda sample: sample.reflects,
    "backtracking": lambda sample: sample.backtracks,
}
"""Shares of samples; left out where nobody looked."""


def agent_metrics(prompts: Sequence[PromptResult], *, correct_at: float = CORRECT_AT) -> dict[str, Metric]:
    """Per attempt: success, turns, what went wrong, what was changed; and what a success costs.

    Empty unless some attempt took several turns or touched an environment. Success counts an attempt that ran out of
    time as a failure of the agent; one whose verifier failed is left out.
    """
    attempts = [sample for prompt in prompts for sample in prompt.samples]
    if len(prompts) < 2 or not any(sample.events or sample.cost or sample.num_turns > 1 for sample in attempts):
        return {}
    metrics: dict[str, Metric] = {}
    judged = [[s for s in prompt.samples if s.score is not None or s.status == Status.TIMEOUT] for prompt in prompts]
    judged = [samples for samples in judged if samples]
    successes = [[_is_correct(sample, correct_at) for sample in samples] for samples in judged]
    if judged:
        _add(metrics, "success", [fmean(row) for row in successes], sum(map(len, judged)))
    for name, measure in DEEDS.items():
        metrics[name] = mean_interval(_per_prompt(prompts, measure), least=0.0)
    costs = [math.fsum(sample.cost for sample in samples) for samples in judged]
    if (cost := ratio_interval(costs, [math.fsum(row) for row in successes])) is not None:
        metrics["cost_per_success"] = cost
    return metrics


def _events(*kinds: EventKind) -> Callable[[SampleResult], float]:
    return lambda sample: float(sum(sample.events.get(kind, 0) for kind in kinds))


_tool_timeouts = _events(EventKind.TOOL_TIMEOUT)
DEEDS: Mapping[str, Callable[[SampleResult], float]] = {
    "turns": lambda sample: float(sample.num_turns),
    "tool_calls": _events(EventKind.TOOL_CALL),
    "tool_errors": _events(EventKind.TOOL_ERROR, EventKind.BAD_CALL),
    "timeouts": lambda sample: _tool_timeouts(sample) + float(sample.status == Status.TIMEOUT),
    "denied": _events(*REFUSED),
    "side_effects": _events(EventKind.SIDE_EFFECT),
    "model_calls": _events(EventKind.MODEL_CALL),
}
"""Counted per attempt."""


def _per_prompt(prompts: Sequence[PromptResult], measure: Callable[[SampleResult], float]) -> list[float]:
    return [fmean(measure(sample) for sample in prompt.samples) for prompt in prompts]


def _is_correct(sample: SampleResult, correct_at: float) -> float:
    return float(sample.score is not None and sample.score >= correct_at - ROUNDING)
