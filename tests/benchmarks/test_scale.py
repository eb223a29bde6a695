"""Scaling on paper runs from a model's description alone, keeps what it found, and stands on the planner's sums."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


def test_a_case_is_simulated_once_and_shown_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    import scale

    asked = f"--out {tmp_path} --shape qwen3-30b-a3b --mean 32 --gpus 16 --staleness 0 1 --groups 4 --group-size 2"
    shown = []
    for more in ("", " --again"):
        monkeypatch.setattr(sys, "argv", ["scale.py", *(asked + more).split()])
        scale.main()
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    rows = [line for line in shown[0].splitlines() if line.startswith("| 16 |")]
    assert len(rows) == 2
    found = [json.loads(line) for line in (tmp_path / "qwen3-30b-a3b-32.jsonl").read_text().splitlines()]
    assert [one["run"]["gpus"] for one in found] == [16, 16]
    assert not list(tmp_path.rglob("*.safetensors")), "there are no weights"
    for one in found:
        assert one["run"]["parts"], "30 billion parameters with their states are on no single GPU"
        assert max(one["needed_gib"].values()) <= 139.8
