"""The benchmark of asynchrony runs, from a recipe with stages before the one that it measures."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from temper.commands.training import train as training
from temper.config import resolve, to_toml

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.heavy
def test_every_setting_starts_where_the_earlier_stages_ended_and_has_a_curve(
    tiny_recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    import asynchrony

    for stage in tiny_recipe["stage"]:
        stage["steps"] = 2
    recipe, out = tmp_path / "recipe.toml", tmp_path / "curves.svg"
    recipe.write_text(to_toml(resolve(tiny_recipe, [], where="tiny")))
    monkeypatch.setattr(asynchrony, "train", lambda path, folder: training.train(path, run=folder))
    asked = f"{recipe} --staleness 0 1 --place here --set evaluation.every=1 --work {tmp_path / 'runs'} --out {out}"
    monkeypatch.setattr(sys, "argv", ["asynchrony.py", *asked.split()])
    asynchrony.main()
    facts = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith('{"setting"')]
    assert [fact["setting"] for fact in facts] == ["S=0 here", "S=1 here"]
    assert facts[0]["scores"][0] == facts[1]["scores"][0], "both start from the same weights"
    assert all(len(fact["seconds"]) == 3 and fact["seconds"][0] == 0 for fact in facts)
    assert "<svg" in out.read_text()
