from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from temper.rewards.score import PartRule, combine, finite, pay_turns, weigh
from temper.types import Score, ScoreKind

SCORES = st.one_of(
    st.floats(-5, 5).map(Score.of), st.just(Score.unscorable("no verdict")), st.just(Score.error("timeout after 5 s"))
)


def test_the_total_is_the_weighted_sum() -> None:
    parts = {"math": Score.of(1.0), "format": Score.of(0.5)}
    assert combine(parts, {"math": PartRule(), "format": PartRule(weight=0.2)}) == Score.of(1.1)


def test_a_part_without_a_verdict_leaves_the_whole_without_one() -> None:
    """A penalty that is dropped would turn a bad response into a good one."""
    judge = Score.unscorable("the judge gave no verdict")
    for weight in (1.0, -1.0):
        whole = combine(
            {"math": Score.of(1.0), "judge": judge}, {"math": PartRule(weight=2.0), "judge": PartRule(weight=weight)}
        )
        assert whole == Score.unscorable("judge: the judge gave no verdict")


def test_an_optional_part_is_left_out_unless_it_is_all_there_is() -> None:
    judge = Score.unscorable("the judge gave no verdict")
    optional = {"math": PartRule(weight=2.0), "judge": PartRule(is_optional=True)}
    assert combine({"math": Score.of(1.0), "judge": judge}, optional) == Score.of(2.0)
    assert combine({"math": Score.unscorable("no"), "judge": Score.of(1.0)}, optional) == Score.unscorable("math: no")
    assert combine({"judge": judge}, {"judge": PartRule(is_optional=True)}).kind is ScoreKind.UNSCORABLE


def test_what_a_verifier_says_of_its_number_stays_with_the_whole() -> None:
    parts = {"math": Score.of(0.0, "it used up its CPU time"), "format": Score.of(0.5)}
    rules = {"math": PartRule(), "format": PartRule()}
    assert combine(parts, rules) == Score.of(0.5, "math: it used up its CPU time")


@given(st.dictionaries(st.sampled_from("abcd"), SCORES, max_size=4))
def test_an_error_never_becomes_a_number(parts: dict[str, Score]) -> None:
    total = combine(parts, dict.fromkeys("abcd", PartRule()))
    has_error = any(score.kind is ScoreKind.ERROR for score in parts.values())
    assert (total.kind is ScoreKind.ERROR) == has_error
    if has_error:
        assert "timeout after 5 s" in (total.reason or "")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_none_is_an_error(value: float) -> None:
    assert finite(Score.of(value)).kind is ScoreKind.ERROR
    assert combine({"a": Score.of(1e308)}, {"a": PartRule(weight=1e308)}).kind is ScoreKind.ERROR


def test_a_closed_gate_makes_the_whole_zero_and_an_open_one_adds_nothing() -> None:
    rules = {"tags": PartRule(is_gate=True, weight=5.0), "math": PartRule(weight=2.0)}
    assert combine({"tags": Score.of(1.0), "math": Score.of(1.0)}, rules) == Score.of(2.0)
    assert combine({"tags": Score.of(0.99), "math": Score.of(1.0)}, rules) == Score.of(0.0)
    assert combine({"tags": Score.of(0.0), "math": Score.of(-3.0)}, rules) == Score.of(0.0)


def test_a_gate_without_a_verdict_is_neither_open_nor_closed() -> None:
    rules = {"judge": PartRule(is_gate=True), "math": PartRule()}
    assert combine({"judge": Score.unscorable("silent"), "math": Score.of(1.0)}, rules).kind is ScoreKind.UNSCORABLE
    assert combine({"judge": Score.error("down"), "math": Score.of(1.0)}, rules).kind is ScoreKind.ERROR
    assert combine({"judge": Score.of(0.0), "math": Score.error("down")}, rules).kind is ScoreKind.ERROR
    assert combine({"judge": Score.of(1.0), "math": Score.unscorable("silent")}, rules).kind is ScoreKind.UNSCORABLE
    assert combine({"judge": Score.of(0.0), "math": Score.unscorable("silent")}, rules) == Score.of(0.0)


