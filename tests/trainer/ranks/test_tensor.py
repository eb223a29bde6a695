"""Ranks that compute layers together with slices have the gradient and metrics of one process."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from temper.errors import UserError
from temper.trainer.ranks.tensor import require_slices
from temper.types import Sample
from tests.fakes.models import make_family_model
from tests.trainer.ranks.test_context import NAMES, require_equal
from tests.trainer.ranks.test_sums import UNEVEN, WHOLE, as_pairs, with_columns

PROGRAM = Path(__file__).with_name("slice_program.py")
FAMILIES = ("qwen2", "qwen3", "tied_llama")
"""With biases on queries and keys, with norms of them, with a head that is the embedding."""
FAULTS = ("forgotten", "added", "everyone")
CASES = {
    2: [
        *((name, WHOLE, "together parts sliced") for name in NAMES[::3]),
        *(("grpo", UNEVEN, f"together parts sliced {family}") for family in FAMILIES),
        ("dapo", UNEVEN, "epochs together parts sliced"),
        *(("grpo", UNEVEN, f"{fault} together parts sliced") for fault in FAULTS),
    ],
    4: [
        *((name, UNEVEN, "twos parts sliced") for name in ("grpo", "gspo", "dapo", "dpo", "sft")),
        *(("grpo", UNEVEN, f"twos parts sliced {family}") for family in FAMILIES),
        ("grpo", WHOLE, "twos parts sliced"),
        ("grpo", UNEVEN, "twos parts sliced recomputed"),
        *(("grpo", UNEVEN, f"{fault} twos parts sliced") for fault in FAULTS),
    ],
}
"""Four ranks in groups of two hold half a slice each and gather it; with one microbatch one group has nothing to do."""


@pytest.mark.heavy
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_compute_layers_together_equal_one_and_faults_are_seen(
    make_model: Callable[..., Any],
    make_rows: Callable[..., list[Sample]],
    run_ranks: Callable[..., None],
    tmp_path: Path,
    world: int,
) -> None:
    rows = {"rows": with_columns(make_rows()), "pairs": as_pairs(make_rows(5, 2, seed=1))}
    models = {"policy": make_model(), **{family: make_model(family) for family in FAMILIES}}
    (tmp_path / "inputs.pkl").write_bytes(pickle.dumps((models, make_model(seed=1), rows, CASES[world])))
    require_equal(tmp_path, world, run_ranks, CASES[world], FAULTS)


@pytest.mark.heavy
def test_slices_are_read_and_written_as_one_process_does_it(run_ranks: Callable[..., None], tmp_path: Path) -> None:
    for family in FAMILIES:
        model = make_family_model(family).float()
        model.config._attn_implementation = None
        model.save_pretrained(tmp_path / family)
    run_ranks(PROGRAM, tmp_path, [(rank, 4) for rank in range(4)])
    reports = [torch.load(tmp_path / f"{rank}.pt") for rank in range(4)]
    for family in FAMILIES:
        whole = load_file(tmp_path / family / "model.safetensors")
        assert (tmp_path / f"{family}-written/model.safetensors").read_bytes() == (
            tmp_path / family / "model.safetensors"
        ).read_bytes()
        assert {report[family] for report in reports} == {sum(tensor.numel() for tensor in whole.values()) // 4}
    moments = load_file(tmp_path / "optimizer.safetensors")
    assert all(torch.equal(moments[f"m.{name}"], 2 * tensor) for name, tensor in whole.items())


def test_models_that_cannot_be_sliced_are_refused() -> None:
    model: Any = make_family_model("llama")
    require_slices(model, 2, 4)
    with pytest.raises(UserError, match=r"2 heads of keys do not divide over 4 trainers. Use cluster.tensor = 2, or "):
        require_slices(model, 4, 4)
    with pytest.raises(UserError, match=r"do not divide over 6 trainers. Change cluster.trainers"):
        require_slices(model, 2, 6)
    model.get_decoder().layers[0].mlp.down_proj.bias = nn.Parameter(torch.zeros(1))
    with pytest.raises(UserError, match="add a bias behind a sum"):
        require_slices(model, 2, 2)
    with pytest.raises(UserError, match="this model has experts"):
        require_slices(make_family_model("qwen3_moe"), 2, 2)
