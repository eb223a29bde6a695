from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from temper.rewards.score import combine, finite
from temper.types import Score, ScoreKind

SCORES = st.one_of(
    st.floats(-5, 5).map(Score.of), st.just(Score.unscorable("no verdict")), st.just(Score.error("timeout after 5 s"))
)


def test_the_total_is_the_weighted_sum() -> None:
    parts = {"math": Score.of(1.0), "format": Score.of(0.5)}
    assert combine(parts, {"math": 1.0, "format": 0.2}) == Score.of(1.1)


def test_an_unscorable_part_is_left_out_and_all_unscorable_is_unscorable() -> None:
    judge = Score.unscorable("the judge gave no verdict")
    assert combine({"math": Score.of(1.0), "judge": judge}, {"math": 2.0, "judge": 1.0}) == Score.of(2.0)
    assert combine({"judge": judge}, {"judge": 1.0}).kind is ScoreKind.UNSCORABLE


@given(st.dictionaries(st.sampled_from("abcd"), SCORES, max_size=4))
def test_an_error_never_becomes_a_number(parts: dict[str, Score]) -> None:
    total = combine(parts, dict.fromkeys("abcd", 1.0))
    has_error = any(score.kind is ScoreKind.ERROR for score in parts.values())
    assert (total.kind is ScoreKind.ERROR) == has_error
    if has_error:
        assert "timeout after 5 s" in (total.reason or "")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_none_is_an_error(value: float) -> None:
    assert finite(Score.of(value)).kind is ScoreKind.ERROR
    assert combine({"a": Score.of(1e308)}, {"a": 1e308}).kind is ScoreKind.ERROR
