"""Two and four ranks give the gradient and metrics of one, with uneven and with empty shares."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from temper.models.load import prepare
from temper.objectives import DIRECT_LOSSES, POLICY_GRADIENTS, PolicyObjective, resolve
from temper.types import Sample

PROGRAM = Path(__file__).with_name("rank_program.py")


def has_own_step(name: str) -> bool:
    objective = resolve(name)
    return isinstance(objective, PolicyObjective) and objective.step is not None


UNEVEN, WHOLE = 54, 10_000
"""Token budgets: of several microbatches, for four ranks; of a single one, which leaves the second of two nothing."""
NAMES = [*(name for name, preset in POLICY_GRADIENTS.items() if "router" not in preset.needs), *DIRECT_LOSSES]
"""The models here have no routers to read."""
CUT_NAMES = [name for name in NAMES if not has_own_step(name)]
"""Objectives that go through a model whose layers are shared out."""
CASES = [
    *((name, budget, "none") for name in NAMES for budget in (UNEVEN, WHOLE)),
    ("grpo", UNEVEN, "average"),
    *((name, UNEVEN, fault) for name in ("dapo", "ppo") for fault in ("epochs", "epochs parts")),
    *((name, budget, "parts") for name in CUT_NAMES for budget in (UNEVEN, WHOLE)),
    *((name, UNEVEN, "recomputed parts") for name in ("grpo", "ppo", "dpo")),
]
FEW_CASES = [
    ("grpo", WHOLE, "none"), ("grpo", WHOLE, "parts"), ("ppo", WHOLE, "parts"), ("dpo", WHOLE, "parts"),
    ("grpo", WHOLE, "recomputed parts"),
]  # fmt: skip
"""Of two ranks, of which the second has nothing to do."""

Reports = dict[tuple[str, int, str], dict[str, Any]]


Report = Callable[[int, list[Any]], tuple[Reports, list[Reports]]]


@pytest.fixture
def report(
    make_model: Callable[..., Any],
    make_rows: Callable[..., list[Sample]],
    run_ranks: Callable[..., None],
    tmp_path: Path,
) -> Report:
    """What a single process and what each of so many ranks report of every case."""
    return partial(report_of, make_model, make_rows, run_ranks, tmp_path)


def report_of(
    make_model: Callable[..., Any],
    make_rows: Callable[..., list[Sample]],
    run_ranks: Callable[..., None],
    folder: Path,
    world: int,
    cases: list[Any],
) -> tuple[Reports, list[Reports]]:
    pairs = as_pairs(make_rows(5, 2, seed=1))
    sides = {(row.group_id, row.index): read_at_its_end(row) for row in as_pairs(make_rows(6, 2, seed=1))}  # a row each
    rows = {"rows": with_columns(make_rows()), "pairs": pairs, "scores": list(sides.values())}
    models = {"policy": make_model(), "scorer": make_scorer(make_model())}
    (folder / "inputs.pkl").write_bytes(pickle.dumps((models, make_model(seed=1), rows, cases)))
    ranks = [(0, 1), *((rank, world) for rank in range(world))]
    run_ranks(PROGRAM, folder, ranks)
    alone, *together = (torch.load(folder / f"{rank}of{of}.pt") for rank, of in ranks)
    return alone, together


def make_scorer(model: Any) -> Any:
    """A model with a head of one output in place of its own."""
    config = deepcopy(model.config)
    config.num_labels = 1
    torch.manual_seed(2)
    scorer: Any = AutoModelForSequenceClassification.from_config(config, trust_remote_code=False).double().eval()
    scorer.get_decoder().load_state_dict(model.get_decoder().state_dict())
    return prepare(scorer)


def read_at_its_end(row: Sample) -> Sample:
    """As rows of reward models are: read at one place; one of steps is told there whether it was right."""
    mask = [0] * (len(row.loss_mask) - 1) + [1]
    targets = [float(row.index == 0) * read for read in mask]
    return replace(row, loss_mask=mask, targets=targets, behavior_logprobs=[0.0] * len(mask))


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
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_equal_one_and_a_rank_that_averages_is_seen(report: Report, world: int) -> None:
    """All in one test: apart, they would be shared out over processes that each start all ranks."""
    require_equal_to_one(*report(world, [case for case in CASES if (case[1] == UNEVEN) == (world == 4)]))


@pytest.mark.heavy
def test_two_ranks_of_which_one_has_nothing_to_do_equal_one(report: Report) -> None:
    require_equal_to_one(*report(2, FEW_CASES))


def require_equal_to_one(alone: Reports, together: list[Reports]) -> None:
    differing = []
    for case in alone:
        _, budget, fault = case
        gaps = [largest_difference(alone[case], report[case]) for report in together]
        if fault == "average":
            assert min(gaps) > 1e-3, "averaging instead of adding"
            continue
        shares = [report[case]["share"] for report in together]
        assert sum(shares) == alone[case]["share"]
        assert shares[1:] == [0] * (len(shares) - 1) if budget == WHOLE else len(set(shares)) > 1, case
        if "recomputed" in fault:
            assert min(report[case]["recomputed"] for report in together) > 0, "every rank goes over a row, or as if"
        differing += [case for gap in gaps if not gap < 1e-10]
    assert differing == []
