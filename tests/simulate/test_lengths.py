"""Lengths of answers: as distributed as they are asked for, and the same for the same request."""

from __future__ import annotations

import statistics

import pytest

from temper.errors import UserError
from temper.simulate.lengths import measured, read_lengths


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
