from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from temper.rewards.score import Rule, combine, finite, weigh
from temper.types import Score, ScoreKind

SCORES = st.one_of(
    st.floats(-5, 5).map(Score.of), st.just(Score.unscorable("no verdict")), st.just(Score.error("timeout after 5 s"))
)


def test_the_total_is_the_weighted_sum() -> None:
    parts = {"math": Score.of(1.0), "format": Score.of(0.5)}
    assert combine(parts, {"math": Rule(), "format": Rule(weight=0.2)}) == Score.of(1.1)


def test_an_unscorable_part_is_left_out_and_all_unscorable_is_unscorable() -> None:
    judge = Score.unscorable("the judge gave no verdict")
    assert combine({"math": Score.of(1.0), "judge": judge}, {"math": Rule(weight=2.0), "judge": Rule()}) == Score.of(
        2.0
    )
    assert combine({"judge": judge}, {"judge": Rule()}).kind is ScoreKind.UNSCORABLE


@given(st.dictionaries(st.sampled_from("abcd"), SCORES, max_size=4))
def test_an_error_never_becomes_a_number(parts: dict[str, Score]) -> None:
    total = combine(parts, dict.fromkeys("abcd", Rule()))
    has_error = any(score.kind is ScoreKind.ERROR for score in parts.values())
    assert (total.kind is ScoreKind.ERROR) == has_error
    if has_error:
        assert "timeout after 5 s" in (total.reason or "")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_none_is_an_error(value: float) -> None:
    assert finite(Score.of(value)).kind is ScoreKind.ERROR
    assert combine({"a": Score.of(1e308)}, {"a": Rule(weight=1e308)}).kind is ScoreKind.ERROR


def test_a_closed_gate_makes_the_whole_zero_and_an_open_one_adds_nothing() -> None:
    rules = {"tags": Rule(is_gate=True, weight=5.0), "math": Rule(weight=2.0)}
    assert combine({"tags": Score.of(1.0), "math": Score.of(1.0)}, rules) == Score.of(2.0)
    assert combine({"tags": Score.of(0.99), "math": Score.of(1.0)}, rules) == Score.of(0.0)
    assert combine({"tags": Score.of(0.0), "math": Score.of(-3.0)}, rules) == Score.of(0.0)


def test_a_gate_without_a_verdict_is_neither_open_nor_closed() -> None:
    rules = {"judge": Rule(is_gate=True), "math": Rule()}
    assert combine({"judge": Score.unscorable("silent"), "math": Score.of(1.0)}, rules).kind is ScoreKind.UNSCORABLE
    assert combine({"judge": Score.error("down"), "math": Score.of(1.0)}, rules).kind is ScoreKind.ERROR
    assert combine({"judge": Score.of(0.0), "math": Score.error("down")}, rules).kind is ScoreKind.ERROR
    assert combine({"judge": Score.of(1.0), "math": Score.unscorable("silent")}, rules).kind is ScoreKind.UNSCORABLE
    assert combine({"judge": Score.of(0.0), "math": Score.unscorable("silent")}, rules) == Score.of(0.0)


@pytest.mark.parametrize(("value", "total"), [(5.0, 0.5), (0.4, 0.2), (-5.0, -0.5)])
def test_bounds_hold_before_weighting(value: float, total: float) -> None:
    assert combine({"model": Score.of(value)}, {"model": Rule(weight=0.5, clip=(-1.0, 1.0))}) == Score.of(total)


RULES = st.builds(
    Rule,
    weight=st.floats(-2, 2),
    is_gate=st.booleans(),
    clip=st.one_of(st.none(), st.tuples(st.floats(-1, 0), st.floats(0, 1))),
)


@given(st.dictionaries(st.sampled_from("abcd"), st.tuples(st.floats(-5, 5).map(Score.of), RULES), max_size=4))
def test_the_weighted_parts_sum_to_the_whole(parts: dict[str, tuple[Score, Rule]]) -> None:
    scores, rules = ({name: pair[place] for name, pair in parts.items()} for place in (0, 1))
    total = combine(scores, rules)  # type: ignore[arg-type]
    weighted = weigh(scores, rules)  # type: ignore[arg-type]
    assert weighted.keys() == parts.keys()
    if total.value is not None:
        assert sum(score.value or 0.0 for score in weighted.values()) == pytest.approx(total.value)
