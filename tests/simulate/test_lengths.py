"""Lengths of answers: as distributed as they are asked for, and the same for the same request."""

from __future__ import annotations

import statistics

import pytest

from temper.errors import UserError
from temper.simulate.lengths import OfferedLengths, fixed, measured, read_lengths


def draws(text: str, count: int = 4000) -> list[int]:
    lengths = read_lengths(text, seed=1)
    return [lengths(f"g{i // 4}", i % 4) for i in range(count)]


def test_lengths_are_as_they_are_asked_for() -> None:
    assert set(draws("fixed:17", 8)) == {17}
    assert set(draws("uniform:3:5")) == {3, 4, 5}
    drawn = draws("lognormal:400:0.5")
    assert statistics.fmean(drawn) == pytest.approx(400, rel=0.05)
    assert statistics.median(drawn) < 0.92 * 400, "skewed to the right"
    heavy = draws("tail:100:0.1:8")
    assert set(heavy) == {100, 800}
    assert heavy.count(800) / len(heavy) == pytest.approx(0.1, abs=0.02)


def test_a_hard_prompt_is_long_for_all_of_its_answers() -> None:
    drawn = draws("groups:100:0.1:8")
    groups = [set(drawn[first : first + 4]) for first in range(0, len(drawn), 4)]
    assert all(group in ({100}, {800}) for group in groups)
    assert groups.count({800}) / len(groups) == pytest.approx(0.1, abs=0.03)


def test_every_group_that_was_started_is_offered() -> None:
    offered = OfferedLengths(lambda group, member: 10 + member)
    assert [offered("stage 0/t1#0", 0), offered("stage 0/t5#3", 1), offered("stage 0/t5#3", 99)] == [10, 11, 109]
    assert offered.means(group_size=3, longest=11) == {0: 32 / 3, 3: 32 / 3}, "a baseline is no member"
    canary = OfferedLengths(fixed(3))
    assert (canary("canary", 0), canary.means(2, 9)) == (3, {})


def test_the_same_request_has_the_same_length() -> None:
    assert draws("lognormal:400:0.5", 50) == draws("lognormal:400:0.5", 50)
    assert len(set(draws("lognormal:400:0.5", 50))) > 40


def test_measured_groups_stay_together() -> None:
    lengths = measured([(1, 2, 3), (100, 200, 300)], seed=0)
    groups = [tuple(lengths(f"g{i}", member) for member in range(5)) for i in range(100)]
    assert {group[:3] for group in groups} == {(1, 2, 3), (100, 200, 300)}
    assert all(max(group) / min(group) <= 3 for group in groups), "more members than were measured are alike"


@pytest.mark.parametrize("text", ["lognormal", "lognormal:400", "normal:3:4", "fixed:x", "fixed:0", "tail:100:0.1:inf"])
def test_what_cannot_be_read_is_refused_with_what_can(text: str) -> None:
    with pytest.raises(UserError, match="lognormal:MEAN:SPREAD"):
        read_lengths(text, seed=0)