@pytest.mark.parametrize(("value", "total"), [(5.0, 0.5), (0.4, 0.2), (-5.0, -0.5)])
def test_bounds_hold_before_weighting(value: float, total: float) -> None:
    assert combine({"model": Score.of(value)}, {"model": PartRule(weight=0.5, clip=(-1.0, 1.0))}) == Score.of(total)


RULES = st.builds(
    PartRule,
    weight=st.floats(-2, 2),
    is_gate=st.booleans(),
    clip=st.one_of(st.none(), st.tuples(st.floats(-1, 0), st.floats(0, 1))),
)


@given(st.dictionaries(st.sampled_from("abcd"), st.tuples(st.floats(-5, 5).map(Score.of), RULES), max_size=4))
def test_the_weighted_parts_sum_to_the_whole(parts: dict[str, tuple[Score, PartRule]]) -> None:
    scores, rules = ({name: pair[place] for name, pair in parts.items()} for place in (0, 1))
    total = combine(scores, rules)  # type: ignore[arg-type]
    weighted = weigh(scores, rules)  # type: ignore[arg-type]
    assert weighted.keys() == parts.keys()
    if total.value is not None:
        assert sum(score.value or 0.0 for score in weighted.values()) == pytest.approx(total.value)


PAYING = {
    "math": PartRule(weight=2.0),
    "tags": PartRule(is_gate=True),
    "process": PartRule(weight=0.5, pays_turns=True),
}
SCORED = {"math": Score.of(1.0), "tags": Score.of(1.0), "process": Score.of(0.7)}


def test_a_part_that_pays_turns_adds_nothing_to_the_whole() -> None:
    assert combine(SCORED, PAYING) == Score.of(2.0)
    assert weigh(SCORED, PAYING)["process"] == Score.of(0.0)


def test_a_part_that_pays_turns_and_could_not_leaves_the_whole_unscored() -> None:
    silent = {**SCORED, "process": Score.unscorable("silent")}
    assert combine(silent, PAYING) == Score.unscorable("process: silent")
    assert combine({**SCORED, "process": Score.error("down")}, PAYING).kind is ScoreKind.ERROR
    alone = {**SCORED, "math": Score.unscorable("no answer")}
    assert combine(alone, PAYING).kind is ScoreKind.UNSCORABLE, "what pays turns is no outcome"


def test_turns_earn_payments_after_weighting_and_the_last_one_the_outcome() -> None:
    earned = pay_turns(2.0, [None, None, None], {"process": [0.2, None, 0.3]}, SCORED, PAYING)
    assert earned == pytest.approx([0.1, 0.0, 2.15])


def test_an_outcome_that_the_environment_paid_is_not_counted_again() -> None:
    rules = {"env": PartRule(), "process": PartRule(pays_turns=True)}
    parts = {"env": Score.of(1.25), "process": Score.of(0.4)}
    earned = pay_turns(1.25, [0.25, 1.0], {"process": [0.1, 0.3]}, parts, rules)
    assert earned == pytest.approx([0.35, 1.3])


def test_a_closed_gate_takes_the_payments_and_the_outcome() -> None:
    closed = {**SCORED, "tags": Score.of(0.0)}
    assert pay_turns(0.0, [0.5, None], {"process": [0.2, 0.3]}, closed, PAYING) == [0.5, -0.5]
    assert pay_turns(0.0, [], {"process": []}, SCORED, PAYING) == []


@given(
    st.floats(-2, 2),
    st.lists(st.tuples(st.one_of(st.none(), st.floats(-1, 1)), st.one_of(st.none(), st.floats(-1, 1))), min_size=1),
)
def test_turns_earn_the_total_and_the_payments_together(
    total: float, turns: list[tuple[float | None, float | None]]
) -> None:
    given_, paid = [turn[0] for turn in turns], [turn[1] for turn in turns]
    earned = pay_turns(total, given_, {"process": paid}, SCORED, PAYING)
    assert sum(earned) == pytest.approx(total + 0.5 * sum(reward or 0.0 for reward in paid), abs=1e-9)
