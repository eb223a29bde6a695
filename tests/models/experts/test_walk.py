"""The short way through a decoder with experts is the family's own forward pass, with the same gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Dots1Config,
    Glm4MoeConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
    SolarOpenConfig,
)

from temper.models import decoder
from temper.models.decoder import can_walk, is_dense, lay_end_to_end, set_numerics, walk
from temper.models.experts import products
from temper.models.experts.products import collect, grouped_products, looped_products, places_of, spread
from temper.models.experts.routing import EXPERT_FAMILIES, expert_layers, ordered_experts, top_experts, weights_of
from temper.models.load import prepare

SHAPE: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "num_experts_per_tok": 3, "pad_token_id": 0,
}  # fmt: skip
SPARSE: dict[str, Any] = {"num_experts": 7, "moe_intermediate_size": 24, "decoder_sparse_step": 1}
CONFIGS = {
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, **SPARSE, head_dim=16, norm_topk_prob=True),
    "qwen3_moe unnormalised, partly dense, windows": Qwen3MoeConfig(
        **SHAPE, **SPARSE, head_dim=16, norm_topk_prob=False, mlp_only_layers=[1], use_sliding_window=True,
        sliding_window=5,
    ),
    "qwen2_moe": Qwen2MoeConfig(**SHAPE, **SPARSE, shared_expert_intermediate_size=32),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=7),
    "mixtral with windows": MixtralConfig(**SHAPE, num_local_experts=7, sliding_window=5),
    "olmoe": OlmoeConfig(**SHAPE, num_experts=7, norm_topk_prob=False),
    "glm4_moe": Glm4MoeConfig(**SHAPE, n_routed_experts=7, moe_intermediate_size=24, head_dim=16, attention_bias=True),
    "glm4_moe groups, norms, scaled": Glm4MoeConfig(
        **SHAPE, n_routed_experts=8, n_group=4, topk_group=2, moe_intermediate_size=24, head_dim=16, use_qk_norm=True,
        n_shared_experts=2, routed_scaling_factor=2.5, norm_topk_prob=False,
    ),
    "dots1": Dots1Config(
        **SHAPE, n_routed_experts=7, moe_intermediate_size=24, n_shared_experts=1, norm_topk_prob=True,
        routed_scaling_factor=2.5,
    ),
    "dots1 groups, partly dense, windows": Dots1Config(
        **SHAPE, n_routed_experts=8, n_group=4, topk_group=2, moe_intermediate_size=24, n_shared_experts=2,
        first_k_dense_replace=1, attention_bias=True, sliding_window=5,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
    ),
    "solar_open": SolarOpenConfig(
        **SHAPE, n_routed_experts=7, moe_intermediate_size=24, n_shared_experts=1, head_dim=16, attention_bias=True,
    ),
    "solar_open groups, unnormalised": SolarOpenConfig(
        **SHAPE, n_routed_experts=8, n_group=4, topk_group=2, moe_intermediate_size=24, n_shared_experts=1, head_dim=16,
        norm_topk_prob=False, routed_scaling_factor=2.5,
    ),
}  # fmt: skip


def make_model(name: str, dtype: torch.dtype = torch.float32) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name])).eval()
        for parameter in model.parameters():  # norms start at 1, which would hide their absence
            torch.nn.init.normal_(parameter, std=0.2)
        for name, bias in model.named_buffers():  # so starts a bias of routers, at 0
            if name.endswith("e_score_correction_bias"):
                torch.nn.init.normal_(bias, std=0.3)
    return model.to(dtype)


def causal(layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float, sliding_window: int | None) -> Any:
    """One row, by the definition. Shares in float32 as the modules' own."""
    length, per_kv = len(query), query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(per_kv, 1) for tensor in (key, value))
    behind = torch.arange(length)[:, None] - torch.arange(length)
    seen = (behind >= 0) & (behind < (sliding_window or length))
    scores = torch.einsum("qhd,khd->hqk", query, key) * scaling
    shares = scores.masked_fill(~seen, -torch.inf).softmax(-1, dtype=torch.float32).to(query.dtype)
    return torch.einsum("hqk,khd->qhd", shares, value)


