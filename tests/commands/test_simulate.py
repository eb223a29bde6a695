"""temper simulate: a recipe's own source on a virtual clock, from a GPU's name, a finished run or given speeds."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from temper.cli import main
from temper.config import resolve, to_toml

SPEEDS = ("--speed", "decode_step=0.1", "--speed", "decode_row=0", "--speed", "train_token=0")


@pytest.fixture
def recipe(tiny_recipe: dict[str, Any], tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(to_toml(resolve(tiny_recipe, [], where="tiny")))
    return path


def simulate(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["temper", "simulate", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


def test_the_stage_is_simulated_with_its_own_settings(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four tokens of 0.1 s, and no time for anything else: a step takes 0.4 s, and nothing overlaps but at S = 1."""
    plot = tmp_path / "simulated.svg"
    speeds = (*SPEEDS, "--speed", "train_step=0.2", "--lengths", "fixed:9", "--steps", "4")
    assert simulate(monkeypatch, recipe, *speeds, "--gpus", "1,3", "--staleness", "0,1", "--json", "--plot", plot) == 0
    runs = json.loads(capsys.readouterr().out)
    assert [(run["gpus"], run["max_staleness"]) for run in runs] == [(1, 0), (1, 1), (3, 0), (3, 1)]
    sync, shared, _, split = runs
    assert sync["seconds_per_step"] == pytest.approx(0.6), "sampling.max_new_tokens = 4"
    assert shared["is_shared"]
    assert not split["is_shared"]
    assert split["seconds_per_step"] == pytest.approx(0.3), "two steps in 0.6 s"
    assert split["stale_max"] == 1
    assert sync["tokens_per_second"] == pytest.approx(4 * 4 * 4 / 0.6), "4 groups of 4"
    assert plot.read_text().startswith("<svg")


def test_a_gpu_stands_for_speeds(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(monkeypatch, recipe, "--gpu", "h200", "--staleness", "0,2", "--steps", "3") == 0
    shown = capsys.readouterr().out
    assert "stage 2: rl, 4 groups of 4 a step" in shown
    assert "decode_step" in shown
    assert "draw+train" in shown


def test_controls_of_the_recipe_act(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tenth of the groups has four tokens in place of one: cut, a step takes less time and more tokens."""
    asked = (*SPEEDS, "--lengths", "groups:1:0.1:4", "--staleness", "0", "--steps", "60", "--json")
    assert simulate(monkeypatch, recipe, *asked) == 0
    (plain,) = json.loads(capsys.readouterr().out)
    keys = ("--set", "stage.2.rollout.order=finished", "--set", 'stage.2.rollout.controls=["tail"]')
    assert simulate(monkeypatch, recipe, *asked, *keys) == 0
    (tail,) = json.loads(capsys.readouterr().out)
    assert tail["seconds_per_step"] < 0.85 * plain["seconds_per_step"]
    assert plain["drawn_per_trained"] == pytest.approx(1.0)
    assert tail["drawn_per_trained"] > 1.05
    assert tail["longest_step"] > plain["longest_step"]
    assert tail["length_ratio"] == pytest.approx(1.0, abs=0.15)


def test_a_recipe_without_a_stage_that_draws_is_refused(
    recipe: Path, tiny_recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_recipe["stage"] = tiny_recipe["stage"][:1]
    recipe.write_text(to_toml(resolve(tiny_recipe, [], where="tiny")))
    assert simulate(monkeypatch, recipe, *SPEEDS) == 2
    assert "no stage that trains on what it draws" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--gpu", "h20"), 'Did you mean "h200"?'),
        (("--gpu", "h200", "--like", "runs/x"), "use one of them"),
        (("--like", "nowhere"), "not a run directory"),
        (("--gpu", "h200", "--gpus", "0"), "use numbers from 1 to 1000"),
        (("--gpu", "h200", "--gpus", "1,x"), "use numbers from 1 to 1000"),
        (("--gpu", "h200", "--gpus", "4", "--trainers", "4"), "at least one must be left to draw"),
        (("--gpu", "h200", "--steps", "-1"), "count 1 or more"),
        (("--gpu", "h200", "--lengths", "normal:3"), "lognormal:MEAN:SPREAD"),
        (("--speed", "decode_step"), "write NAME=SECONDS"),
        ((), "--speed decode_step=..."),
    ],
)
def test_mistakes_are_refused(
    arguments: tuple[str, ...], said: str, recipe: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert simulate(monkeypatch, recipe, *arguments) == 2
    assert said in capsys.readouterr().err
