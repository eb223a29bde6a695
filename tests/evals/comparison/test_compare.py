"""A paired comparison agrees with closed forms, refuses unlike results, and shows whatever a model wrote as text."""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from html.parser import HTMLParser
from itertools import product
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import pytest

from temper.errors import UserError, install_line
from temper.evals.comparison.compare import compare, differences_of, false_discovery, fisher, intervals, sign_flip
from temper.evals.comparison.page import panels, render_page, write_png
from temper.evals.comparison.verdict import Kind
from temper.evals.passk import t_quantile
from temper.evals.scores import suite_metrics
from temper.runs.results import PromptResult, SampleResult, SuiteResult

BUDGET = {"prompts_sha256": "aa", "temperature": 0.6, "samples": 8, "seed": 0, "suite": "sums"}


def sample(score: float | None, *, text: str = "", answer: str | None = None, tokens: int = 10) -> SampleResult:
    reason = "the verifier gave up" if score is None else None
    return SampleResult(score=score, reason=reason, answer=answer, num_tokens=tokens, text=text)


def result(name: str, rows: Sequence[Sequence[SampleResult]], **changes) -> SuiteResult:
    prompts = tuple(
        PromptResult(task_id=f"t{i}", prompt=f"question {i}", gold=str(i), samples=tuple(row))
        for i, row in enumerate(rows)
    )
    return replace(
        SuiteResult(
            suite="sums", checkpoint=f"runs/{name}", weights_sha256=name * 8, created=0.0, budget=BUDGET,
            constant_score=None, metrics=suite_metrics(prompts), prompts=prompts,
        ),
        **changes,
    )  # fmt: skip


def drawn(name: str, chances: Sequence[float], count: int = 8, seed: int = 0) -> SuiteResult:
    random = np.random.default_rng(seed)
    rights = random.random((len(chances), count)) < np.array(chances)[:, None]
    return result(name, [[sample(float(right), answer=str(int(right))) for right in row] for row in rights])


def closed_form(changes: Sequence[float]) -> tuple[float, float]:
    """The paired t interval."""
    half = t_quantile(len(changes) - 1) * stdev(changes) / math.sqrt(len(changes))
    return fmean(changes) - half, fmean(changes) + half


def test_the_difference_of_pass_1_and_its_interval_agree_with_the_paired_t_interval() -> None:
    chances = np.linspace(0.1, 0.8, 150)
    base, trained = drawn("base", chances), drawn("trained", np.minimum(1, chances + 0.1), seed=1)
    changes = [
        fmean(s.score or 0.0 for s in theirs.samples) - fmean(s.score or 0.0 for s in ours.samples)
        for ours, theirs in zip(base.prompts, trained.prompts, strict=True)
    ]
    low, high = closed_form(changes)
    pass_1 = compare(base, trained).differences[0]
    assert pass_1.name == "pass@1"
    assert pass_1.difference == pytest.approx(fmean(changes), abs=1e-12)
    width = high - low
    assert abs(pass_1.low - low) < 0.04 * width
    assert abs(pass_1.high - high) < 0.04 * width


def test_intervals_that_forget_the_pairing_would_be_caught() -> None:
    """Prompts differ far more from each other than models do: unpaired, the interval is several times as wide."""
    levels = np.linspace(0.0, 1.0, 60)
    changes = np.tile([0.0, 0.02], 30)
    values = np.stack([levels, levels + changes], axis=1)[:, :, None]
    (paired,) = differences_of(values, {"pass@1": "%"}, seed=0)
    low, high = closed_form(list(changes))
    assert paired.half_width == pytest.approx((high - low) / 2, rel=0.06)
    unpaired = t_quantile(118) * math.sqrt(2 * np.var(levels, ddof=1) / 60)
    assert unpaired > 20 * paired.half_width


@pytest.mark.parametrize("num_prompts", [8, 30])
def test_intervals_hold_the_truth_95_times_in_100_also_for_few_prompts(num_prompts: int) -> None:
    random = np.random.default_rng(5)
    trials = 1500
    changes = random.normal(0.03, 0.1, size=(num_prompts, trials))
    lows, highs = intervals(changes, np.ones_like(changes, dtype=bool), seed=0)
    assert 0.93 <= np.mean((lows <= 0.03) & (highs >= 0.03)) <= 0.97


