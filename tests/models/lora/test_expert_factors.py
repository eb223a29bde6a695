"""Adapters on experts: merged they are the same policy to the bit, their gradient is that of merged weights, and their
directory is peft's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, OlmoeConfig, Qwen2MoeConfig, Qwen3MoeConfig

from temper.errors import BackendError, UserError
from temper.models.load import load_model, load_tokenizer
from temper.models.lora import expert_factors, low_rank, materialize, wrapping
from temper.models.lora.wrapping import (
    AdapterSettings,
    MergedTensors,
    adapter_tensors,
    add_adapter,
    load_adapted,
    save_adapter,
    with_own_weights,
    without_adapter,
)
from temper.models.save import save_model
from temper.models.states import Head, hidden_states
from temper.models.tiny import character_tokenizer
from temper.trainer.passes.packed_attention import ExactPackedAttention, PackedAttention

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "vocab_size": 16, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2, "pad_token_id": 0,
    "num_experts_per_tok": 2,
}  # fmt: skip
SPARSE: dict[str, Any] = {"num_experts": 5, "moe_intermediate_size": 24}
CONFIGS = {
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, **SPARSE, head_dim=8),
    "qwen2_moe": Qwen2MoeConfig(**SHAPE, **SPARSE, shared_expert_intermediate_size=24, decoder_sparse_step=1),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=5),  # gate and up of 2 x 16 are as high as wide
    "olmoe": OlmoeConfig(**SHAPE, num_experts=5),
    "llama": LlamaConfig(**{name: value for name, value in SHAPE.items() if name != "num_experts_per_tok"}),
}
SPARSE_FAMILIES = [name for name in CONFIGS if name != "llama"]
TARGETS = ("q_proj", "o_proj", "experts")
TOKENS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5, 3])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for family, config in CONFIGS.items():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config)
        made[family] = tmp_path_factory.mktemp(family)
        save_model(model, character_tokenizer("abcdefghijk"), made[family])
    return made


def adapted(folder: Path, dtype: torch.dtype = torch.float32, numerics: Any = "fast", **settings: Any) -> Any:
    """With an adapter that has learned something."""
    made = AdapterSettings(**{"rank": 3, "alpha": 6.0, "targets": TARGETS, **settings})
    model = add_adapter(load_model(folder, dtype, CPU, numerics), made, folder)
    with torch.no_grad():
        for number, tensor in enumerate(adapter_tensors(model).values()):
            tensor += 0.1 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(number))
    return model


def states(model: Any, make_attention: Any = PackedAttention) -> Tensor:
    return hidden_states(model, TOKENS, torch.arange(len(TOKENS)), make_attention((len(TOKENS),), CPU))


def logits(model: Any, make_attention: Any = PackedAttention) -> Tensor:
    return Head.of(model).logits(states(model, make_attention))


def is_same(first: Any, second: Any) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("family", SPARSE_FAMILIES)
def test_a_new_adapter_is_the_model_itself_and_every_expert_has_factors(folders: dict[str, Path], family: str) -> None:
    plain = load_model(folders[family], torch.float32, CPU)
    settings = AdapterSettings(rank=3, targets=("experts",))
    model = add_adapter(load_model(folders[family], torch.float32, CPU), settings, folders[family])
    assert torch.equal(logits(model), logits(plain))
    assert len(adapter_tensors(model)) == 2 * 2 * 2  # layers, matrices of an expert, factors
    width = 16 if family in ("mixtral", "olmoe") else 24
    sides = (32 + 2 * width) + (width + 32)
    assert sum(tensor.numel() for tensor in adapter_tensors(model).values()) == 2 * 5 * 3 * sides
    assert not any("gate.weight" in name for name in adapter_tensors(model)), "routers stay as they are"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "numerics"), [("qwen3_moe", "fast"), ("mixtral", "fast"), ("qwen2_moe", "exact")])
def test_the_merged_model_is_the_adapted_one_to_the_bit(
    folders: dict[str, Path], family: str, numerics: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention = ExactPackedAttention if numerics == "exact" else PackedAttention
    model, plain = adapted(folders[family], dtype, numerics), load_model(folders[family], dtype, CPU, numerics)
    own, merged = dict(plain.named_parameters()), MergedTensors(model)
    assert own.keys() == merged.keys()
    with torch.no_grad():
        assert not torch.equal(logits(model, attention), logits(plain, attention))
        for name, tensor in merged.items():
            assert tensor.dtype == dtype
            own[name].copy_(tensor)
        assert torch.equal(logits(model, attention), logits(plain, attention))
        # Factors of the expert beside it are another policy.
        split = low_rank.split_factors
        monkeypatch.setattr(
            expert_factors, "split_factors", lambda module: tuple(factor.roll(1, 0) for factor in split(module))
        )
        assert not torch.equal(logits(model, attention), logits(plain, attention))


@pytest.mark.parametrize("family", SPARSE_FAMILIES)
def test_gradients_are_those_of_dense_merged_weights(folders: dict[str, Path], family: str) -> None:
    """By autograd through W + scale B A, spelled out expert by expert in peft's layout; also for what is below."""
    model = adapted(folders[family], torch.float64)
    plain: Any = load_model(folders[family], torch.float64, CPU)
    factors = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters() if p.requires_grad}
    whole = {name: parameter.detach() for name, parameter in plain.named_parameters()}
    for name, weight in whole.items():
        for prefix in (name.rpartition(".")[0], f"{name.rpartition('.')[0]}.base_layer"):
            down, up = (factors.get(f"{prefix}.lora_{factor}.default.weight") for factor in "AB")
            if down is None or up is None or weight.dim() == 1:
                continue
            if weight.dim() == 2:
                whole[name] = weight + 2 * up @ down
            elif (prefix.endswith("base_layer")) == (name.endswith("gate_up_proj")):  # gate and up lie inside
                experts = [2 * up[:, e::5] @ down[3 * e : 3 * e + 3] for e in range(5)]
                whole[name] = weight + torch.stack(experts)
    slope = torch.sin(torch.arange(len(TOKENS) * 32.0, dtype=torch.float64)).view(len(TOKENS), 32)
    found = torch.autograd.grad((states(model) * slope).sum(), [p for p in model.parameters() if p.requires_grad])

    class Walked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = plain

        def forward(self) -> Tensor:
            return states(self.inner)

    outcome = torch.func.functional_call(Walked(), {f"inner.{name}": tensor for name, tensor in whole.items()}, ())
    expected = torch.autograd.grad((outcome * slope).sum(), list(factors.values()))
    for name, mine, theirs in zip(factors, found, expected, strict=True):
        assert theirs.abs().max() > 1e-3, name
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-10, msg=name)


