"""Reward and held-out verifier are drawn over KL, and only what has parted is called so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from temper.commands.training.train import train_stages
from temper.config import resolve
from temper.errors import UserError
from temper.runs.report.overoptimization import ProxyPoint, describe_points, draw_points, proxy_points

POINT = ProxyPoint(stage=0, step=0, proxy=0.2, gold=0.2, low=0.15, high=0.25, distance=0.0)


def at(step: int, proxy: float, gold: float, distance: float | None) -> ProxyPoint:
    return replace(POINT, step=step, proxy=proxy, gold=gold, low=gold - 0.05, high=gold + 0.05, distance=distance)


def test_a_verifier_that_falls_while_the_reward_rises_is_over_optimisation() -> None:
    said = describe_points([POINT, at(5, 0.5, 0.4, 1.0), at(9, 0.9, 0.1, 9.0)])
    assert said.startswith("over-optimised: after step 5 the training reward rose by 0.400 to 0.900")
    assert "fell from 0.400 to 0.100" in said


@pytest.mark.parametrize(
    "last", [at(9, 0.9, 0.38, 9.0), at(9, 0.4, 0.1, 9.0)], ids=["inside the interval", "both fell"]
)
def test_noise_and_a_plain_collapse_are_not_called_so(last: ProxyPoint) -> None:
    assert "they have not parted" in describe_points([POINT, at(5, 0.5, 0.4, 1.0), last])


def test_the_picture_is_over_kl_where_every_point_has_one() -> None:
    points = [POINT, at(5, 0.5, 0.4, 1.0), at(9, 0.9, 0.1, 9.0)]
    assert "square root of KL" in draw_points(points)
    assert "square root of KL" not in draw_points([*points, at(12, 0.9, 0.1, None)])


@pytest.mark.parametrize("has_verifier", [True, False])
def test_points_come_from_a_run(has_verifier: bool, tiny_recipe: dict[str, Any], tmp_path: Path) -> None:
    stage = {**tiny_recipe["stage"][1], "steps": 4, "evaluation": {"every": 2}}
    stage["objective"] = {"preset": "grpo", "regularizers": [{"name": "kl", "coefficient": 0.01}]}
    if has_verifier:
        stage["evaluation"]["reward"] = [{"kind": "exact"}]
    stages = resolve({**tiny_recipe, "stage": [stage]}, [], where="tiny")
    run = train_stages(stages, run=tmp_path / "run")
    if not has_verifier:
        with pytest.raises(UserError, match=r"\[\[evaluation.reward\]\]"):
            proxy_points(run)
        return
    points = proxy_points(run)
    assert [point.step for point in points] == [0, 2, 4]
    assert points[0].distance == 0.0
    assert all(point.distance is not None for point in points)
    assert any(point.proxy != point.gold for point in points)
