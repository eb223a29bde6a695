"""An adapter over a model in parts has the gradient of one process, and its parts make the same weights."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from temper.models.lora.low_rank import ADAPTER, is_adapted
from temper.models.lora.wrapping import AdapterSettings, add_adapter
from temper.types import Sample
from tests.trainer.ranks.test_sums import UNEVEN, WHOLE, as_pairs, largest_difference, with_columns

PROGRAM = Path(__file__).with_name("rank_program.py")
NAMES = ("grpo", "dpo", "ppo", "opd")
"""With a reference, which is the model without its adapter; pairs; a critic; a teacher."""
CASES = [(name, budget, "parts") for name in NAMES for budget in (UNEVEN, WHOLE)]
CASES += [("dapo", UNEVEN, "epochs parts"), ("grpo", UNEVEN, "average parts")]


def adapt(model: Any, folder: Path) -> Any:
    """Neither factor is zero: both have gradients from the first step on."""
    adapted = add_adapter(model, AdapterSettings(rank=3), folder)
    torch.manual_seed(3)
    for module in adapted.modules():
        if is_adapted(module):
            torch.nn.init.normal_(module.lora_B[ADAPTER].weight, 0.0, 0.2)
    return adapted


@pytest.mark.heavy
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_with_parts_equal_one_under_an_adapter_and_averaging_is_seen(
    make_model: Callable[..., Any],
    make_rows: Callable[..., list[Sample]],
    run_ranks: Callable[..., None],
    tmp_path: Path,
    world: int,
) -> None:
    rows = {"rows": with_columns(make_rows()), "pairs": as_pairs(make_rows(5, 2, seed=1))}
    cases = [case for case in CASES if (case[1] == UNEVEN) == (world == 4)]
    models = {"policy": adapt(make_model(), tmp_path)}
    (tmp_path / "inputs.pkl").write_bytes(pickle.dumps((models, make_model(seed=1), rows, cases)))
    ranks = [(0, 1), *((rank, world) for rank in range(world))]
    run_ranks(PROGRAM, tmp_path, ranks)
    alone, *together = (torch.load(tmp_path / f"{rank}of{of}.pt") for rank, of in ranks)
    for case in cases:
        gaps = [largest_difference(alone[case], report[case]) for report in together]
        if "average" in case[2]:
            assert min(gaps) > 1e-3, "averaging instead of adding"
        else:
            assert max(gaps) < 1e-10, case
        assert all("lora_" in name for owner, name in alone[case]["moments"] if owner == "policy")
