"""Counts of several samplers as those of one."""

from __future__ import annotations

import pytest

from temper.engine.fleet.counts import tell_together, together


def test_totals_add_up_peaks_are_the_highest_and_means_go_by_work() -> None:
    found = together(
        [
            {"decode_tokens": 30.0, "prefill_tokens": 0.0, "kv_use": 0.2, "occupancy": 0.5, "running": 3.0},
            {"decode_tokens": 10.0, "prefill_tokens": 0.0, "kv_use": 0.7, "occupancy": 0.1, "decode_tok_s": 5.0},
            {"occupancy": 0.0, "something of its own": 1.0, "drawing_seconds": 6.0},
        ],
        4,
    )
    assert found == {
        "decode_tokens": 40.0,
        "prefill_tokens": 0.0,
        "kv_use": 0.7,
        "occupancy": pytest.approx(0.4),
        "running": 3.0,
        "decode_tok_s": 5.0,
        "drawing_seconds": 1.5,
    }
    assert together([], 1) == {"drawing_seconds": 0.0}
    assert together([{"occupancy": 0.3}], 1) == {"occupancy": 0.3, "drawing_seconds": 0.0}


def test_how_far_each_is_is_told_as_how_far_all_are() -> None:
    heard: list[tuple[int, int]] = []
    first, second = tell_together(2, lambda done, total: heard.append((done, total)))
    first(1, 4)
    second(2, 3)
    assert heard == [(1, 5), (3, 7)]
