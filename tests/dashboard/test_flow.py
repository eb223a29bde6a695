"""What controls did is on the page of the system: every number of it, in a chart of its unit."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from temper.commands.training.train import train
from temper.config import resolve, to_toml
from temper.runs.metrics import METRICS

SCRIPT = Path(__file__).parents[2] / "temper" / "dashboard" / "static" / "systems.js"
FLOW = {metric.name: metric.unit for metric in METRICS if metric.name.startswith("flow/")}


def test_every_number_of_flow_has_one_chart_whose_axis_is_its_unit() -> None:
    charts = [
        (unit, re.compile(names)) for unit, names in re.findall(r'y: "([^"]+)",\s+names: /(.+)/,', SCRIPT.read_text())
    ]
    assert len(charts) > 10
    for name, unit in FLOW.items():
        assert [own for own, names in charts if names.search(name)] == [unit], name


@pytest.mark.parametrize(
    ("rollout", "shown"),
    [
        (
            {"max_staleness": 0, "order": "finished", "controls": [{"name": "tail", "window": 8, "quantile": 0.5}]},
            {"cut", "put_off", "late_step", "tail_limit", "overtaken", "length_ratio"},
        ),
        (
            {"max_staleness": 2, "order": "finished", "controls": ["partial", "concurrency", "oversample"]},
            {"interrupted", "prefilled_again", "running_limit", "running_limit_change", "lead_limit", "overtaken",
             "length_ratio"},
        ),
        ({}, set()),
    ],
)  # fmt: skip
def test_the_systems_page_has_what_the_controls_of_a_run_did(
    rollout: dict[str, Any], shown: set[str], tiny_recipe: dict[str, Any], tmp_path: Path, serve: Callable[..., Any]
) -> None:
    tiny_recipe["stage"][1]["rollout"] |= rollout
    tiny_recipe["stage"][1] |= {"steps": 4, "objective": {"corrections": ["token_tis"]}}
    (tmp_path / "recipe.toml").write_text(to_toml(resolve(tiny_recipe, [], where="tiny")))
    server = serve(train(tmp_path / "recipe.toml", run=tmp_path / "runs" / "tiny"))
    systems = server.get(f"{server.run()}/systems")
    found = {name for name in systems["series"] if name.startswith("flow/")}
    assert found == {f"flow/{name}" for name in shown}
    assert {name: systems["units"][name] for name in found} == {name: FLOW[name] for name in found}
    for name in found - {"flow/tail_limit"}:  # which only short steps have
        assert systems["series"][name][0]["steps"] == [1, 2, 3, 4], name
