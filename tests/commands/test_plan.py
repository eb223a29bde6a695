"""temper plan: a table for every stage, chosen values, refusals that say what to do, all without weights."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from temper.cli import main
from temper.config import resolve, to_toml


@pytest.fixture
def recipe(tiny_recipe: dict[str, Any], tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(to_toml(resolve(tiny_recipe, [], where="tiny")))
    return path


def plan(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["temper", "plan", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


def test_every_stage_has_its_table_of_bytes_and_seconds(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(monkeypatch, recipe, "--gpu", "4090", "--set", "optim.states=8bit") == 0
    shown = capsys.readouterr().out
    assert "stage 1: sft, on 4090 (23.5 GiB)" in shown
    assert "stage 2: rl, on 4090 (23.5 GiB)" in shown
    for part in ("weights", "KV cache", "optimiser states", "gradients", "activations", "graphs", "together"):
        assert part in shown
    assert "decoding" in shown
    assert "dominates" in shown
    assert "trainer.tokens_per_microbatch = 65536 (chosen)" in shown
    assert 'optim.states = "8bit",' in shown or 'optim.states = "8bit"\n' in shown, "given values are not marked"


def test_what_cannot_fit_is_refused_with_the_change_that_helps(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A cache of a billion tokens on a GPU of 15 GiB."""
    assert plan(monkeypatch, recipe, "--gpu", "t4", "--set", "engine.kv_tokens=1000000000") == 2
    said = capsys.readouterr().err
    assert "stage 2 (rl): this needs" in said
    assert "KV cache" in said
    assert "engine.kv_tokens = " in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--gpu", "h20"), 'Did you mean "h200"?'),
        (("--gpu", "h200", "--gpus", "2"), "Temper trains on one GPU today"),
        (("--gpu", "h200", "--set", "trainer.tokens_per_microbatch=3"), "a whole number of at least 16"),
    ],
)
def test_mistakes_are_refused(
    arguments: tuple[str, ...], said: str, recipe: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert plan(monkeypatch, recipe, *arguments) == 2
    assert said in capsys.readouterr().err


def test_without_a_gpu_one_must_be_named(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert plan(monkeypatch, recipe) == 2
    assert "Name one with --gpu" in capsys.readouterr().err
