"""A decode step of few rows against the walk of many tokens: the same states, keys and values."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from temper.engine.local.attention import GpuAttend, PagedCache
from temper.models.decode_step.step import DecodeStep, RowPlaces, can_step, has_room
from temper.models.decoder import lay_end_to_end, set_numerics, walk
from temper.models.float8.layers import float8_copy
from temper.models.load import prepare

pytest.importorskip("triton", reason="needs triton: pip install triton")
pytestmark = [
    pytest.mark.usefixtures("triton_interpreter"),
    pytest.mark.skipif(
        not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1",
        reason="without a GPU the kernels need TRITON_INTERPRET=1 before triton is imported",
    ),
]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {"head_dim": 32, **EXPERTS},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 48},
}
BLOCKS, BLOCK_SIZE = 8, 8


def make_model(family: str, dtype: torch.dtype = torch.bfloat16, **more: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family, hidden_size=96, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64, max_position_embeddings=64, **{**FAMILIES.get(family, {}), **more},
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for name, parameter in model.named_parameters():
        if "bias" in name or "norm" in name:
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    model = prepare(model.to(DEVICE))
    lay_end_to_end(model)
    return model


def make_cache(model: Any, rows: int) -> PagedCache:
    config = model.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache = PagedCache(
        num_layers=2, num_blocks=rows * BLOCKS, block_size=BLOCK_SIZE, num_kv_heads=2, head_dim=size,
        dtype=torch.bfloat16, device=DEVICE,
    )  # fmt: skip
    torch.manual_seed(1)
    for layer in (0, 1):
        for tensor in cache.layer(layer):
            tensor.copy_(torch.randn(tensor.shape))
    return cache


@torch.inference_mode()
def both(model: Any, rows: int, splits: int = 2) -> list[tuple[Tensor, Tensor]]:
    """(states, keys and values of all layers) by the walk, then by the step."""
    positions = torch.arange(rows, device=DEVICE) * 7 % (BLOCKS * BLOCK_SIZE)
    blocks = torch.arange(rows * BLOCKS, device=DEVICE).view(rows, BLOCKS)
    tokens = torch.arange(rows, device=DEVICE) + 1
    slots = blocks.gather(1, (positions // BLOCK_SIZE).unsqueeze(1)).squeeze(1) * BLOCK_SIZE + positions % BLOCK_SIZE
    found = []
    for is_step in (False, True):
        cache = make_cache(model, rows)
        if is_step:
            step = DecodeStep(model, cache.layer, BLOCKS * BLOCK_SIZE)
            states = step.states(tokens, RowPlaces(positions, blocks, splits))
        else:
            attend = GpuAttend(
                cache=cache, slots_T=slots, blocks_NM=blocks, positions_N=positions,
                query_starts=torch.arange(rows + 1, device=DEVICE), longest_query=1, splits=splits,
            )  # fmt: skip
            states = walk(model, tokens, positions, attend)
        held = torch.stack([tensor.float() for layer in (0, 1) for tensor in cache.layer(layer)])
        found.append((states.float(), held))
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_is_the_walk_of_one_token_a_row(family: str) -> None:
    (walked, held), (stepped, stored) = both(make_model(family), 5)
    assert (stepped - walked).norm() < 0.02 * walked.norm()
    assert (stored - held).abs().max() < 0.05
    assert (walked.roll(1, 0) - walked).norm() > 0.5 * walked.norm(), "rows are not each other"


@pytest.mark.parametrize(("rows", "splits"), [(1, 1), (33, 1)])
def test_a_step_may_have_one_row_or_many(rows: int, splits: int) -> None:
    (walked, held), (stepped, stored) = both(make_model("qwen2"), rows, splits)
    assert (stepped - walked).norm() < 0.02 * walked.norm()
    assert (stored - held).abs().max() < 0.05


@pytest.mark.parametrize(("kib", "fits"), [(228, True), (164, False), (100, False)])
def test_only_gpus_whose_shared_memory_holds_the_tiles_go_this_way(
    kib: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An H200, an A100, an RTX 4090."""
    properties = SimpleNamespace(shared_memory_per_multiprocessor=kib * 1024)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert has_room(torch.device("cuda")) == fits
    assert has_room(torch.device("cpu"))


def test_only_what_it_knows_goes_this_way() -> None:
    assert all(can_step(make_model(family)) for family in FAMILIES)
    assert can_step(make_model("llama", torch.float16))
    assert not can_step(make_model("llama", torch.float32)), "tensor cores do not multiply it exactly"
    assert not can_step(make_model("llama", attention_bias=True)), "no norm adds a bias of o_proj"
    assert not can_step(make_model("olmoe", num_experts=4)), "its norms go over all heads at once"
    assert not can_step(float8_copy(make_model("llama")))
    exact = make_model("llama")
    set_numerics(exact, "exact")
    assert not can_step(exact)
