"""Models with experts, cut over ranks, have the gradient of one process."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from temper.errors import UserError
from temper.models.experts.balance import BalanceSettings, set_balance, set_bias_rate
from temper.models.experts.routes import set_replaying
from temper.trainer.ranks.experts import experts_of_rank
from temper.types import Sample
from tests.fakes.models import make_family_model
from tests.trainer.ranks.test_sums import UNEVEN, WHOLE, largest_difference, with_columns

PROGRAM = Path(__file__).with_name("rank_program.py")
FAMILIES = ("qwen3_moe", "qwen2_moe")
CASES = [
    ("grpo", "parts qwen3_moe"),
    ("grpo", "parts qwen3_moe routed"),
    ("grpo", "parts balanced routed"),
    ("gspo", "parts qwen2_moe"),
    ("rspo", "parts qwen3_moe"),
    ("dapo", "epochs parts balanced"),
    ("grpo", "average parts qwen3_moe"),
    ("grpo", "apart parts qwen3_moe"),
    ("grpo", "apart parts balanced routed"),
    ("gspo", "apart parts qwen2_moe"),
    ("rspo", "apart parts qwen3_moe"),
    ("dapo", "apart epochs parts qwen3_moe crowded"),
    ("grpo", "average apart parts qwen3_moe"),
    ("grpo", "swapped apart parts qwen3_moe"),
    ("grpo", "biased"),
    ("grpo", "parts biased routed"),
    ("dapo", "epochs parts biased crowded"),
    ("grpo", "apart parts biased"),
    ("dapo", "apart epochs parts biased routed"),
    ("grpo", "swapped apart parts biased"),
]


def make_experts(family: str) -> Any:
    model = make_family_model(family)
    set_replaying(model, True)
    return model


def make_balanced() -> Any:
    model = make_experts("qwen3_moe")
    set_balance(model, BalanceSettings(balance=0.1, z=0.05))
    return model


def make_biased() -> Any:
    model = make_experts("glm4_moe")
    set_bias_rate(model, 0.05)
    return model


def with_routes(rows: list[Sample], used: int) -> list[Sample]:
    """Experts of every token but the last, in two layers, as a sampler might have told them: the first `used`."""
    draw = random.Random(5)

    def routes(row: Sample) -> list[list[int]]:
        known = [[*draw.sample(range(used), 2), *draw.sample(range(used), 2)] for _ in row.token_ids[1:]]
        return [*known, []]

    return [replace(row, routes=routes(row)) for row in rows]


def test_experts_are_shared_out_in_order_and_a_number_that_does_not_divide_is_refused() -> None:
    assert [experts_of_rank(8, rank, 4) for rank in range(4)] == [slice(start, start + 2) for start in (0, 2, 4, 6)]
    with pytest.raises(UserError, match=r"8 experts do not divide over 3 trainers. Use cluster.trainers = 2, 4, 8, or"):
        experts_of_rank(8, 0, 3)


@pytest.mark.heavy
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_share_out_experts_equal_one_and_faults_are_seen(
    make_model: Callable[..., Any],
    make_rows: Callable[..., list[Sample]],
    run_ranks: Callable[..., None],
    tmp_path: Path,
    world: int,
) -> None:
    rows = with_columns(make_rows())
    models = {family: make_experts(family) for family in FAMILIES}
    models |= {"balanced": make_balanced(), "biased": make_biased()}
    inputs = models, make_model(seed=1), {"rows": rows, "routed": with_routes(rows, 8), "crowded": with_routes(rows, 2)}
    cases = [(name, UNEVEN if world == 4 else WHOLE, how) for name, how in CASES]
    (tmp_path / "inputs.pkl").write_bytes(pickle.dumps((*inputs, cases)))
    ranks = [(0, 1), *((rank, world) for rank in range(world))]
    run_ranks(PROGRAM, tmp_path, ranks)
    alone, *together = (torch.load(tmp_path / f"{rank}of{of}.pt") for rank, of in ranks)
    assert any("route/moved_frac" in metrics for metrics in alone[cases[1]]["metrics"])
    assert all(metrics["loss/balance"] > 0 for metrics in alone[cases[2]]["metrics"])
    for case in cases:
        gaps = [largest_difference(alone[case], report[case]) for report in together]
        assert any("experts" in name for _, name in alone[case]["moments"])
        biases = [moment for (_, name), moment in alone[case]["moments"].items() if name.endswith("correction_bias")]
        assert len(biases) == (2 if "biased" in case[2] else 0)
        assert all(bias.abs().max() >= 0.1 - 1e-9 for bias in biases), "twice and more the same way"
        if "average" in case[2] or "swapped" in case[2]:
            assert min(gaps) > 1e-3, case
        else:
            assert max(gaps) < 1e-10, case
