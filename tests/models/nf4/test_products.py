"""A base in 4 bits under an adapter: the policy of its dequantised weights, its gradient, and what it takes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, Olmo2Config, Qwen2Config

from temper.errors import UserError
from temper.models.load import load_model
from temper.models.lora.materialize import materialize
from temper.models.lora.wrapping import (
    AdapterSettings,
    Base,
    adapter_tensors,
    add_adapter,
    fold,
    load_base,
    load_merged,
    save_adapter,
    with_own_factors,
    without_adapter,
)
from temper.models.nf4 import products
from temper.models.nf4.holding import hold_in_four_bits, hold_in_full, require_family
from temper.models.nf4.layers import FourBitLinear, four_bit_sizes
from temper.models.save import save_model, saved_tensors
from temper.models.states import Head, hidden_states
from temper.models.tiny import character_tokenizer
from temper.trainer.passes.packed_attention import ExactPackedAttention, PackedAttention
from temper.trainer.passes.work import size_of

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "vocab_size": 16, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2, "pad_token_id": 0,
}  # fmt: skip
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**SHAPE),
    "olmo2": lambda: Olmo2Config(**SHAPE),
}
BASES: tuple[Base, ...] = ("4bit", "full")
WALKED = ("llama", "qwen2")
TOKENS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5, 3])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for family, config in CONFIGS.items():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config())
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    nn.init.normal_(parameter, std=0.2)
        made[family] = tmp_path_factory.mktemp(family)
        save_model(model, character_tokenizer("abcdefghijk"), made[family])
    return made


def four_bits(folder: Path, dtype: torch.dtype = torch.float32, numerics: Any = "fast", **settings: Any) -> Any:
    """With an adapter that has learned something."""

    def load(path: Path, dtype: torch.dtype, device: torch.device) -> nn.Module:
        return load_model(path, dtype, device, numerics)

    made = AdapterSettings(**{"rank": 4, "alpha": 8.0, **settings})
    model = add_adapter(load_base(folder, dtype, CPU, load=load, base="4bit"), made, folder)
    with torch.no_grad():
        for number, tensor in enumerate(adapter_tensors(model).values()):
            tensor += 0.1 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(number))
    return model


def dense(model: Any) -> Any:
    """The same adapter on an ordinary model that has the dequantised weights."""
    return hold_in_full(copy.deepcopy(model))


def logits(model: Any, make_attention: Any = PackedAttention, tokens: Tensor = TOKENS) -> Tensor:
    attend = make_attention((len(tokens),), CPU)
    return Head.of(model).logits(hidden_states(model, tokens, torch.arange(len(tokens)), attend))


def gradients(model: Any) -> dict[str, Tensor]:
    model.zero_grad()
    logits(model).log_softmax(-1)[:-1].gather(1, TOKENS[1:, None]).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.requires_grad}


def is_close(first: dict[str, Tensor], second: dict[str, Tensor], tolerance: float) -> bool:
    return first.keys() == second.keys() and all(
        torch.allclose(first[name], second[name], rtol=tolerance, atol=tolerance) for name in first
    )


@pytest.mark.parametrize("family", WALKED)
def test_policy_and_gradients_are_those_of_the_dequantised_weights(folders: dict[str, Path], family: str) -> None:
    model = four_bits(folders[family], torch.float64)
    plain = dense(model)
    assert not any(isinstance(module, FourBitLinear) for module in plain.modules())
    torch.testing.assert_close(logits(model), logits(plain), rtol=0, atol=1e-5)
    assert is_close(gradients(model), gradients(plain), 1e-4)
    # The model as it was read is another one.
    read = load_model(folders[family], torch.float64, CPU)
    assert (logits(without_adapter(model)) - logits(read)).abs().max() > 0.05


def test_a_gradient_that_leaves_out_the_adapters_share_would_be_seen(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutation: what flows back to earlier layers through the factors is forgotten."""
    model = four_bits(folders["llama"], torch.float64)
    wanted = gradients(dense(model))
    plain = products.product
    monkeypatch.setattr(products, "product", lambda a, b: plain(a, b) * (0 if b.shape[0] == 4 else 1))
    assert not is_close(gradients(model), wanted, 1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_numerics_hold_for_any_company(folders: dict[str, Path], dtype: torch.dtype) -> None:
    model = four_bits(folders["qwen2"], dtype, "exact")
    with torch.no_grad():
        alone, together = (logits(model, ExactPackedAttention, tokens) for tokens in (TOKENS[:3], TOKENS))
    assert torch.equal(alone, together[:3])


def test_layers_without_an_adapter_are_held_in_four_bits_too(folders: dict[str, Path]) -> None:
    model = four_bits(folders["qwen2"], torch.float64, targets=("q_proj", "down_proj"))
    held = [module for module in model.modules() if isinstance(module, FourBitLinear)]
    assert len(held) == 7 * 2
    torch.testing.assert_close(logits(model), logits(dense(model)), rtol=0, atol=1e-5)


def test_the_base_takes_at_most_six_tenths_of_a_byte_a_parameter(tmp_path: Path) -> None:
    config = LlamaConfig(**{**SHAPE, "hidden_size": 128, "intermediate_size": 192})
    save_model(AutoModelForCausalLM.from_config(config), character_tokenizer("abcdefghijk"), tmp_path)
    model: Any = load_base(tmp_path, torch.bfloat16, CPU, load=load_model, base="4bit")
    tensors = saved_tensors(model.get_decoder().layers)
    held = sum(tensor.nbytes for name, tensor in tensors.items() if "_proj." in name)
    layers = [module for module in model.modules() if isinstance(module, FourBitLinear)]
    assert held <= 0.6 * sum(layer.in_features * layer.out_features for layer in layers)
    assert {tensor.dtype for name, tensor in tensors.items() if "norm" in name} == {torch.bfloat16}


def test_weights_in_four_bits_are_counted_as_parameters(folders: dict[str, Path]) -> None:
    held, full = (load_base(folders["qwen2"], torch.float32, CPU, load=load_model, base=base) for base in BASES)
    sizes = {name: parameter.numel() for name, parameter in held.named_parameters()} | four_bit_sizes(held)
    assert sizes == {name: parameter.numel() for name, parameter in full.named_parameters()}
    held, full = (model.requires_grad_(False) for model in (held, full))
    assert size_of(held) == size_of(full)


def test_reference_and_engine_share_the_base(folders: dict[str, Path]) -> None:
    model = four_bits(folders["llama"])
    base = {tensor.data_ptr() for tensor in model.buffers()}
    reference, engine = without_adapter(model), with_own_factors(model)
    assert {tensor.data_ptr() for tensor in reference.buffers()} == base
    assert torch.equal(logits(engine), logits(model))
    with torch.no_grad():
        for tensor in adapter_tensors(model).values():
            tensor.add_(1)
    assert not torch.equal(logits(engine), logits(model))
    ours = {name for name, t in saved_tensors(engine).items() if t.data_ptr() != saved_tensors(model)[name].data_ptr()}
    assert ours == adapter_tensors(model).keys()


def test_a_stored_adapter_is_read_onto_the_same_base_and_exports_the_dequantised_sum(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    model = four_bits(folders["qwen2"])
    saved = tmp_path / "saved"
    saved.mkdir()
    save_adapter(model, character_tokenizer("abcdefghijk"), saved)
    merged = load_merged(saved, torch.float32, CPU, load=load_model)
    torch.testing.assert_close(logits(merged), logits(model), rtol=0, atol=1e-4)
    written = load_model(materialize(saved, tmp_path / "out"), torch.float32, CPU)
    wanted = saved_tensors(fold(copy.deepcopy(model)))
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in saved_tensors(written).items())
    # A record that forgets the base would put the adapter on the full model.
    origin = saved / "origin.json"
    origin.write_text(origin.read_text().replace('"4bit"', '"full"'))
    forgotten = load_merged(saved, torch.float32, CPU, load=load_model)
    assert (logits(forgotten) - logits(model)).abs().max() > 0.05


def test_families_that_are_not_walked_are_refused_by_name(folders: dict[str, Path]) -> None:
    with pytest.raises(UserError, match="olmo2"):
        hold_in_four_bits(load_model(folders["olmo2"], torch.float32, CPU), CPU)
    with pytest.raises(UserError, match=r"qwen3_moe.*full"):
        require_family("qwen3_moe")
    require_family("qwen3")
