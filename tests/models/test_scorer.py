"""A scorer is the language model's decoder under a head of zeros, or another scorer as it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from temper.errors import UserError
from temper.models.load import load_tokenizer
from temper.models.save import save_model
from temper.models.scorer import ScorerKind, load_scorer, score_head
from temper.models.tiny import make_tiny_model

CPU = torch.device("cpu")
SHAPE = {"layers": 1, "width": 16, "heads": 2, "kv_heads": 1, "mlp_width": 24, "context": 32}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model", **SHAPE, alphabet="abc", seed=0)


@pytest.mark.parametrize(
    ("kind", "names"), [("conversation", {"score.weight"}), ("steps", {"score.weight", "score.bias"})]
)
def test_the_head_starts_at_zero_and_the_decoder_is_the_model_s(base: Path, kind: ScorerKind, names: set[str]) -> None:
    scorer: Any = load_scorer(base, torch.float32, CPU, kind)
    tensors = dict(scorer.named_parameters())
    assert {name for name in tensors if name.startswith("score.")} == names
    assert all(not tensors[name].any() for name in names)
    origin = dict(LlamaForCausalLM.from_pretrained(base).named_parameters())
    for name, tensor in tensors.items():
        assert name in names or torch.equal(tensor, origin[name]), name
    assert not scorer.training


def test_loading_uses_none_of_the_run_s_randomness_and_says_nothing(
    base: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    load_scorer(base, torch.float32, CPU)
    assert torch.equal(torch.rand(3), expected)
    assert "MISSING" not in "".join(capfd.readouterr()) + caplog.text


@pytest.mark.parametrize("kind", ["conversation", "steps"])
def test_a_scorer_s_own_head_is_kept(base: Path, tmp_path: Path, kind: ScorerKind) -> None:
    scorer: Any = load_scorer(base, torch.float32, CPU, kind)
    torch.nn.init.normal_(score_head(scorer).weight)  # type: ignore[arg-type]
    save_model(scorer, load_tokenizer(base), tmp_path / "saved")
    again = load_scorer(tmp_path / "saved", torch.float32, CPU, kind)
    for (name, one), other in zip(scorer.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other), name
    written = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert "temper" not in json.dumps(written)  # a reader without Temper is not asked for its attention
    assert written["architectures"][0].endswith(
        {"conversation": "SequenceClassification", "steps": "TokenClassification"}[kind]
    )


def test_a_process_reward_model_is_not_taken_for_one_of_conversations(base: Path, tmp_path: Path) -> None:
    save_model(load_scorer(base, torch.float32, CPU, "steps"), load_tokenizer(base), tmp_path / "steps")
    with pytest.raises(UserError, match='another kind of reward model than "conversation"'):
        load_scorer(tmp_path / "steps", torch.float32, CPU, "conversation")


def test_a_decoder_that_lacks_weights_is_refused(base: Path) -> None:
    path = base / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lacks weights model\.norm\.weight"):
        load_scorer(base, torch.float32, CPU)


def test_a_directory_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the model cannot be loaded"):
        load_scorer(tmp_path, torch.float32, CPU)


def test_tied_embeddings_and_other_families_get_a_head_too(tmp_path: Path) -> None:
    config = Qwen3Config(
        vocab_size=20, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "qwen")
    assert not score_head(load_scorer(tmp_path / "qwen", torch.float64, CPU)).weight.any()  # type: ignore[union-attr, operator]


def test_a_head_by_another_name_is_refused_and_not_trained_beside(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=2)).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(UserError, match='no layer "score"'):
        load_scorer(tmp_path / "gpt2", torch.float32, CPU, "steps")  # transformers calls it "classifier" there