def test_the_bootstrap_is_by_prompt_not_by_sample() -> None:
    """Copies of every sample add no knowledge: the interval stays as it is."""
    chances = np.linspace(0, 1, 40)
    base, trained = drawn("base", chances), drawn("trained", chances, seed=1)

    def doubled(whole: SuiteResult) -> SuiteResult:
        return replace(whole, prompts=tuple(replace(p, samples=p.samples * 4) for p in whole.prompts))

    once, often = (compare(*pair).differences[0] for pair in ((base, trained), (doubled(base), doubled(trained))))
    assert (once.low, once.high) == pytest.approx((often.low, often.high))


def test_sign_flips_agree_with_all_of_them() -> None:
    changes = np.array([0.5, 0.25, 0.25, -0.125, 0.375, 0.5, 0.0])
    sums = [abs(np.dot(signs, changes)) for signs in product((-1, 1), repeat=len(changes))]
    exact = fmean(total >= abs(changes.sum()) - 1e-9 for total in sums)
    assert sign_flip(changes[:, None], 0, resamples=20_000)[0] == pytest.approx(exact, abs=0.01)


def test_fishers_test_is_exact() -> None:
    assert fisher((3, 1), (4, 4)) == pytest.approx(float(Fraction(34, 70)))  # the lady tasting tea
    assert fisher((8, 0), (8, 8)) == pytest.approx(2 / math.comb(16, 8))
    assert fisher((0, 0), (8, 8)) == fisher((4, 4), (8, 8)) == 1.0


def test_the_false_discovery_rate_is_that_of_the_paper() -> None:
    assert false_discovery([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.02, 0.04, 0.04, 0.02])
    assert false_discovery([]) == []


def test_unlike_budgets_are_refused_and_the_difference_is_named() -> None:
    base = drawn("base", [0.5] * 12)
    other = replace(base, budget={**BUDGET, "temperature": 1.0, "samples": 16})
    with pytest.raises(UserError, match=r"samples: 8 and 16; temperature: 0.6 and 1.0"):
        compare(base, other)
    moved = replace(base, prompts=(*base.prompts[1:], base.prompts[0]))
    with pytest.raises(UserError, match="not the same"):
        compare(base, moved)


def test_regressions_are_listed_prompt_by_prompt_with_evidence_and_the_samples_that_part() -> None:
    right, wrong = sample(1.0, text="yes"), sample(0.0, text="no")
    base = result("base", [[right] * 8, [right] * 4 + [wrong] * 4, [wrong] * 8])
    trained = result("trained", [[wrong] * 8, [right] * 3 + [wrong] * 5, [right] * 8])
    found = compare(base, trained)
    assert [change.task_id for change in found.regressions] == ["t0", "t1"]
    assert [change.task_id for change in found.improvements] == ["t2"]
    sure, chance = found.regressions
    assert sure.p_value == pytest.approx(2 / math.comb(16, 8))
    assert sure.adjusted == pytest.approx(1.5 * sure.p_value)
    assert (sure.base_sample.text, sure.trained_sample.text) == ("yes", "no")
    assert chance.p_value > 0.5
    assert (chance.base_sample.text, chance.trained_sample.text) == ("yes", "no")


def test_drift_counts_length_format_and_unscorable_samples_apart_from_scores() -> None:
    base = result("base", [[sample(1.0, tokens=10, answer="1"), sample(0.0, tokens=30, answer="2")]] * 12)
    cut = SampleResult(score=0.0, num_tokens=90, status="truncated_length")
    trained = result("trained", [[sample(None, tokens=50), cut]] * 12)
    found = compare(base, trained)
    drift = {row.name: row for row in found.drift}
    assert (drift["length"].base, drift["length"].trained) == (20, 70)
    assert (drift["unscorable"].base, drift["unscorable"].trained) == (0, 0.5)
    assert drift["cut at the token limit"].difference == 0.5
    assert drift["no answer stated"].difference == 1.0
    assert "length of right answers" not in drift  # the trained model has none
    names = [row.name for row in found.differences]
    assert "pass@1" in names
    assert "pass@2" not in names  # one scored sample each: there is no pass@2 of the trained model


