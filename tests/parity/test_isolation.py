"""The start-up proof passes on every family and names what leaks when something does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from temper.errors import BackendError
from temper.models import decoder
from temper.models.attention_interface import Attend
from temper.models.load import prepare
from temper.models.scorer import load_scorer
from temper.models.tiny import make_tiny_model
from temper.parity.isolation import check_isolation
from temper.trainer.passes import sharing
from temper.trainer.passes.packed_attention import PackedAttention


def test_every_family_keeps_packed_rows_apart(make_model: Callable[..., Any], family: str) -> None:
    assert check_isolation(make_model(family), 40, temperature=0.7) < 1e-9
    assert check_isolation(make_model(family, dtype=torch.float32), 40) < 1e-3


def test_bfloat16_stays_within_its_budget(make_model: Callable[..., Any]) -> None:
    assert check_isolation(make_model(dtype=torch.bfloat16), 40) < 0.25


def test_attention_that_loses_row_boundaries_is_named(make_model: Callable[..., Any]) -> None:
    def leaky(lengths: Sequence[int], device: torch.device) -> Attend:
        return PackedAttention([sum(lengths)], device)

    with pytest.raises(BackendError, match=r"packed rows leak in LlamaForCausalLM: other tokens in row 0 .* of row 1"):
        check_isolation(make_model(), 40, make_attention=leaky)


def test_a_shared_prompt_that_takes_a_rows_own_tokens_along_is_named(
    make_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: rows count as sharing one token more than they have in common."""
    prompts = sharing._prompts

    def one_more(microbatch: Any) -> Any:
        return ((starts, length + 1) for starts, length in prompts(microbatch))

    monkeypatch.setattr(sharing, "_prompts", one_more)
    with pytest.raises(BackendError, match=r"other tokens in row 4 .* of row 5"):
        check_isolation(make_model(dtype=torch.float32), 40)


def test_rows_that_are_kept_apart_but_scored_differently_are_named(make_model: Callable[..., Any]) -> None:
    def packed_only(lengths: Sequence[int], device: torch.device) -> Attend:
        plain = PackedAttention(lengths, device)

        def attend(*args: Any, scaling: float, sliding_window: int | None) -> torch.Tensor:
            return plain(*args, scaling=scaling * len(lengths), sliding_window=sliding_window)

        return attend

    with pytest.raises(BackendError, match="differently in a pack and alone"):
        check_isolation(make_model(), 40, make_attention=packed_only)


def test_a_scorer_with_a_head_of_zeros_is_checked_by_its_states(tmp_path: Path) -> None:
    base = make_tiny_model(
        tmp_path, layers=2, width=32, heads=2, kv_heads=1, mlp_width=64, context=32, alphabet="abcdefgh", seed=0
    )
    scorer = load_scorer(base, torch.float64, torch.device("cpu"))
    assert check_isolation(scorer, 12) < 1e-9

    def leaky(lengths: Sequence[int], device: torch.device) -> Attend:
        return PackedAttention([sum(lengths)], device)

    with pytest.raises(BackendError, match="packed rows leak in LlamaForSequenceClassification"):
        check_isolation(scorer, 12, make_attention=leaky)


@pytest.mark.parametrize("seed", range(6))
def test_experts_whose_rounding_depends_on_other_rows_are_no_leak(seed: int) -> None:
    assert check_isolation(_expert_model(seed), 40) < 1e-4


def plant(monkeypatch: pytest.MonkeyPatch, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Into what the experts of a layer say of all packed tokens."""
    sound = decoder.mix_experts
    monkeypatch.setattr(decoder, "mix_experts", lambda *given: change(sound(*given)))


def test_an_expert_model_that_leaks_less_than_its_rounding_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a millionth of what all rows say together is added to each. No bound on differences could tell."""
    plant(monkeypatch, lambda said_TD: said_TD + 1e-6 * said_TD.mean(dim=0, keepdim=True))
    with pytest.raises(BackendError, match=r"leak in Qwen3MoeForCausalLM: .* have a gradient at the tokens of row"):
        check_isolation(_expert_model(0), 40)


def test_an_expert_model_that_mixes_rows_without_a_gradient_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: experts have so little room that what one row chooses throws tokens of another out."""

    def drop(said_TD: torch.Tensor) -> torch.Tensor:
        crowded_T = (said_TD.detach()[:, 0] > 0).cumsum(0) > 12
        return said_TD.masked_fill(crowded_T.unsqueeze(1), 0.0)

    plant(monkeypatch, drop)
    with pytest.raises(BackendError, match="moved log-probabilities of row"):
        check_isolation(_expert_model(0), 40)


def _expert_model(seed: int) -> Any:
    config = Qwen3MoeConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, num_experts=8, num_experts_per_tok=2,
        moe_intermediate_size=16,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.3)
    return prepare(model.eval())
