"""`temper init`: what it writes trains, and learns, from wherever it is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from temper.commands.init import FILES, init
from temper.commands.training.preflight import dry_run
from temper.commands.training.train import train
from temper.errors import UserError
from temper.runs.reader import RunReader


@pytest.mark.heavy
def test_the_starter_recipe_learns_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert [path.name for path in init(Path("mine"))] == list(FILES)
    assert len((tmp_path / "mine/train.jsonl").read_text().splitlines()) == 5
    assert "reward of gold answers   mean 1" in dry_run(Path("mine/recipe.toml"))
    with RunReader(train(Path("mine/recipe.toml"))) as reader:
        rewards = [point.value or 0.0 for point in reader.metric("reward/mean")]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("mine")
    with pytest.raises(UserError, match=r"already has reward\.py"):
        init(tmp_path)
    assert (tmp_path / "reward.py").read_text() == "mine"
    assert not (tmp_path / "recipe.toml").exists()


def test_every_row_is_what_the_recipe_says(tmp_path: Path) -> None:
    for line in init(tmp_path)[2].read_text().splitlines():
        row = json.loads(line)
        assert row["answer"] == row["prompt"][::-1]
