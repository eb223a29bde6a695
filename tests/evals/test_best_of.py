"""Guarantee: best-of-N says the best scored sample, the first of equal ones, and knows what it costs.

Planted fault: a sample that could not be scored counts as zero and is said.
"""

from __future__ import annotations

import math
import random
from itertools import combinations
from statistics import fmean

import pytest

from temper.evals import best_of
from temper.evals.best_of import gains, kl_bound, pick
from temper.runs.results import PromptResult, SampleResult


def prompt(*scores: float | None, name: str = "t", texts: str = "abcdefgh") -> PromptResult:
    samples = [
        SampleResult(score=score, reason="crash" if score is None else None, num_tokens=5, text=text)
        for score, text in zip(scores, texts, strict=False)
    ]
    return PromptResult(task_id=name, prompt="?", gold=None, samples=tuple(samples))


def test_the_bound_has_the_worked_values() -> None:
    assert kl_bound(1) == 0.0
    assert kl_bound(4) == pytest.approx(0.636294, abs=5e-7)
    assert kl_bound(16) == pytest.approx(1.835089, abs=5e-7)


def test_the_bound_is_what_a_sampler_without_ties_reaches() -> None:
    """Best of n among many equally likely answers with different scores: P(i) = (i/m)^n - ((i-1)/m)^n."""
    m, n = 20_000, 4
    chances = [(i / m) ** n - ((i - 1) / m) ** n for i in range(1, m + 1)]
    divergence = math.fsum(p * math.log(p * m) for p in chances)
    assert divergence == pytest.approx(kl_bound(n), abs=1e-4)
    assert divergence <= kl_bound(n)


def test_the_first_of_the_best_scored_samples_is_said() -> None:
    found = pick(prompt(None, 0.2, 0.9, 0.9, -1.0))
    assert (found.text, found.score, found.index, found.reason) == ("c", 0.9, 2, None)
    assert found.scores == (None, 0.2, 0.9, 0.9, -1.0)
    negative = pick(prompt(None, -3.0, -2.0))
    assert (negative.text, negative.score, negative.index) == ("c", -2.0, 2), "an error is no zero"


def test_a_prompt_that_nobody_could_judge_gets_no_answer() -> None:
    found = pick(prompt(None, None))
    assert (found.text, found.score, found.index, found.reason) == (None, None, None, "crash")


def test_what_n_buys_is_the_mean_over_all_subsets() -> None:
    numbers = random.Random(1)
    prompts = [prompt(*(numbers.random() for _ in range(4)), name=str(i)) for i in range(5)]
    found = {gain.n: gain for gain in gains([*prompts, prompt(0.5, None, None, None, name="few")])}
    assert sorted(found) == [1, 2, 4]
    scores = [[sample.score or 0.0 for sample in each.samples] for each in prompts]
    pairs = [fmean(max(pair) for pair in combinations(own, 2)) for own in scores]
    assert found[2].score == pytest.approx(fmean(pairs))
    assert (found[2].num_prompts, found[1].num_prompts) == (5, 6)
    assert found[4].tokens == 20.0
    assert found[1].score < found[2].score < found[4].score
    assert found[2].low < found[2].score < found[2].high
    assert found[4].kl_bound == kl_bound(4)


def test_nothing_scored_gains_nothing_and_one_prompt_has_no_interval() -> None:
    assert gains([prompt(None, None)]) == []
    assert gains([prompt(0.0, 3.0)])[-1].high == math.inf
    assert 0 <= gains([prompt(0.0, 1.0)])[-1].low <= gains([prompt(0.0, 1.0)])[-1].high <= 1, "a share stays one"


def test_a_planted_zero_for_an_error_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_zeros(found: PromptResult) -> PromptResult:
        return prompt(*(0.0 if sample.score is None else sample.score for sample in found.samples))

    own = best_of.pick
    monkeypatch.setitem(globals(), "pick", lambda found: own(with_zeros(found)))
    with pytest.raises(AssertionError):
        test_the_first_of_the_best_scored_samples_is_said()


def test_equal_texts_are_one_attempt_as_in_rejection_sampling() -> None:
    found = pick(prompt(0.1, 0.1, 0.7, texts=["x", "x ", "y"]))  # type: ignore[arg-type]
    assert (found.index, found.text) == (2, "y")
