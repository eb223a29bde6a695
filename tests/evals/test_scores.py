"""Guarantee: the numbers of a suite are exact expectations over subsets; their intervals cover as often as they say.

Planted faults: the plug-in pass@k, votes whose ties go to the first answer, intervals that count samples instead of
prompts, unscorable samples taken for zeros.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import combinations

import numpy as np
import pytest

from temper.evals import scores
from temper.evals.passk import clustered_interval, pass_at_k, wilson
from temper.evals.scores import best_of_k, majority_of_k, pass_hat_k, ratio_interval, share_interval, suite_metrics
from temper.runs.results import PromptResult, SampleResult

NUM_WORLDS = 500


def prompt(*samples: SampleResult, name: str = "p") -> PromptResult:
    return PromptResult(task_id=name, prompt="?", gold="1", samples=samples)


def sample(score: float | None, answer: str | None = None, **fields: object) -> SampleResult:
    reason = "the verifier failed" if score is None else None
    return SampleResult(score=score, reason=reason, answer=answer, **{"num_tokens": 3, **fields})  # type: ignore[arg-type]


def test_pass_hat_k_equals_enumeration_of_all_subsets_up_to_eight_samples() -> None:
    for n in range(1, 9):
        for c in range(n + 1):
            for k in range(1, n + 1):
                subsets = list(combinations([1] * c + [0] * (n - c), k))
                exact = sum(all(subset) for subset in subsets) / len(subsets)
                assert pass_hat_k(n, c, k) == pytest.approx(exact, abs=1e-12), (n, c, k)


def test_best_of_k_worked_numbers() -> None:
    found = [best_of_k((0.4, 0.1, 0.9, 0.4), k) for k in (1, 2, 3, 4)]
    assert found == pytest.approx([0.45, 0.65, 0.775, 0.9], abs=1e-12)


def test_best_of_k_equals_enumeration_and_is_pass_at_k_for_verdicts() -> None:
    generator = np.random.default_rng(1)
    for n in range(1, 8):
        values = generator.normal(size=n).tolist()
        for k in range(1, n + 1):
            exact = np.mean([max(subset) for subset in combinations(values, k)])
            assert best_of_k(values, k) == pytest.approx(float(exact), abs=1e-12)
            for c in range(n + 1):
                assert best_of_k([1.0] * c + [0.0] * (n - c), k) == pytest.approx(pass_at_k(n, c, k), abs=1e-12)


def test_best_of_k_survives_numbers_whose_binomials_overflow_a_float() -> None:
    assert best_of_k([0.0] * 1990 + [1.0] * 10, 1000) == pytest.approx(pass_at_k(2000, 10, 1000), rel=1e-9)


def vote(answers: Sequence[str | None], right: str, *, share_ties: bool = True) -> float:
    """The definition, one subset."""
    counts = Counter(answer for answer in answers if answer is not None)
    if not counts:
        return 0.0
    tied = [answer for answer, count in counts.items() if count == max(counts.values())]
    return (right in tied) / len(tied) if share_ties else float(tied[0] == right)


def test_majority_equals_enumeration_of_all_subsets_with_ties_sharing_credit() -> None:
    answers = ["7", "7", "3", None, "3", "5", "7"]
    correct = [float(answer == "7") for answer in answers]
    for k in range(1, len(answers) + 1):
        subsets = list(combinations(answers, k))
        exact = sum(vote(subset, "7") for subset in subsets) / len(subsets)
        assert majority_of_k(answers, correct, k) == pytest.approx(exact, abs=1e-12)
    unfair = [vote(subset, "7", share_ties=False) for subset in combinations(answers, 2)]
    assert abs(majority_of_k(answers, correct, 2) - sum(unfair) / len(unfair)) > 0.05, "first-of-the-tied must differ"


def test_majority_worked_by_hand() -> None:
    # a, a, b with a right: of the three pairs, aa earns 1 and the two ab ties earn a half each.
    assert majority_of_k(["a", "a", "b"], [1, 1, 0], 2) == pytest.approx(2 / 3)
    assert majority_of_k(["a", "a", "b"], [1, 1, 0], 3) == 1.0
    assert majority_of_k([None, None], [0, 0], 2) == 0.0


def test_many_subsets_are_drawn_with_a_seed_without_replacement_and_near_the_truth() -> None:
    answers = ["x"] * 14 + ["y"] * 10
    correct = [1.0] * 14 + [0.0] * 10
    members = scores._subsets(24, 12, 0)
    assert members.shape == (scores.MAX_SUBSETS, 24)
    assert (members.sum(axis=1) == 12).all()
    ways = {a: math.comb(14, a) * math.comb(10, 12 - a) for a in range(2, 13)}
    exact = sum(w * (1.0 if a > 6 else 0.5 if a == 6 else 0.0) for a, w in ways.items()) / sum(ways.values())
    found = majority_of_k(answers, correct, 12, seed=3)
    assert found == pytest.approx(exact, abs=4 * 0.5 / math.sqrt(scores.MAX_SUBSETS))
    assert found == majority_of_k(answers, correct, 12, seed=3)


def coverage(interval: Callable[[np.ndarray], tuple[float, float] | None], truth: float, *, seed: int) -> float:
    """How often an interval holds the truth: worlds of 60 prompts with 8 samples and difficulties ~ Beta(.6, 1)."""
    generator = np.random.default_rng(seed)
    hits = []
    for _ in range(NUM_WORLDS):
        rates = generator.beta(0.6, 1.0, size=60)
        bounds = interval((generator.random((60, 8)) < rates[:, None]).astype(float))
        if bounds is not None:
            hits.append(bounds[0] <= truth <= bounds[1])
    return float(np.mean(hits))


def pass_interval(k: int) -> Callable[[np.ndarray], tuple[float, float]]:
    def bounds(verdicts: np.ndarray) -> tuple[float, float]:
        found = share_interval([pass_at_k(8, int(row.sum()), k) for row in verdicts], verdicts.size)
        return found["low"], found["high"]

    return bounds


def beta_fail(k: int, a: float = 0.6, b: float = 1.0) -> float:
    """E (1 - p)^k under Beta(a, b)."""
    return math.prod((b + i) / (a + b + i) for i in range(k))


@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_the_interval_of_pass_at_k_covers_the_truth(k: int) -> None:
    assert 0.92 <= coverage(pass_interval(k), 1 - beta_fail(k), seed=k) <= 0.98


def test_an_interval_that_counts_samples_instead_of_prompts_is_caught() -> None:
    naive = coverage(lambda verdicts: wilson(verdicts.sum(), verdicts.size), 0.6 / 1.6, seed=1)
    clustered = coverage(lambda verdicts: clustered_interval(verdicts.tolist())[1:], 0.6 / 1.6, seed=1)
    assert naive < 0.85, "a fault that this simulation must reject"
    assert 0.92 <= clustered <= 0.98


def test_the_plug_in_estimator_is_caught() -> None:
    def plug_in(verdicts: np.ndarray) -> tuple[float, float]:
        found = share_interval([1 - (1 - row.mean()) ** 4 for row in verdicts], verdicts.size)
        return found["low"], found["high"]

    biased = np.mean([1 - (1 - c / 8) ** 4 - pass_at_k(8, c, 4) for c in range(9)])
    assert biased < -0.03
    assert coverage(plug_in, 1 - beta_fail(4), seed=4) < 0.92


def test_the_interval_of_cost_per_success_covers_the_truth() -> None:
    generator = np.random.default_rng(7)
    hits = []
    for _ in range(NUM_WORLDS):
        rates = generator.beta(2.0, 2.0, size=60)
        won = (generator.random((60, 4)) < rates[:, None]).sum(axis=1)
        spent = generator.gamma(2.0, 1.0, size=(60, 4)).sum(axis=1)  # 2 per attempt, success 0.5: 4 per success
        found = ratio_interval(spent.tolist(), won.astype(float).tolist())
        assert found is not None
        hits.append(found["low"] <= 4.0 <= found["high"])
    assert 0.92 <= np.mean(hits) <= 0.98


def test_unscorable_samples_are_counted_apart_and_never_zero() -> None:
    found = suite_metrics([prompt(sample(1.0), sample(None)), prompt(sample(1.0), sample(1.0))])
    assert found["pass@1"]["score"] == 1.0
    assert found["unscorable"]["score"] == 0.25
    assert found["pass@2"]["prompts"] == 1, "a prompt with one scored sample says nothing about two"
    as_zero = suite_metrics([prompt(sample(1.0), sample(0.0)), prompt(sample(1.0), sample(1.0))])
    assert as_zero["pass@1"]["score"] == 0.75


def test_a_suite_of_which_nothing_could_be_scored_has_no_scores() -> None:
    found = suite_metrics([prompt(sample(None)), prompt(sample(None))])
    assert "pass@1" not in found
    assert found["unscorable"]["score"] == 1.0


def test_partial_scores_count_in_the_average_and_pass_only_when_complete() -> None:
    found = suite_metrics([prompt(sample(0.5), sample(1.0)), prompt(sample(0.0), sample(0.9))])
    assert found["avg@2"]["score"] == pytest.approx(0.6)
    assert found["pass@1"]["score"] == 0.25
    assert found["best@2"]["score"] == pytest.approx(0.95)
    assert suite_metrics([prompt(sample(0.5), sample(1.0))], correct_at=0.5)["pass@1"]["score"] == 1.0


def test_every_k_up_to_all_samples_has_its_metrics() -> None:
    found = suite_metrics([prompt(*(sample(float(i % 2), str(i % 2)) for i in range(6)))] * 3)
    assert {f"{kind}{k}" for kind in ("pass@", "pass^", "maj@", "best@") for k in (2, 4, 6)} < set(found)
    assert "maj@2" not in suite_metrics([prompt(sample(1.0), sample(0.0))])
    for metric in found.values():
        assert metric["low"] <= metric["score"] <= metric["high"]


def test_agents_are_counted_by_what_they_did() -> None:
    good = sample(1.0, num_turns=3, events={"tool_call": 2, "side_effect": 1}, cost=2.0)
    poor = sample(0.0, num_turns=5, events={"tool_error": 2, "bad_call": 1, "denied": 1}, cost=4.0)
    late = sample(None, num_turns=1, status="timeout", cost=6.0)
    broken = sample(None, num_turns=1, status="tool_error", cost=100.0)
    found = suite_metrics([prompt(good, poor), prompt(late, good), prompt(broken, good)])
    assert found["success"]["score"] == pytest.approx((0.5 + 0.5 + 1.0) / 3)
    assert found["turns"]["score"] == pytest.approx((4 + 2 + 2) / 3)
    assert found["tool_errors"]["score"] == pytest.approx(1.5 / 3)
    assert found["timeouts"]["score"] == pytest.approx(0.5 / 3)
    assert found["side_effects"]["score"] == pytest.approx(1.5 / 3)
    assert found["denied"]["score"] == pytest.approx(0.5 / 3)
    assert found["cost_per_success"]["score"] == pytest.approx((6 + 8 + 2) / 3)


def test_a_suite_without_an_environment_has_no_agent_metrics() -> None:
    assert "turns" not in suite_metrics([prompt(sample(1.0)), prompt(sample(0.0))])


def test_no_success_has_no_price() -> None:
    assert ratio_interval([1.0, 2.0], [0.0, 0.0]) is None
