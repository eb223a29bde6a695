"""Two ranks give the gradient and metrics of one, with uneven and with empty shares."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from temper.objectives import POLICY_GRADIENTS, PolicyObjective, resolve
from temper.types import Sample

PROGRAM = Path(__file__).with_name("rank_program.py")


def has_own_step(name: str) -> bool:
    objective = resolve(name)
    return isinstance(objective, PolicyObjective) and objective.step is not None


UNEVEN, WHOLE = 54, 10_000
"""Token budgets: of several microbatches, and of a single one, which leaves the second rank nothing."""
LOSSES = ("sft", "dpo", "beta_dpo", "kto", "nash_md", "gkd", "opd_top_k")
"""One of each way to read a batch; the other rules on pairs differ from dpo within a pair only."""
NAMES = [*(name for name, preset in POLICY_GRADIENTS.items() if "router" not in preset.needs), *LOSSES]
"""Experts are not multiplied in float64."""
CUT_NAMES = [
    name for name in NAMES if not {"values", "divergence"} & set(resolve(name).needs) and not has_own_step(name)
]
"""Objectives that go through a model whose layers are shared out."""
CASES = [
    *((name, budget, "none") for name in NAMES for budget in (UNEVEN, WHOLE)),
    ("grpo", UNEVEN, "average"),
    ("dapo", UNEVEN, "epochs"),
    ("ppo", UNEVEN, "epochs"),
    *((name, budget, "parts") for name in CUT_NAMES for budget in (UNEVEN, WHOLE)),
]

Reports = dict[tuple[str, int, str], dict[str, Any]]


@pytest.fixture(scope="module")
def reports(
    make_model: Callable[..., Any],
    make_rows: Callable[..., list[Sample]],
    run_ranks: Callable[..., None],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Reports, list[Reports]]:
    """What a single process and what each of two ranks report of every case."""
    folder = tmp_path_factory.mktemp("ranks")
    inputs = make_model(), make_model(seed=1), with_columns(make_rows()), as_pairs(make_rows(5, 2, seed=1)), CASES
    (folder / "inputs.pkl").write_bytes(pickle.dumps(inputs))
    run_ranks(PROGRAM, folder, ((0, 1), (0, 2), (1, 2)))
    alone, *together = (torch.load(folder / name) for name in ("0of1.pt", "0of2.pt", "1of2.pt"))
    return alone, together


def with_columns(rows: list[Sample]) -> list[Sample]:
    """The rows with every column that an objective may read, near enough to the policy for bounds to act on a part."""
    draw = random.Random(3)

    def near(row: Sample, middle: float, width: float) -> list[float]:
        return [draw.uniform(middle - width, middle + width) * drawn for drawn in row.loss_mask]

    filled = []
    for row in rows:
        tops = [draw.sample(range(40), 20) if drawn else [] for drawn in row.loss_mask]
        change: dict[str, Any] = {name: near(row, -3.7, 0.4) for name in ("reference_logprobs", "teacher_logprobs")}
        change |= {"values": near(row, 0.3, 0.2), "targets": near(row, 0.5, 0.5), "reward": float(row.index == 0)}
        change |= {"top_ids": tops, "top_logprobs": [[draw.uniform(-4.5, -3.2) for _ in top] for top in tops]}
        filled.append(replace(row, behavior_logprobs=near(row, -3.7, 0.4), **change))
    return filled


def as_pairs(rows: list[Sample]) -> list[Sample]:
    """What losses read: a chosen and a rejected side, of the policy and of the reference, one baseline for all."""
    return [
        replace(
            row,
            reward=1.0 - row.index,
            versions=row.versions if row.index == 0 else [-1] * len(row.versions),
            advantages=[0.3 * drawn for drawn in row.loss_mask],
        )
        for row in rows
    ]


def largest_difference(first: dict[str, Any], second: dict[str, Any]) -> float:
    """Largest difference of moments after two steps (linear in both gradients), over the largest; and of metrics."""
    scale = max((moment.abs().max().item() for moment in first["moments"].values()), default=0.0) or 1.0
    by_moment = max(
        ((first["moments"][name] - second["moments"][name]).abs().max().item() / scale for name in first["moments"]),
        default=0.0,
    )
    by_metric = [
        abs(ours[name] - theirs[name]) / max(1.0, abs(ours[name]))
        for ours, theirs in zip(first["metrics"], second["metrics"], strict=True)
        for name in ours.keys() | theirs.keys()
    ]
    return max(by_moment, *by_metric)


@pytest.mark.heavy  # tests/batching has the gradient of every preset on two and four ranks; this, all of the trainer
def test_two_ranks_equal_one_and_a_rank_that_averages_is_seen(reports: tuple[Reports, list[Reports]]) -> None:
    """All in one test: apart, they would be shared out over processes that each start all ranks."""
    alone, together = reports
    differing = []
    for case in CASES:
        _, budget, fault = case
        gaps = [largest_difference(alone[case], report[case]) for report in together]
        if fault == "average":
            assert min(gaps) > 1e-3, "averaging instead of adding"
            continue
        shares = [report[case]["share"] for report in together]
        assert sum(shares) == alone[case]["share"]
        assert shares == [1, 0] if budget == WHOLE else shares[0] != shares[1]
        differing += [case for gap in gaps if not gap < 1e-10]
    assert differing == []
