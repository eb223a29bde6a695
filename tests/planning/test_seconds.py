"""Estimates are within a third of what an H200 took, and change with what they depend on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from temper.planning.gpus import GPUS
from temper.planning.seconds import TimePlan, plan_seconds
from temper.planning.workload import AdapterShape, Workload

Make = Callable[..., Workload]


@pytest.fixture
def plan(make_workload: Make) -> Callable[..., TimePlan]:
    return lambda *arguments, **options: plan_seconds(make_workload(*arguments, **options), GPUS["h200"])


@pytest.mark.parametrize(
    ("arguments", "options", "part", "seen"),
    [
        (("1.5b",), {}, "decoding", 1.96),
        (("1.5b",), {}, "forward and backward", 2.81),
        (("7b", 512, 16384, "8bit"), {"recomputes": True}, "decoding", 4.7),
        (("7b", 512, 16384, "8bit"), {"recomputes": True}, "forward and backward", 11.9),
        (("1.5b", 512, 16384, "8bit"), {}, "update", 0.042),
        (
            ("7b",),
            {"recomputes": True, "adapter": AdapterShape(rank=32), "engine": "copied"},
            "forward and backward",
            11.0,
        ),
        (("7b",), {"offload": True}, "update", 1.61),
    ],
)
def test_parts_are_near_what_was_measured(
    arguments: Any, options: Any, part: str, seen: float, plan: Callable[..., TimePlan]
) -> None:
    assert plan(*arguments, **options).seconds[part] == pytest.approx(seen, rel=0.33)


def test_what_costs_more_takes_longer(plan: Callable[..., TimePlan], make_workload: Make) -> None:
    plain, recomputed = plan("7b"), plan("7b", recomputes=True)
    ratio = recomputed.seconds["forward and backward"] / plain.seconds["forward and backward"]
    assert ratio == pytest.approx(4 / 3, rel=0.05)
    assert plan("7b", new=1024).seconds["decoding"] > 2 * plain.seconds["decoding"]
    work = make_workload("7b")
    slow = plan_seconds(work, GPUS["a100-80"])
    assert slow.seconds["forward and backward"] == pytest.approx(989 / 312 * plain.seconds["forward and backward"])
    few = replace(work, choice=replace(work.choice, kv_tokens=work.choice.kv_tokens // 8))
    assert plan_seconds(few, GPUS["h200"]).seconds["decoding"] > 2 * plain.seconds["decoding"]


def test_a_stage_that_only_reads_draws_nothing(make_workload: Make) -> None:
    plan = plan_seconds(replace(make_workload("1.5b"), rolls=False), GPUS["h200"])
    assert plan.seconds.keys() == {"forward and backward", "update"}
    assert plan.slowest == "forward and backward"
    assert plan.total == pytest.approx(sum(plan.seconds.values()))
