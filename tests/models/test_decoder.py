"""The short way through a decoder is the module's own forward pass, with the same gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from temper.models import decoder
from temper.models.decoder import can_walk, joined, lay_end_to_end, set_numerics, walk
from temper.models.load import load_model, prepare
from temper.models.save import save_model

SHAPE: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2,
}  # fmt: skip
CONFIGS = {
    "llama": LlamaConfig(**SHAPE),
    "llama with biases": LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
    "mistral": MistralConfig(**SHAPE, sliding_window=5),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE, head_dim=16),
}


def make_model(name: str) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name])).eval()
    for parameter in model.parameters():  # biases and norms start at 0 and 1, which would hide their absence
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def causal(layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float, sliding_window: int | None) -> Any:
    """One row, by the definition."""
    length, per_kv = len(query), query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(per_kv, 1) for tensor in (key, value))
    behind = torch.arange(length)[:, None] - torch.arange(length)
    seen = (behind >= 0) & (behind < (sliding_window or length))
    scores = torch.einsum("qhd,khd->hqk", query, key) * scaling
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), value)


def outputs(model: Any, through: Callable[..., Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    ids, weights = torch.arange(13) * 4 % 61, torch.linspace(-1, 1, 13 * 48).view(13, 48)
    hidden = through(model, ids)
    model.zero_grad()
    (hidden * weights).sum().backward()
    return hidden.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def own_forward(model: Any, ids: Tensor) -> Tensor:
    model.set_attn_implementation("eager")
    return model.get_decoder()(input_ids=ids[None], use_cache=False).last_hidden_state[0]


def short_way(model: Any, ids: Tensor) -> Tensor:
    return walk(prepare(model), ids, torch.arange(len(ids)), causal)


@pytest.mark.parametrize("numerics", ["fast", "exact"])
@pytest.mark.parametrize("laid", [True, False], ids=["end to end", "apart"])
@pytest.mark.parametrize("name", CONFIGS)
def test_states_and_gradients_are_those_of_the_modules_own_forward_pass(name: str, laid: bool, numerics: Any) -> None:
    expected_hidden, expected = outputs(make_model(name), own_forward)
    model = make_model(name)
    set_numerics(model, numerics)
    if laid:
        lay_end_to_end(model)
    hidden, gradients = outputs(model, short_way)
    torch.testing.assert_close(hidden, expected_hidden, rtol=1e-4, atol=1e-5)
    assert gradients.keys() == expected.keys()
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[parameter], rtol=2e-3, atol=2e-5, msg=parameter)


def test_a_lost_bias_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("qwen2")
    expected, _ = outputs(make_model("qwen2"), own_forward)
    for layer in model.model.layers:
        layer.self_attn.k_proj.bias.data.zero_()
    assert not torch.allclose(outputs(model, short_way)[0], expected, rtol=1e-4, atol=1e-5)


def test_laying_weights_end_to_end_changes_no_name_and_no_value_and_makes_the_joined_weight_a_view() -> None:
    model = make_model("qwen2")
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    lay_end_to_end(model)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    attention = model.model.layers[1].self_attn
    weights = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    assert joined(weights).data_ptr() == weights[0].data_ptr()
    with torch.no_grad():
        weights[1].add_(1.0)
    assert torch.equal(joined(weights), torch.cat(weights)), "an update in place must be seen"


def test_a_copy_of_a_model_never_computes_with_the_weights_of_the_original() -> None:
    model = prepare(make_model("llama"))
    lay_end_to_end(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    ids = torch.arange(5)
    expected = short_way(make_model("llama"), ids)
    torch.testing.assert_close(short_way(twin, ids), expected)


def test_weights_that_share_memory_are_saved_and_read_back_whole(tmp_path: Path) -> None:
    class NoTokenizer:
        def save_pretrained(self, folder: Path) -> None: ...

    model = prepare(make_model("qwen2"))
    lay_end_to_end(model)
    save_model(model, NoTokenizer(), tmp_path)
    again = load_model(tmp_path, torch.float32, torch.device("cpu"))
    saved = dict(again.named_parameters())
    assert saved.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(saved[name], parameter) for name, parameter in model.named_parameters())
    size = (tmp_path / "model.safetensors").stat().st_size
    assert size < 1.05 * sum(p.numel() * 4 for p in model.parameters()) + 10_000, "shared memory was saved twice"


def test_a_family_that_adds_something_goes_the_ordinary_way() -> None:
    model = make_model("llama")
    assert can_walk(model)
    model.model.config.hidden_act = "gelu"
    assert not can_walk(model)
    model.model.config.hidden_act, model.model.config.model_type = "silu", "olmo2"
    assert not can_walk(model)


def test_an_adapter_around_a_projection_is_not_passed_over() -> None:
    class Doubled(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return 2 * self.inner(x)

    model = make_model("llama")
    plain = short_way(model, torch.arange(5))
    attention = model.model.layers[0].self_attn
    attention.v_proj = Doubled(attention.v_proj)
    assert not torch.allclose(short_way(model, torch.arange(5)), plain)
    torch.testing.assert_close(short_way(model, torch.arange(5)), own_forward(model, torch.arange(5)))


def test_bfloat16_agrees_with_the_modules_own_forward_pass_within_rounding() -> None:
    model = make_model("llama").bfloat16()
    expected = own_forward(copy.deepcopy(model), torch.arange(9)).float()
    hidden = short_way(model, torch.arange(9))
    assert hidden.dtype is torch.bfloat16
    assert (hidden.float() - expected).abs().mean() < 0.02 * expected.abs().mean()
    assert decoder.numerics_of(model) == "fast"