def test_graded_scores_have_a_mean_and_best_of_k_and_a_permutation_test() -> None:
    random = np.random.default_rng(0)
    base = result("base", [[sample(float(x)) for x in row] for row in random.uniform(0, 0.5, (12, 8))])
    trained = result("trained", [[sample(float(x)) for x in row] for row in random.uniform(0.4, 0.9, (12, 8))])
    found = compare(base, trained)
    rows = {row.name: row for row in found.differences}
    assert rows["mean score"].difference == pytest.approx(0.4, abs=0.05)
    assert rows["best@8"].trained == pytest.approx(fmean(max(s.score for s in p.samples) for p in trained.prompts))
    assert rows["pass@1"].base == 0
    assert all(change.p_value < 0.02 for change in found.prompts)


def test_the_same_seed_gives_the_same_comparison() -> None:
    base, trained = drawn("base", [0.4] * 20), drawn("trained", [0.6] * 20, seed=1)
    assert compare(base, trained, seed=3) == compare(base, trained, seed=3)
    assert compare(base, trained, seed=3).differences != compare(base, trained, seed=4).differences


def test_the_verdict_of_results_is_that_of_their_models() -> None:
    chances = np.concatenate([np.zeros(30), np.linspace(0.1, 0.6, 60)])
    base = drawn("base", chances, 64)
    assert compare(base, drawn("trained", np.minimum(1, 1.6 * chances), 64, seed=1)).verdict.kind is Kind.SHARPENING
    assert compare(base, drawn("trained", np.maximum(0.3, chances), 64, seed=1)).verdict.kind is Kind.EXPANSION
    assert compare(base, drawn("trained", chances, 64, seed=1)).verdict.kind is Kind.NO_CHANGE
    assert compare(base, base).verdict.kind is Kind.NO_CHANGE


HOSTILE = "<script>alert(1)</script></pre><img src=x onerror=alert(2)> & $title"


class Tags(HTMLParser):
    """What a browser would make of the page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.attributes: set[str] = set()
        self.words: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs) -> None:
        self.names.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data) -> None:
        self.words.append(data)


def test_whatever_a_model_or_data_set_wrote_is_shown_as_text() -> None:
    rows = [[sample(1.0, text=HOSTILE, answer=HOSTILE)]] * 12
    other = [[sample(0.0, text=HOSTILE), *row[1:]] for row in rows]
    both = [result(HOSTILE, rows, suite=HOSTILE), result(HOSTILE, other, suite=HOSTILE)]
    both = [
        replace(one, prompts=tuple(replace(p, prompt=HOSTILE, gold=HOSTILE, task_id=HOSTILE) for p in one.prompts))
        for one in both
    ]
    tags = Tags(render_page(compare(*both)))
    assert not tags.names & {"script", "img"}
    assert not [name for name in tags.attributes if name.startswith("on") or name in ("src", "href")]
    assert HOSTILE in tags.words


def test_the_page_needs_no_network_and_shows_verdict_curves_and_tables() -> None:
    base, trained = drawn("base", np.linspace(0, 1, 30)), drawn("trained", np.linspace(0.2, 1, 30), seed=1)
    comparison = compare(base, trained)
    page = render_page(comparison)
    assert "http://" not in page.replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert "https://" not in page
    assert "default-src 'none'" in page
    assert comparison.verdict.kind in page
    assert page.count("<svg") == 2
    assert "prefers-color-scheme: dark" in page
    assert page.count("<details") == len(comparison.regressions) + len(comparison.improvements) + 1


def test_the_picture_is_written_or_the_install_line_is_named(tmp_path: Path, monkeypatch) -> None:
    drawing = panels(compare(drawn("base", [0.4] * 12), drawn("trained", [0.6] * 12, seed=1)))
    if importlib.util.find_spec("matplotlib") is not None:
        write_png(drawing, tmp_path / "one.png")
        assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")

    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr("temper.evals.comparison.page.import_module", missing)
    with pytest.raises(UserError, match=re.escape(install_line("plots"))):
        write_png(drawing, tmp_path / "other.png")
    assert not (tmp_path / "other.png").exists()
