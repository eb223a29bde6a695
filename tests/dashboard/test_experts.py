"""How tokens of every step were spread over experts is kept with the run and shown by layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from temper.commands.training.train import train
from temper.config import resolve, to_toml
from temper.runs.reader import RunReader
from temper.runs.store.run_store import open_run
from temper.types import Batch, StepReport


def report(step: int, loads: dict[int, list[int]]) -> StepReport:
    return StepReport(
        stage=0, step=step, version=step, loss=0.0, metrics={}, seconds={}, system={}, groups_trained=0,
        groups_dropped=0, max_staleness=0, loads=loads,
    )  # fmt: skip


def write(folder: Path, *steps: dict[int, list[int]]) -> Path:
    folder.mkdir(parents=True)
    store = open_run(folder, config="", resume=False)
    store.begin_stage(0, "rl", len(steps))
    for number, loads in enumerate(steps, start=1):
        store.append(report(number, loads), Batch(updates=()))
    store.close()
    return folder


def test_every_step_has_the_load_of_each_expert_at_each_layer(tmp_path: Path, serve: Callable[..., Any]) -> None:
    server = serve(write(tmp_path / "runs" / "sparse", {1: [4, 0, 2], 3: [1, 1, 1]}, {1: [0, 0, 0], 3: [70000, 0, 2]}))
    last = server.get(f"{server.run()}/experts")
    assert (last["stage"], last["step"], last["steps"]) == (0, 2, [[0, 1], [0, 2]])
    assert last["layers"] == [1, 3]
    assert last["tokens"] == [[0, 0, 0], [70000, 0, 2]]
    first = server.get(f"{server.run()}/experts", stage=0, step=1)
    assert first["loads"] == [[2.0, 0.0, 1.0], [1.0, 1.0, 1.0]], "over the mean of the layer"
    absent = server.ask(f"{server.run()}/experts?stage=0&step=9")
    assert absent.status_code == 404
    assert "no experts were counted in step 9 of stage 0" in absent.text


def test_a_dense_model_has_none(tmp_path: Path, serve: Callable[..., Any]) -> None:
    server = serve(write(tmp_path / "runs" / "dense", {}))
    assert server.get(f"{server.run()}/experts") == {"steps": []}


def test_a_run_with_experts_counts_every_drawn_token_once_at_every_layer(
    tiny_recipe: dict[str, Any], tmp_path: Path, serve: Callable[..., Any]
) -> None:
    tiny_recipe["model"] = {"new": {**tiny_recipe["model"]["new"], "experts": 4, "mlp_width": 16}}
    tiny_recipe["stage"] = [{**tiny_recipe["stage"][0], "steps": 2}]
    (tmp_path / "recipe.toml").write_text(to_toml(resolve(tiny_recipe, [], where="tiny")))
    server = serve(train(tmp_path / "recipe.toml", run=tmp_path / "runs" / "tiny"))
    found = server.get(f"{server.run()}/experts")
    assert (found["layers"], len(found["steps"])) == ([0, 1], 2)
    with RunReader(tmp_path / "runs" / "tiny") as reader:
        num_tokens = reader.metric("data/tokens")[-1].value
    assert [sum(layer) for layer in found["tokens"]] == [2 * num_tokens] * 2, "each token meets two experts"
