"""Accuracy, its interval and calibration of scores, by numbers worked out by hand."""

from __future__ import annotations

import json
import math
import random

import pytest

from temper.evals.pairs import judge_pairs, judge_steps, pair_results, result_of
from temper.evals.passk import wilson


def test_accuracy_counts_pairs_in_order_and_ties_by_half() -> None:
    judged = judge_pairs([1.2, 0.0, 3.0, 1.0], [0.5, 1.0, 1.0, 1.0])
    assert judged.accuracy == pytest.approx((1 + 0 + 1 + 0.5) / 4)
    assert (judged.low, judged.high) == wilson(2.5, 4)
    assert judged.margin == pytest.approx((0.7 - 1 + 2 + 0) / 4)
    assert judged.guess == 0.5


def test_a_model_that_says_the_same_to_everything_is_not_known_to_be_half_right() -> None:
    judged = judge_pairs([0.0] * 10, [0.0] * 10)
    assert judged.accuracy == 0.5
    assert judged.low < 0.3 < 0.7 < judged.high


def test_calibration_of_a_pair_is_that_of_its_sigmoid_from_both_sides() -> None:
    logit = math.log(0.75 / 0.25)
    judged = judge_pairs([logit] * 4, [0.0] * 4)  # says 75%, and it happens always
    assert judged.calibration_error == pytest.approx(0.25)
    assert [one.predicted for one in judged.bins if one] == pytest.approx([0.25, 0.75])
    assert [one.happened for one in judged.bins if one] == [0.0, 1.0]
    honest = judge_pairs([logit] * 3 + [0.0], [0.0] * 3 + [logit])  # says 75%, and it happens in three of four
    assert honest.calibration_error == pytest.approx(0.0, abs=1e-12)


def test_scores_that_are_drawn_as_they_say_are_calibrated_and_doubled_ones_are_not() -> None:
    draw = random.Random(0)
    margins = [draw.gauss(0, 2) for _ in range(4000)]
    signed = [m if draw.random() < 1 / (1 + math.exp(-m)) else -m for m in margins]
    assert judge_pairs(signed, [0.0] * 4000).calibration_error < 0.02
    assert judge_pairs([2 * m for m in signed], [0.0] * 4000).calibration_error > 0.05


def test_steps_are_judged_by_solution() -> None:
    judged = judge_steps([[2.0, -1.0], [3.0], [-2.0]], [[1.0, 1.0], [1.0], [0.0]])
    assert judged.accuracy == pytest.approx((0.5 + 1 + 1) / 3)
    assert judged.num_examples == 3
    assert judged.guess == pytest.approx(0.75)
    assert judged.margin is None


def test_a_result_carries_the_interval_the_guess_and_the_bins() -> None:
    result = pair_results([1.0, 2.0], [0.0, 3.0], stage=2, step=7, name="rm", budget={"pairs_sha256": "x"})
    assert (result.stage, result.step, result.name) == (2, 7, "rm")
    assert (result.score, result.constant_score, result.num_prompts) == (0.5, 0.5, 2)
    assert result.low < 0.5 < result.high
    assert result.budget == {"pairs_sha256": "x"}
    shares = [part["share"] for name, part in result.details.items() if name.startswith("calibration/")]  # type: ignore[index]
    assert sum(shares) == pytest.approx(1.0)
    assert {"calibration_error", "margin", "score_mean", "score_std"} <= result.details.keys()


def test_a_single_step_has_no_spread_and_says_so_without_nan() -> None:
    judged = judge_steps([[1.0]], [[1.0]])
    assert judged.as_json()["score_std"] is None
    json.dumps(judged.as_json(), allow_nan=False)
    assert "score_std" not in result_of(judged, stage=0, step=1, name="steps").details


def test_the_table_has_a_line_for_every_bin_that_was_used() -> None:
    lines = judge_pairs([1.0, 5.0], [0.0, 0.0]).table().splitlines()
    assert lines[0].startswith("accuracy 100.0%")
    assert len(lines) == 2 + 4
