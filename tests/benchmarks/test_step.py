"""Benchmarks that make recipes by step.py give it all the options that it reads."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


def test_the_planned_peak_needs_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    import plan

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert 30 < plan.run_one("135m")["planned"] < 50  # 38.1 GiB were measured


@pytest.mark.heavy
def test_both_places_are_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    import overlap

    small = "--staleness 1 --prompts 2 --group 2 --new 4 --steps 3 --threads 1"
    monkeypatch.setattr(sys, "argv", ["overlap.py", *small.split()])
    overlap.main()
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert [row[1] for row in rows] == ["here", "process"]


def test_what_passes_reach_of_the_matrix_rate_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """6 TFLOP in 2 of 5 seconds, where a bare product makes 4 a second: three quarters."""
    monkeypatch.syspath_prepend(FOLDER)
    import step

    said = step.describe_passes(flops=6e12, rate=4e12, passes=2.0, step=5.0)
    assert said == (
        "forward and backward: 2.000 s at 75% of the matrix rate measured here (4 TFLOP/s); everything else 3.000 s"
    )
