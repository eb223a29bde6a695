"""Curves in one line."""

from __future__ import annotations

import math

from temper.runs.report.sparkline import sparkline


def test_a_rising_line_uses_every_bar_once() -> None:
    assert sparkline(range(8)) == "▁▂▃▄▅▆▇█"


def test_long_series_are_averaged_into_buckets_and_gaps_stay_gaps() -> None:
    assert sparkline([0.0, 0.0, 1.0, 1.0], width=2) == "▁█"
    assert sparkline([0.0, None, math.nan, 1.0]) == "▁  █"
    assert sparkline([]) == sparkline([None]) == ""
    assert sparkline([2.0, 2.0]) == "▄▄"
