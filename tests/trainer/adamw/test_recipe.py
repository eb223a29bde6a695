"""From the command line to the bytes of a checkpoint: each key of a recipe reaches the optimiser."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from temper.build.models import optimizer_settings
from temper.cli import main
from temper.config import resolve, to_toml
from temper.trainer.adamw.files import read_tensors
from temper.trainer.adamw.residence import Residence

HELD = {
    "float32": {torch.float32},
    "bfloat16": {torch.float32, torch.bfloat16},
    "8bit": {torch.float32, torch.int8, torch.uint8},
}


def temper(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["temper", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


@pytest.fixture
def recipe(tiny_recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two steps of imitation of a model with matrices of 4096 values."""
    monkeypatch.chdir(tmp_path)
    tiny_recipe["stage"] = [{**tiny_recipe["stage"][0], "steps": 2}]
    tiny_recipe["model"]["new"]["mlp_width"] = 128
    path = tmp_path / "r.toml"
    path.write_text(to_toml(resolve(tiny_recipe, [], where="tiny")))
    return path


@pytest.mark.parametrize("states", HELD)
def test_a_checkpoint_holds_moments_as_the_command_said(
    recipe: Path, tmp_path: Path, states: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    offloads = []
    make = Residence.__init__

    def note(self: Residence, sizes: Any, parts: Any, device: torch.device, offload: bool) -> None:
        offloads.append(offload)
        make(self, sizes, parts, device, offload)

    monkeypatch.setattr(Residence, "__init__", note)
    offload = states == "8bit"
    keys = (f"optim.states={states}", f"optim.offload={str(offload).lower()}")
    assert temper(monkeypatch, "train", recipe, *(part for key in keys for part in ("--set", key))) == 0
    (folder,) = (tmp_path / "runs").glob("tiny/checkpoints/*/step-2/trainer")
    tensors = read_tensors(folder, "optimizer")
    assert {tensors[name].dtype for name in tensors} == HELD[states]
    assert set(offloads) == {offload}


def test_rounding_follows_the_seed_of_the_run(tiny_recipe: dict[str, Any]) -> None:
    config = resolve({**tiny_recipe, "seed": 7}, [], where="tiny")[0]
    assert optimizer_settings(config, 0.1).noise_seed == 7
