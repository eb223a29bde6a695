"""The benchmark of the long tail prints a row for each setting, and every setting is one that a recipe may have."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.heavy
def test_every_row_is_simulated(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.chdir(FOLDER.parent)
    import long_tail

    small = (
        "--set stage.2.rollout.groups_per_step=4 --set stage.2.rollout.group_size=2 --lengths groups:2:0.1:8 --steps 2"
    )
    monkeypatch.setattr(sys, "argv", ["long_tail.py", *small.split()])
    long_tail.main()
    header, rule, *rows = capsys.readouterr().out.splitlines()
    assert len(rows) == len(long_tail.SETTINGS)
    assert {line.count("|") for line in (header, rule, *rows)} == {12}
    assert [row.split("|")[1].strip() for row in rows] == ["0"] * 3 + ["2"] * 5 + ["4"] * 5