def test_second_derivatives_are_there_for_trust_regions(folders: dict[str, Path]) -> None:
    experts = adapted(folders["qwen3_moe"], torch.float64, rank=1).model.layers[0].mlp.experts
    rows = torch.randn(4, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    ends = torch.tensor([1, 1, 3, 4, 4])
    factors = [experts.base_layer.lora_A["default"].weight, experts.base_layer.lora_B["default"].weight]

    def output(rows: Tensor, *_: Tensor) -> Tensor:
        products = expert_factors.expert_products(looped, rows, experts, "gate_up_proj", ends)
        return products[:, ::16].square()

    assert torch.autograd.gradcheck(output, (rows, *factors))
    assert torch.autograd.gradgradcheck(output, (rows, *factors))


def looped(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    counts = ends.diff(prepend=ends.new_zeros(1)).tolist()
    parts = zip(torch.split(rows, counts), weight.unbind(0), strict=True)
    return torch.cat([part @ matrix.t() for part, matrix in parts])


def test_an_expert_without_tokens_has_no_gradient_and_others_have(folders: dict[str, Path]) -> None:
    experts = adapted(folders["qwen3_moe"]).model.layers[0].mlp.experts
    rows = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    expert_factors.expert_products(
        looped, rows, experts, "gate_up_proj", torch.tensor([1, 1, 3, 4, 4])
    ).sum().backward()
    adapter = experts.base_layer
    assert adapter.lora_A["default"].weight.grad.view(5, -1).any(1).tolist() == [True, False, True, True, False]


def test_the_reference_is_the_adapter_switched_off_and_samplers_have_experts_of_their_own(
    folders: dict[str, Path],
) -> None:
    model, plain = adapted(folders["qwen3_moe"]), load_model(folders["qwen3_moe"], torch.float32, CPU)
    reference, held = without_adapter(model), with_own_weights(model)
    assert torch.equal(logits(reference), logits(plain))
    assert reference.state_dict().keys() == plain.state_dict().keys() == held.state_dict().keys()
    ours = {p.data_ptr() for p in model.parameters()}
    assert all(p.data_ptr() in ours for p in reference.parameters())
    own = {name.split(".", 3)[3] for name, p in held.named_parameters() if p.data_ptr() not in ours}
    assert own == {"self_attn.q_proj.weight", "self_attn.o_proj.weight", "mlp.experts.gate_up_proj",
                   "mlp.experts.down_proj"}  # fmt: skip
    with torch.no_grad():
        for name, p in held.named_parameters():
            p.copy_(MergedTensors(model)[name])
    assert torch.equal(logits(held), logits(model))
    assert torch.equal(logits(reference), logits(plain)), "the model's own weights are not written"


def save(model: Any, folder: Path, tokenizer_of: Path) -> Path:
    folder.mkdir()
    save_adapter(model, load_tokenizer(tokenizer_of), folder)
    return folder


@pytest.mark.parametrize("family", SPARSE_FAMILIES)
def test_the_directory_is_pefts_and_is_read_back_and_exported_by_logits(
    folders: dict[str, Path], tmp_path: Path, family: str
) -> None:
    model = adapted(folders[family])
    folder = save(model, tmp_path / "adapter", folders[family])
    plain: Any = AutoModelForCausalLM.from_pretrained(folders[family], dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(plain, folder).eval()
    torch.testing.assert_close(theirs(TOKENS[None]).logits[0], logits(model), rtol=0, atol=1e-4)
    assert is_same(adapter_tensors(load_adapted(folder, torch.float32, CPU, load=load_model)), adapter_tensors(model))
    assert torch.equal(logits(load_model(folder, torch.float32, CPU)), logits(model))
    out = materialize.materialize(folder, tmp_path / "out")
    assert is_same(dict(load_model(out, torch.float32, CPU).named_parameters()), dict(MergedTensors(model)))


def test_an_export_whose_experts_were_merged_in_another_order_is_not_written(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(adapted(folders["qwen3_moe"]), tmp_path / "adapter", folders["qwen3_moe"])
    merge = low_rank.merged_experts
    monkeypatch.setattr(
        low_rank, "merged_experts", lambda weight, scale, down, up: merge(weight, scale, down, up.roll(1, 0))
    )
    with pytest.raises(BackendError, match=r"logits of the merged directory differ"):
        materialize.materialize(folder, tmp_path / "out")


def test_an_adapter_on_attention_and_one_on_experts_are_not_taken_for_each_other(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    with_experts = save(adapted(folders["qwen3_moe"]), tmp_path / "experts", folders["qwen3_moe"])
    attention = adapted(folders["qwen3_moe"], targets=("q_proj", "o_proj"))
    without = save(attention, tmp_path / "attention", folders["qwen3_moe"])
    assert all(".self_attn." in name for name in adapter_tensors(attention))
    with pytest.raises(UserError, match=r"has target_parameters=\['mlp.experts.down_proj'.*this run's has None"):
        wrapping.read_adapter(with_experts, attention)
    with pytest.raises(UserError, match=r"has target_parameters=None"):
        wrapping.read_adapter(without, adapted(folders["qwen3_moe"]))


@pytest.mark.parametrize("family", SPARSE_FAMILIES)
def test_without_targets_attention_alone_is_adapted_and_merges_to_the_bit(
    folders: dict[str, Path], family: str
) -> None:
    model = adapted(folders[family], targets=())
    shared = ("self_attn", "shared_expert")
    assert all(any(part in name for part in shared) for name in adapter_tensors(model))
    held = with_own_weights(model)
    with torch.no_grad():
        for name, p in held.named_parameters():
            p.copy_(MergedTensors(model)[name])
        assert torch.equal(logits(held), logits(model))


@pytest.mark.parametrize(
    ("family", "target", "reason"),
    [
        ("llama", "experts", r'targets has "experts", which is made for .*qwen3_moe.*, and this model is a llama'),
        ("qwen3_moe", "expert", r'targets has "expert".*Did you mean "experts"'),
    ],
)
def test_what_cannot_be_done_is_refused(folders: dict[str, Path], family: str, target: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        adapted(folders[family], targets=(target,))