def outputs(model: Any, through: Callable[..., Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    ids, weights = torch.arange(13) * 4 % 61, torch.linspace(-1, 1, 13 * 48).view(13, 48)
    hidden = through(model, ids)
    model.zero_grad()
    (hidden * weights).sum().backward()
    return hidden.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def own_forward(model: Any, ids: Tensor) -> Tensor:
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    return model.get_decoder()(input_ids=ids[None], use_cache=False).last_hidden_state[0]


def short_way(model: Any, ids: Tensor) -> Tensor:
    return walk(prepare(model), ids, torch.arange(len(ids)), causal)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("numerics", ["fast", "exact"])
@pytest.mark.parametrize("name", CONFIGS)
def test_states_and_gradients_are_those_of_the_modules_own_forward_pass(
    name: str, numerics: Any, dtype: torch.dtype
) -> None:
    expected_hidden, expected = outputs(make_model(name, dtype), own_forward)
    model = make_model(name, dtype)
    set_numerics(model, numerics)
    lay_end_to_end(model)
    hidden, gradients = outputs(model, short_way)
    # Routers with a bias are float32 in float64, too, and their sigmoid is spelled out in exact mode.
    has_bias = EXPERT_FAMILIES[name.split()[0]].has_bias
    is_wide = dtype is torch.float64 and not (numerics == "exact" and has_bias)
    close = {"rtol": 1e-10, "atol": 1e-10} if is_wide else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(hidden, expected_hidden, **close)
    assert gradients.keys() == expected.keys()
    assert sum("mlp.gate." in parameter for parameter in gradients) == len(expert_layers(model)), "routers, too"
    for parameter, gradient in gradients.items():
        close = {"rtol": 1e-7, "atol": 1e-8} if is_wide else {"rtol": 2e-3, "atol": 1e-4}
        torch.testing.assert_close(gradient, expected[parameter], **close, msg=f"{parameter}")


def test_experts_that_are_mixed_up_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these has been an error in some system: weights of another token, of another order, or not normalised."""
    expected, _ = outputs(make_model("qwen3_moe"), own_forward)

    def shifted(config: Any, logits_TE: Tensor, experts_TK: Tensor, *ops: Any) -> Tensor:
        return weights_of(config, logits_TE, experts_TK.roll(1, 0), *ops)

    def reversed_order(config: Any, logits_TE: Tensor, experts_TK: Tensor, *ops: Any) -> Tensor:
        return weights_of(config, logits_TE, experts_TK.flip(1), *ops)

    for wrong in (shifted, reversed_order):
        monkeypatch.setattr(decoder, "weights_of", wrong)
        assert not torch.allclose(outputs(make_model("qwen3_moe"), short_way)[0], expected, rtol=1e-4, atol=1e-5)


def test_rows_sorted_by_expert_come_back_to_their_tokens() -> None:
    experts_TK = torch.tensor([[4, 1], [1, 0], [4, 3]])
    places = places_of(experts_TK, 5)
    assert places.ends_E.tolist() == [1, 3, 3, 4, 6]
    assert places.ends_E.dtype is torch.int32
    hidden_TD = torch.arange(6.0).view(3, 2).requires_grad_()
    rows_SD = spread(hidden_TD, places)
    assert rows_SD[:, 0].tolist() == [2, 0, 2, 4, 0, 4], "experts 0, 1, 1, 3, 4, 4"
    back = collect(rows_SD, places, 2)
    assert torch.equal(back, hidden_TD.detach()[:, None].expand(3, 2, 2))
    (back * torch.tensor([1.0, 10.0])[:, None]).sum().backward()
    assert hidden_TD.grad is not None
    assert (hidden_TD.grad == 11).all()


def test_one_grouped_product_is_the_products_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "can_group", lambda _: True)  # torch has it on a CPU, too
    torch.manual_seed(0)
    places = places_of(torch.tensor([[3, 1], [1, 0], [3, 1], [3, 0]]), 5)  # experts 2 and 4 have nothing to do
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        rows, weight = torch.randn(8, 16).to(dtype), torch.randn(5, 24, 16).to(dtype)
        slopes = torch.randn(8, 24).to(dtype)
        found = []
        for compute in (grouped_products, lambda *given: looped_products(torch.nn.functional.linear, *given)):
            leaves = [rows.clone().requires_grad_(), weight.clone().requires_grad_()]
            output = compute(*leaves, places.ends_E)
            found.append([output.detach(), *torch.autograd.grad(output, leaves, slopes)])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one.float(), other.float(), rtol=tolerance, atol=1e-4)
        assert found[0][2].flatten(1).any(1).tolist() == [True, True, False, True, False], "no tokens, no gradient"


def test_nothing_on_the_way_to_experts_and_back_waits_for_a_gpu() -> None:
    """Fake tensors of a GPU have no values: whatever asks for one, or has a shape that depends on one, fails."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

    config = CONFIGS["qwen3_moe"]
    with FakeTensorMode(), torch.no_grad():
        hidden, logits = torch.empty(16, 48, device="cuda"), torch.empty(16, 7, device="cuda")
        chosen = top_experts(logits, 3)
        places = places_of(chosen, 7)
        rows = collect(spread(hidden, places), places, 3)
        mixed = products.weighted_sum(rows, weights_of(config, logits, chosen))
        assert mixed.shape == hidden.shape
        assert places.ends_E.shape == (7,)
        with pytest.raises(DataDependentOutputException):  # what a CPU does would be noticed
            looped_products(torch.nn.functional.linear, spread(hidden, places), torch.empty(7, 8, 48), places.ends_E)


def test_of_equally_likely_experts_the_first_are_chosen_in_exact_mode() -> None:
    logits_TE = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    assert ordered_experts(logits_TE, 2).tolist() == [[1, 2]]
    assert sorted(top_experts(logits_TE + torch.tensor([0, 0, 1e-3, 2e-3, 0]), 2)[0].tolist()) == [2, 3]


def test_bfloat16_agrees_with_the_modules_own_forward_pass_within_rounding() -> None:
    for name in CONFIGS:
        model = make_model(name, torch.bfloat16)
        expected = own_forward(copy.deepcopy(model), torch.arange(9)).float()
        hidden = short_way(model, torch.arange(9))
        assert hidden.dtype is torch.bfloat16
        assert (hidden.float() - expected).abs().mean() < 0.05 * expected.abs().mean(), name


def test_a_clip_of_queries_goes_the_ordinary_way() -> None:
    model = make_model("olmoe")
    assert can_walk(model)
    assert not is_dense(model)
    model.model.config.clip_qkv = 8.0
    assert not can_walk(model)
