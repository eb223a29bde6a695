"""A verdict names what was done to models whose chances are known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from temper.evals.comparison.compare import differences_of
from temper.evals.comparison.verdict import LEVEL, Difference, Kind, Verdict, judge

K = 64
PROMPTS = 120


def verdict(base: np.ndarray, trained: np.ndarray, seed: int, k: int = K) -> Verdict:
    """Draws k samples of every prompt from both models, whose chances per prompt are given."""
    random = np.random.default_rng(seed)
    counts = np.stack([random.binomial(k, base), random.binomial(k, trained)], axis=1)
    values = np.stack([counts / k, (counts > 0).astype(float)], axis=2)
    pass_1, pass_k = differences_of(values, {"pass@1": "%", "pass@k": "%"}, seed=seed, resamples=1000)
    return judge(pass_1, pass_k, k)


def kinds(base: np.ndarray, trained: np.ndarray, trials: int = 40) -> dict[Kind, int]:
    found = [verdict(base, trained, seed).kind for seed in range(trials)]
    return {kind: found.count(kind) for kind in set(found)}


def spread() -> np.ndarray:
    """Chances of a base model: a third of the prompts out of reach, the rest from rare to sure."""
    return np.concatenate([np.zeros(PROMPTS // 3), np.linspace(0.05, 0.95, PROMPTS - PROMPTS // 3)])


def test_a_model_that_is_right_more_often_where_it_was_right_before_is_sharpened() -> None:
    assert kinds(spread(), np.minimum(1.0, 1.6 * spread())).get(Kind.SHARPENING, 0) >= 38


def test_a_model_that_also_loses_rare_answers_is_sharpened() -> None:
    base = spread()
    trained = np.where(base < 0.3, 0.0, np.minimum(1.0, 2 * base))
    assert kinds(base, trained).get(Kind.SHARPENING, 0) >= 38


def test_a_model_that_solves_what_it_never_solved_is_expanded() -> None:
    assert kinds(spread(), np.maximum(spread(), 0.2)).get(Kind.EXPANSION, 0) >= 38


def test_a_model_that_is_right_less_often_has_regressed() -> None:
    assert kinds(spread(), 0.7 * spread()).get(Kind.REGRESSION, 0) >= 38


def test_a_model_that_keeps_pass_1_and_loses_answers_has_regressed() -> None:
    base = np.concatenate([np.full(60, 0.2), np.full(60, 0.6)])
    trained = np.concatenate([np.full(20, 0.6), np.zeros(40), np.full(60, 0.6)])
    assert kinds(base, trained).get(Kind.REGRESSION, 0) >= 38


@pytest.mark.parametrize(
    "chances",
    [
        spread(),
        # The hard case: many prompts whose one right sample comes or does not come.
        np.concatenate([np.full(20, 1 / K), np.full(PROMPTS - 20, 0.5)]),
        np.full(PROMPTS, 0.5),
    ],
    ids=["spread", "rare", "even"],
)
def test_equal_models_are_called_unchanged_at_least_93_times_in_100(chances: np.ndarray) -> None:
    trials = 200
    found = kinds(chances, chances, trials)
    assert found.get(Kind.NO_CHANGE, 0) >= 0.93 * trials, found


def test_a_rule_that_tests_each_metric_at_a_fifth_would_call_equal_models_changed(monkeypatch) -> None:
    monkeypatch.setattr("temper.evals.comparison.verdict.LEVEL", 0.2)
    assert kinds(spread(), spread(), 100).get(Kind.NO_CHANGE, 0) < 93


def test_few_samples_of_a_better_model_do_not_tell_sharpening_from_expansion() -> None:
    base = np.full(PROMPTS, 0.3)
    found = verdict(base, base + 0.4, seed=0, k=8)
    assert found.kind is Kind.UNKNOWN
    assert "64 samples" in found.evidence


def test_one_sample_each_of_few_prompts_tells_nothing() -> None:
    base = np.full(40, 0.5)
    found = verdict(base, base, seed=0, k=1)
    assert found.kind is Kind.UNKNOWN
    assert "within" in found.evidence


def difference(
    name: str, base: float, trained: float, *, p: float = 1.0, half: float = 0.01, n: int = 100
) -> Difference:
    change = trained - base
    return Difference(
        name=name, base=base, trained=trained, low=change - half, high=change + half, p_value=p, num_prompts=n
    )


@pytest.mark.parametrize(
    ("pass_1", "pass_k", "k", "kind"),
    [
        ((0.5, 0.6, 0.001), (0.8, 0.8, 0.9), 64, Kind.SHARPENING),
        ((0.5, 0.6, 0.001), (0.8, 0.7, 0.001), 64, Kind.SHARPENING),
        ((0.5, 0.6, 0.001), (0.8, 0.9, 0.001), 64, Kind.EXPANSION),
        ((0.5, 0.5, 0.9), (0.8, 0.9, 0.001), 64, Kind.EXPANSION),
        ((0.5, 0.4, 0.001), (0.8, 0.9, 0.001), 64, Kind.REGRESSION),
        ((0.5, 0.5, 0.9), (0.8, 0.7, 0.001), 64, Kind.REGRESSION),
        ((0.5, 0.5, 0.9), (0.8, 0.8, 0.9), 64, Kind.NO_CHANGE),
        ((0.5, 0.5, 0.9), (0.5, 0.5, 0.9), 1, Kind.NO_CHANGE),
        ((0.5, 0.4, 0.001), (0.7, 0.6, 0.001), 4, Kind.REGRESSION),
        ((0.5, 0.6, LEVEL * 1.01), (0.8, 0.8, 0.9), 64, Kind.NO_CHANGE),
    ],
)
def test_the_rule_in_a_table(pass_1, pass_k, k: int, kind: Kind) -> None:
    (base_1, trained_1, p_1), (base_k, trained_k, p_k) = pass_1, pass_k
    one, large = difference("pass@1", base_1, trained_1, p=p_1), difference(f"pass@{k}", base_k, trained_k, p=p_k)
    assert judge(one, large, k).kind is kind


def test_wide_intervals_and_few_prompts_are_not_called_no_change() -> None:
    still = difference("pass@64", 0.8, 0.8)
    assert judge(difference("pass@1", 0.5, 0.5, half=0.06), still, 64).kind is Kind.UNKNOWN
    assert judge(difference("pass@1", 0.5, 0.5), difference("pass@64", 0.8, 0.8, half=0.11), 64).kind is Kind.UNKNOWN
    assert judge(difference("pass@1", 0.5, 0.5, half=math.inf, n=1), still, 64).kind is Kind.UNKNOWN
    assert judge(difference("pass@1", 0.5, 0.5, n=9), still, 64).kind is Kind.UNKNOWN
    # Not one of twelve prompts differs, e.g. because both models are always wrong: that is not a proof for others.
    assert judge(difference("pass@1", 0.0, 0.0, half=0.0, n=12), still, 64).kind is Kind.UNKNOWN
    assert judge(difference("pass@1", 0.5, 0.5, half=0.0, n=90), still, 64).kind is Kind.NO_CHANGE
    rose = difference("pass@1", 0.5, 0.6, p=0.001)
    assert judge(rose, difference("pass@64", 0.7, 0.75, half=0.11), 64).kind is Kind.UNKNOWN


def test_the_evidence_is_one_sentence_with_both_numbers_and_says_when_there_was_no_room() -> None:
    found = judge(difference("pass@1", 0.5, 0.6, p=0.001), difference("pass@64", 0.99, 0.99), 64)
    assert found.evidence == (
        "pass@1 rose; pass@64 had no room to rise: pass@1 50.0% to 60.0% (+10.0 points, +9.0 to +11.0, p = 0.001); "
        "pass@64 99.0% to 99.0% (+0.0 points, -1.0 to +1.0, p = 1); 100 prompts."
    )
