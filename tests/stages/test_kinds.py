"""A kind of stage is one record: all that a new one needs is a record in the table."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from temper.cli.console import app
from temper.commands.find import find_model
from temper.commands.training.train import train_stages
from temper.config import resolve
from temper.objectives import PRESETS
from temper.objectives.losses.table import LOSSES
from temper.protocols import BatchSource
from temper.runs.reader import RunReader
from temper.stages import sft
from temper.stages.kind import StageKind
from temper.stages.kinds import KINDS, kinds_for
from temper.stages.parts import Parts
from temper.types import Batch

ROOT = Path(__file__).parents[2] / "temper"


class Reversed:
    """The examples of supervised training, the last one first: a source that no other kind has."""

    def __init__(self, source: BatchSource) -> None:
        self._source = source

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    async def take(self, step: int) -> Batch:
        batch = await self._source.take(step)
        return replace(batch, updates=tuple(update[::-1] for update in batch.updates), metrics={"data/reversed": 1.0})


def reversed_source(parts: Parts) -> BatchSource:
    return Reversed(sft.examples_of(parts))  # type: ignore[return-value]  # by __getattr__


TOY = StageKind(
    name="toy",
    preset="sft",
    losses=("likelihood",),
    reading=sft.KIND.reading,
    make_source=reversed_source,
    make_rows=sft.KIND.make_rows,
    describe=lambda config, objective, data: {"toy": "reads backwards"},
    writers=lambda parts, source: {"toy file": lambda folder: (folder / "toy.txt").write_text("left") and None},
)


def test_a_seventh_kind_is_a_record_and_a_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_recipe: dict[str, Any]
) -> None:
    """Trained before RL by the same commands as all others, found by a later stage, shown by a dry run."""
    monkeypatch.setitem(KINDS, "toy", TOY)
    first, second = tiny_recipe["stage"]
    tiny_recipe["stage"] = [
        {**first, "kind": "toy", "steps": 2},
        {**second, "steps": 1, "model": {"path": "stage:toy"}, "alarms": {"readiness": "off"}},
    ]
    run = train_stages(resolve(tiny_recipe, [], where="toy"), run=tmp_path / "run")
    with RunReader(run) as reader:
        assert reader.is_finished
        assert [(point.stage, point.value) for point in reader.metric("data/reversed")] == [(0, 1.0), (0, 1.0)]
        assert [step.stage for step in reader.steps()] == [0, 0, 1]
    assert (run / "checkpoints" / "0-toy" / "step-2" / "toy.txt").read_text() == "left"
    assert find_model(run).parent.name == "1-rl"
    recipe = tmp_path / "recipe.toml"
    recipe.write_text((run / "config.toml").read_text())
    shown = CliRunner().invoke(app, ["train", str(recipe), "--dry-run"])
    assert "stage 1: toy, 2 steps" in shown.output, shown.output
    assert "reads backwards" in shown.output


def test_nobody_asks_a_stage_for_its_name() -> None:
    """Comparisons of a stage's name with a text, anywhere in the package: a field of StageKind is missing."""
    found = []
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Compare):
                continue
            sides = [node.left, *node.comparators]
            asks = any(isinstance(side, ast.Attribute) and side.attr in ("stage", "kind") for side in sides)
            texts = {leaf.value for side in sides for leaf in ast.walk(side) if isinstance(leaf, ast.Constant)}
            if asks and texts & KINDS.keys():
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert found == []


def test_every_loss_has_a_kind_that_trains_with_it_and_every_kind_has_a_preset_it_may_train_with() -> None:
    allowed = {loss for kind in KINDS.values() for loss in kind.losses}
    assert allowed == {None, *LOSSES}
    for kind in KINDS.values():
        assert kind.name in kinds_for(kind.preset) or not kind.trains
    assert kinds_for("sft") == ["sft"]
    assert kinds_for("online_dpo") == ["preference"]
    assert kinds_for("process_reward_model") == ["reward_model"]
    assert kinds_for("opd_direct") == ["distill"]
    assert kinds_for("grpo") == ["rl", "distill"]
    assert all(kinds_for(name) for name in PRESETS)


def test_what_a_kind_leaves_is_where_it_says(tmp_path: Path) -> None:
    assert {kind.name for kind in KINDS.values() if kind.leaves != "policy"} == {"rejection", "reward_model"}
    assert KINDS["rejection"].output(tmp_path) == tmp_path / "kept.jsonl"
    assert KINDS["rl"].output(tmp_path) == tmp_path
