"""A rank that reads its own rows of a model has the model that is read whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from temper.batching.pack import pack
from temper.models.load import load_model
from temper.models.save import saved_tensors
from temper.trainer.passes.forward import score_drawn
from temper.types import Microbatch, Sample
from tests.fakes.models import make_family_model

PROGRAM = Path(__file__).with_name("read_program.py")
FAMILIES = ("llama", "tied_llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "in other files")
STAYING = ("qwen3_moe",)
"""Models whose experts are not gathered."""
WHOLE = ("in other files",)
"""Directories that have no safetensors, and are read whole."""
DTYPE = torch.float32
"""Files are in float64: rows are rounded when they are read."""


def microbatch() -> Microbatch:
    row = Sample(
        group_id="g",
        index=0,
        token_ids=[3, 1, 4, 1, 5, 9, 2, 6],
        loss_mask=[0, 0, 0, 1, 1, 1, 1, 1],
        behavior_logprobs=[0.0] * 8,
        versions=[-1] * 3 + [0] * 5,
        advantages=[0.0] * 8,
        weights=[0.0] * 8,
    )
    return pack([row], 64)[0]


def write(family: str, folder: Path) -> None:
    if family in WHOLE:
        model: Any = make_family_model("llama")
        model.config.save_pretrained(folder)
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
        model.generation_config.save_pretrained(folder)
        return
    model = make_family_model(family)
    model.generation_config = GenerationConfig(eos_token_id=7)
    model.config._attn_implementation = None
    model.save_pretrained(folder, max_shard_size="20KB" if family == "qwen2" else "1GB")


@pytest.mark.heavy
def test_two_ranks_that_read_their_rows_have_the_whole_model(run_ranks: Callable[..., None], tmp_path: Path) -> None:
    for family in FAMILIES:
        write(family, tmp_path / family)
    assert len(list((tmp_path / "qwen2").glob("*.safetensors"))) > 1, "one is in several files"
    run_ranks(PROGRAM, tmp_path)
    reports = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    for family in FAMILIES:
        model: Any = load_model(tmp_path / family, DTYPE, torch.device("cpu"))
        whole = saved_tensors(model)
        with torch.no_grad():
            said = score_drawn(model, microbatch(), 1.0).logprobs
        for report in reports:
            found = report[family]
            assert found["weights"].keys() == whole.keys()
            assert all(torch.equal(found["weights"][name], tensor) for name, tensor in whole.items())
            assert torch.allclose(found["said"], said, atol=1e-5)
            assert found["end"] == model.generation_config.eos_token_id
        sizes = [report[family]["held"] for report in reports]
        assert sum(sizes) == sum(tensor.numel() for tensor in whole.values())
        assert max(sizes) < 0.6 * sum(sizes)
