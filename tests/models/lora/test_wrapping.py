"""An adapter changes what it should and nothing else: merged it is the same policy to the bit, off it is the model it
was put on, and its directory is peft's."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Olmo2Config, Qwen2Config

from temper.errors import BackendError, UserError, install_line
from temper.models.load import load_model, load_tokenizer
from temper.models.lora import low_rank, materialize
from temper.models.lora.wrapping import (
    AdapterSettings,
    MergedTensors,
    adapter_tensors,
    add_adapter,
    fold,
    has_adapter,
    load_adapted,
    load_merged,
    save_adapter,
    with_own_weights,
    without_adapter,
)
from temper.models.ops import cpu_linear
from temper.models.save import save_model
from temper.models.scorer import load_scorer
from temper.models.states import Head, hidden_states
from temper.models.tiny import character_tokenizer
from temper.trainer.passes.packed_attention import ExactPackedAttention, PackedAttention

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "vocab_size": 16, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2, "pad_token_id": 0,
}  # fmt: skip
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**SHAPE, tie_word_embeddings=False),
    "olmo2": lambda: Olmo2Config(**SHAPE),  # not walked: the modules' own pass
}
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
                    torch.nn.init.normal_(parameter, std=0.2)
        made[family] = tmp_path_factory.mktemp(family)
        save_model(model, character_tokenizer("abcdefghijk"), made[family])
    return made


def adapted(folder: Path, dtype: torch.dtype = torch.float32, numerics: Any = "fast", **settings: Any) -> Any:
    """With an adapter that has learned something."""
    made = AdapterSettings(**{"rank": 4, "alpha": 8.0, **settings})
    model = add_adapter(load_model(folder, dtype, CPU, numerics), made, folder)
    with torch.no_grad():
        for number, tensor in enumerate(adapter_tensors(model).values()):
            tensor += 0.1 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(number))
    return model


def logits(model: Any, make_attention: Any = PackedAttention) -> Tensor:
    attend = make_attention((len(TOKENS),), CPU)
    return Head.of(model).logits(hidden_states(model, TOKENS, torch.arange(len(TOKENS)), attend))


def is_same(first: Any, second: Any) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("family", CONFIGS)
def test_a_new_adapter_is_the_model_itself_and_trains_its_factors_alone(folders: dict[str, Path], family: str) -> None:
    plain = load_model(folders[family], torch.float32, CPU)
    before = torch.random.get_rng_state()
    model = add_adapter(load_model(folders[family], torch.float32, CPU), AdapterSettings(rank=4), folders[family])
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(logits(plain), logits(model))
    assert has_adapter(model)
    assert not has_adapter(plain)
    names = list(adapter_tensors(model))
    assert len(names) == 2 * 2 * 7  # layers, factors, linear layers of attention and feed-forward
    assert all(".lora_A." in name or ".lora_B." in name for name in names)
    assert not any("lm_head" in name or "embed" in name for name in names)


def test_first_factors_depend_on_seed_and_layer_and_on_nothing_else(folders: dict[str, Path]) -> None:
    def drawn(**settings: Any) -> dict[str, Tensor]:
        model = add_adapter(load_model(folders["llama"], torch.float32, CPU), AdapterSettings(**settings), Path("."))
        return {name: t for name, t in adapter_tensors(model).items() if "q_proj.lora_A" in name}

    first = drawn(seed=1)
    assert is_same(first, drawn(seed=1, targets=("q_proj", "up_proj")))
    assert not is_same(first, drawn(seed=2))
    one, two = first.values()
    assert not torch.equal(one, two)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "numerics"), [("llama", "fast"), ("qwen2", "fast"), ("llama", "exact")])
def test_the_merged_model_is_the_adapted_one_to_the_bit(
    folders: dict[str, Path], family: str, numerics: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention = ExactPackedAttention if numerics == "exact" else PackedAttention
    model = adapted(folders[family], dtype, numerics, targets=("q_proj", "v_proj", "o_proj", "gate_proj"))
    plain = load_model(folders[family], dtype, CPU, numerics)  # type: ignore[arg-type]
    own = dict(plain.named_parameters())
    merged = MergedTensors(model)
    assert own.keys() == merged.keys()
    with torch.no_grad():
        assert not torch.equal(logits(model, attention), logits(plain, attention))
        for name, tensor in merged.items():
            assert tensor.dtype == dtype
            own[name].copy_(tensor)
        assert torch.equal(logits(model, attention), logits(plain, attention))
        # A merge that rounds otherwise, or forgets the scale, is another policy.
        monkeypatch.setattr(low_rank._Part, "merged", lambda part, down, up: part.weight)
        assert not torch.equal(logits(model, attention), logits(plain, attention))


def test_gradients_of_factors_are_those_of_pefts_own_pass(folders: dict[str, Path]) -> None:
    gradients = []
    for is_walked in (True, False):
        model = adapted(folders["qwen2"], torch.float64, targets=("q_proj", "v_proj", "down_proj", "up_proj"))
        if is_walked:
            states = hidden_states(model, TOKENS, torch.arange(len(TOKENS)), PackedAttention((len(TOKENS),), CPU))
        else:
            model.set_attn_implementation("eager")
            states = model.get_decoder()(input_ids=TOKENS[None]).last_hidden_state[0]
        (states * torch.sin(torch.arange(states.numel()).view(states.shape))).sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
        assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    walked, own = gradients
    for name in own:
        assert own[name].abs().max() > 0.1
        torch.testing.assert_close(walked[name], own[name], rtol=0, atol=1e-5)  # norms are float32 in both


def test_gradients_in_bfloat16_are_those_in_float32_but_for_rounding(folders: dict[str, Path]) -> None:
    layers = [
        adapted(folders["qwen2"], dtype).model.layers[0].mlp.gate_proj for dtype in (torch.float32, torch.bfloat16)
    ]
    states, slopes = torch.randn(2, 400, 48, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = []
    for layer in layers:
        dtype = layer.base_layer.weight.dtype
        output = low_rank.low_rank_linear(cpu_linear, states[:, :32].to(dtype), [layer])
        output.backward(slopes.to(dtype))
        found.append([factor["default"].weight.grad for factor in (layer.lora_A, layer.lora_B)])
    for wide, narrow in zip(*found, strict=True):
        assert narrow.dtype == torch.float32
        assert (narrow - wide).norm() < 0.01 * wide.norm()


def test_first_and_second_derivatives_are_those_of_the_merged_product(folders: dict[str, Path]) -> None:
    attention = adapted(folders["qwen2"], torch.float64, rank=2).model.layers[0].self_attn
    layers = (attention.q_proj, attention.k_proj)
    hidden = torch.randn(3, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    factors = [layer.lora_B["default"].weight for layer in layers]

    def output(hidden: Tensor, *_: Tensor) -> Tensor:
        return low_rank.low_rank_linear(torch.nn.functional.linear, hidden, layers)[:, ::5].square()

    assert torch.autograd.gradcheck(output, (hidden, *factors))
    assert torch.autograd.gradgradcheck(output, (hidden, *factors))


def test_a_family_that_is_not_walked_merges_to_the_same_policy_within_rounding(folders: dict[str, Path]) -> None:
    model = adapted(folders["olmo2"], torch.float64)
    before = logits(model).detach()
    assert (before - logits(without_adapter(model))).abs().max() > 0.1
    torch.testing.assert_close(logits(fold(model)), before, rtol=0, atol=1e-10)


@pytest.mark.parametrize("family", CONFIGS)
def test_without_its_adapter_it_is_the_model_it_was_put_on_and_takes_no_memory(
    folders: dict[str, Path], family: str
) -> None:
    plain = load_model(folders[family], torch.float32, CPU)
    model = adapted(folders[family])
    reference = without_adapter(model)
    assert torch.equal(logits(reference), logits(plain))
    assert not torch.equal(logits(model), logits(plain))  # what a view that forgot to switch off would give
    own = {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    assert all(tensor.data_ptr() in own for tensor in (*reference.parameters(), *reference.buffers()))
    assert reference.state_dict().keys() == plain.state_dict().keys()
    assert not has_adapter(reference)
    assert adapter_tensors(model)  # still trainable


def test_own_weights_are_those_that_the_adapter_changes(folders: dict[str, Path]) -> None:
    model = adapted(folders["qwen2"], targets=("q_proj",))
    held = with_own_weights(model)
    ours = {p.data_ptr() for p in model.parameters()}
    own = {name for name, p in held.named_parameters() if p.data_ptr() not in ours}
    assert own == {f"model.layers.{i}.self_attn.q_proj.{what}" for i in (0, 1) for what in ("weight", "bias")}
    before = logits(without_adapter(model)).detach()
    with torch.no_grad():
        for name, p in held.named_parameters():
            p.copy_(MergedTensors(model)[name])
    assert torch.equal(logits(held), logits(model))
    assert torch.equal(logits(without_adapter(model)), before)


def save(model: Any, folder: Path, tokenizer_of: Path) -> Path:
    folder.mkdir()
    save_adapter(model, load_tokenizer(tokenizer_of), folder)
    return folder


@pytest.mark.parametrize("rslora", [False, True])
def test_the_directory_is_pefts_and_holds_no_weights_of_the_model(
    folders: dict[str, Path], tmp_path: Path, rslora: bool
) -> None:
    model = adapted(folders["qwen2"], rslora=rslora)
    folder = save(model, tmp_path / "adapter", folders["qwen2"])
    plain: Any = AutoModelForCausalLM.from_pretrained(folders["qwen2"], dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(plain, folder).eval()
    torch.testing.assert_close(theirs(TOKENS[None]).logits[0], logits(model), rtol=0, atol=1e-4)
    size = sum(tensor.nbytes for tensor in adapter_tensors(model).values())
    stored = (folder / "adapter_model.safetensors").stat().st_size
    assert size <= stored < size + 10_000
    assert not (folder / "model.safetensors").exists()
    again = save(model, tmp_path / "again", folders["qwen2"])
    for path in folder.iterdir():
        assert path.read_bytes() == (again / path.name).read_bytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_directory_is_read_back_adapted_or_merged_to_the_same_bits(
    folders: dict[str, Path], tmp_path: Path, dtype: torch.dtype
) -> None:
    model = adapted(folders["llama"], dtype)
    folder = save(model, tmp_path / "adapter", folders["llama"])
    read = load_adapted(folder, dtype, CPU, load=load_model)
    assert {tensor.dtype for tensor in adapter_tensors(model).values()} == {torch.float32}
    assert is_same(adapter_tensors(model), adapter_tensors(read))
    assert torch.equal(logits(load_model(folder, dtype, CPU)), logits(model))
    # In another precision it is still the policy that was trained: merged first, then widened.
    wide = dict(load_merged(folder, torch.float32, CPU, load=load_model).named_parameters())
    assert is_same(wide, {name: tensor.float() for name, tensor in MergedTensors(model).items()})


def test_an_adapter_on_an_adapter_is_a_chain(folders: dict[str, Path], tmp_path: Path) -> None:
    first = save(adapted(folders["llama"]), tmp_path / "first", folders["llama"])
    model = adapted(first, seed=7)
    second = save(model, tmp_path / "second", first)
    assert torch.equal(logits(load_model(second, torch.float32, CPU)), logits(model))
    (first / "adapter_model.safetensors").write_bytes(b"changed")
    with pytest.raises(UserError, match=r"adapter_model.safetensors differs"):
        load_model(second, torch.float32, CPU)


def test_a_reward_models_head_is_trained_and_stored_whole(folders: dict[str, Path], tmp_path: Path) -> None:
    scorer: Any = load_scorer(folders["llama"], torch.float32, CPU)
    model: Any = add_adapter(scorer, AdapterSettings(rank=2), folders["llama"], whole=("score",))
    with torch.no_grad():
        for tensor in adapter_tensors(model).values():
            tensor += 0.1
    assert "score.weight" in adapter_tensors(model)
    folder = save(model, tmp_path / "scorer", folders["llama"])
    read: Any = load_merged(folder, torch.float32, CPU, load=load_scorer)
    assert is_same(dict(read.named_parameters()), dict(MergedTensors(model)))
    assert read.score.weight.abs().max() > 0


def test_a_moved_or_changed_model_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    origin = Path(shutil.copytree(folders["llama"], tmp_path / "run" / "origin"))
    folder = save(adapted(origin), tmp_path / "run" / "adapter", origin)
    both = Path(shutil.copytree(tmp_path / "run", tmp_path / "both"))
    moved = origin.rename(tmp_path / "moved")
    with pytest.raises(UserError, match=r"was trained on the model .*origin, which is not there"):
        load_adapted(folder, torch.float32, CPU, load=load_model)
    assert has_adapter(load_adapted(folder, torch.float32, CPU, load=load_model, origin=moved))
    assert has_adapter(load_adapted(both / "adapter", torch.float32, CPU, load=load_model))
    with pytest.raises(UserError, match=r"is not that model: config.json differs"):
        load_adapted(folder, torch.float32, CPU, load=load_model, origin=folders["qwen2"])
    weights = moved / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    with pytest.raises(UserError, match=r"model.safetensors differs"):
        load_adapted(folder, torch.float32, CPU, load=load_model, origin=moved)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (lambda: AdapterSettings(rank=0), r"rank=0 and alpha=32.0 must be positive"),
        (lambda: AdapterSettings(targets=("q_prj",)), r'targets has "q_prj".*Did you mean "q_proj"'),
        (lambda: AdapterSettings(targets=("lm_head",)), r'targets has "lm_head"'),
    ],
)
def test_what_cannot_be_done_is_refused(
    folders: dict[str, Path], settings: Callable[[], AdapterSettings], reason: str
) -> None:
    with pytest.raises(UserError, match=reason):
        add_adapter(load_model(folders["qwen2"], torch.float32, CPU), settings(), folders["qwen2"])


def test_without_peft_the_error_says_what_to_install(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match=re.escape(install_line("lora"))):
        add_adapter(load_model(folders["llama"], torch.float32, CPU), AdapterSettings(), folders["llama"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", CONFIGS)
def test_a_materialized_adapter_is_an_ordinary_model_with_the_same_logits(
    folders: dict[str, Path], tmp_path: Path, family: str, dtype: torch.dtype
) -> None:
    model = adapted(folders[family], dtype)
    out = materialize.materialize(save(model, tmp_path / "adapter", folders[family]), tmp_path / "out")
    assert is_same(dict(load_model(out, dtype, CPU).named_parameters()), dict(MergedTensors(model)))
    assert not list(out.glob("adapter*"))
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    assert json.loads((out / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    with pytest.raises(UserError, match=r"exists already"):
        materialize.materialize(tmp_path / "adapter", out)


def test_a_merge_that_is_not_the_trained_model_is_not_written(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(adapted(folders["llama"]), tmp_path / "adapter", folders["llama"])

    def forgetful(model: Any) -> Any:
        with torch.no_grad():
            model.get_submodule("model.layers.1.mlp.up_proj").lora_B["default"].weight.zero_()
        return fold(model)

    monkeypatch.setattr(materialize, "fold", forgetful)
    with pytest.raises(BackendError, match=r'another "model.layers.1.mlp.up_proj.weight"'):
        materialize.materialize(folder, tmp_path / "out")
    # The same fault in what both sides call merged: peft's own pass still tells.
    monkeypatch.setattr(materialize, "fold", fold)
    monkeypatch.setattr(low_rank._Part, "merged", lambda part, down, up: part.weight.clone())
    with pytest.raises(BackendError, match=r"logits of the merged directory differ from those of the adapter by"):
        materialize.materialize(folder, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter"]
