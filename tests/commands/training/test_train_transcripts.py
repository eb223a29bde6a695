"""`rollout.transcripts_gb`: what a training keeps of what its rollouts said."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from temper.commands.training.train import train
from temper.config import resolve, to_toml
from temper.runs.reader import RunReader


@pytest.mark.parametrize(("limit", "steps_kept"), [("0", {3}), ("inf", {1, 2, 3})])
def test_a_training_keeps_the_newest_transcripts_and_all_of_the_ledger(
    tiny_recipe: dict[str, Any], tmp_path: Path, limit: str, steps_kept: set[int]
) -> None:
    recipe = copy.deepcopy(tiny_recipe)
    del recipe["heldout"]
    recipe["stage"] = [{**recipe["stage"][1], "steps": 3, "evaluation": {"every": 0}}]
    path = tmp_path / "recipe.toml"
    path.write_text(to_toml(resolve(recipe, [f"rollout.transcripts_gb={limit}"], where="test")))
    run = train(path, run=tmp_path / "run")
    with RunReader(run) as reader:
        rollouts = {step: reader.trajectories(0, step) for step in (1, 2, 3)}
        assert {step for step, found in rollouts.items() if found[0].text is not None} == steps_kept
        assert {step for step, found in rollouts.items() if found[0].rows} == steps_kept
        assert all(rollout.num_tokens for found in rollouts.values() for rollout in found)
        trained = [entry for entry in reader.ledger() if entry.outcome == "trained"]
        assert {entry.step for entry in trained} == {1, 2, 3}
