"""What is sampled when, through the loop with a model: killed and resumed, every draw is in the ledger exactly once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from temper.commands.training import train as training
from temper.errors import UserError
from temper.runs.reader import RunReader
from tests.test_resume import Interrupter, interrupted, write_recipe

STEPS = 4


def flow_recipe(tiny_recipe: dict[str, Any], **rollout: Any) -> dict[str, Any]:
    """One stage whose answers are of 1 to 24 tokens, and whose groups are often all equal."""
    table = {key: tiny_recipe[key] for key in ("name", "model", "train", "reward", "alarms")}
    table["rollout"] = {"groups_per_step": 2, "group_size": 2, "drop_degenerate": True, "max_rounds": 50, **rollout}
    return table | {"sampling": {"max_new_tokens": 24}, "steps": STEPS, "checkpoint": {"every": 1, "keep": 2}}


def killed_and_resumed(recipe: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> RunReader:
    interrupted(recipe, run, Interrupter(0, 3), monkeypatch)  # after its records and before its checkpoint
    training.train(recipe, run=run, resume=True)
    return RunReader(run)


def require_whole_ledger(reader: RunReader, *, most_missing: int) -> None:
    entries = reader.ledger()
    draws = [entry.draw for entry in entries]
    assert len(draws) == len(set(draws)), "a draw was consumed twice"
    assert len(set(range(max(draws) + 1)) - set(draws)) <= most_missing, "a draw was lost"
    assert sum(entry.outcome == "trained" for entry in entries) == 2 * STEPS


@pytest.mark.parametrize("order", ["finished", pytest.param("draw", marks=pytest.mark.heavy)])
def test_groups_in_the_order_of_finishing_are_each_in_the_ledger_once(
    order: str, tiny_recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = write_recipe(tmp_path, flow_recipe(tiny_recipe, order=order, max_staleness=2))
    with killed_and_resumed(recipe, tmp_path / "run", monkeypatch) as reader:
        require_whole_ledger(reader, most_missing=6 if order == "finished" else 0)
        assert max(step.max_staleness for step in reader.steps()) <= 2
        assert bool(reader.metric("flow/overtaken")) == (order == "finished")


CONTROLS: dict[str, tuple[dict[str, Any], int, str]] = {
    "oversample": (
        {"order": "finished", "controls": [{"name": "oversample", "factor": 1.5, "patience": 2}]}, 3, "flow/cut",
    ),
    "tail": (
        {"order": "finished", "controls": [{"name": "tail", "quantile": 0.2, "window": 4, "patience": 2}]}, 4,
        "flow/cut",
    ),
    "concurrency": (
        {"max_staleness": 2, "controls": [{"name": "concurrency", "kv_use": 0.001}]}, 0, "flow/running_limit_change",
    ),
    "partial": (
        {"max_staleness": 2, "order": "finished", "controls": ["partial", {"name": "oversample", "factor": 2.0}]}, 4,
        "flow/interrupted",
    ),
}  # fmt: skip
"""By name: the table [rollout], how many draws may be under way or put off at the end, a metric that must move."""


@pytest.mark.heavy
@pytest.mark.parametrize("name", CONTROLS)
def test_a_control_loses_nobody_over_a_kill(
    name: str, tiny_recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout, most_missing, metric = CONTROLS[name]
    recipe = write_recipe(tmp_path, flow_recipe(tiny_recipe, **rollout))
    with killed_and_resumed(recipe, tmp_path / "run", monkeypatch) as reader:
        require_whole_ledger(reader, most_missing=most_missing)
        assert max(step.max_staleness for step in reader.steps()) <= rollout.get("max_staleness", 0)
        assert any(point.value for point in reader.metric(metric)), "it did nothing: the test proves nothing"


def test_a_synchronous_step_cannot_take_the_first_that_finish(tiny_recipe: dict[str, Any], tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, flow_recipe(tiny_recipe, order="finished"))
    with pytest.raises(UserError, match=r"max_staleness=0.*nobody can be overtaken. Use max_staleness = 1"):
        training.train(recipe, run=tmp_path / "run")
