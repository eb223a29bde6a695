"""Balancing without a loss: a bias moves by who had too many tokens, decides who is chosen, and has no gradient."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Glm4MoeConfig, LlamaConfig

from temper.batching.pack import pack
from temper.errors import UserError
from temper.models.experts.balance import BalanceSettings, move_biases, set_balance, set_bias_rate
from temper.models.load import prepare
from temper.models.tiny import character_tokenizer
from temper.objectives import PRESETS
from temper.trainer.local import LocalTrainer, TrainerSettings
from temper.trainer.optim import OptimizerSettings
from temper.types import Batch, Sample
from tests.models.experts.test_routes import make_model as make_qwen

SHAPE: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3,
}  # fmt: skip
BIAS = "mlp.gate.e_score_correction_bias"


def make_glm() -> Any:
    config = Glm4MoeConfig(
        **SHAPE, head_dim=8, n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=16, num_mtp_layers=0
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return prepare(AutoModelForCausalLM.from_config(config).eval())


def biases(model: Any) -> dict[int, torch.Tensor]:
    return {layer: model.get_submodule(f"model.layers.{layer}.mlp.gate").e_score_correction_bias for layer in (1, 2)}


def rows() -> list[Sample]:
    def row(number: int) -> Sample:
        ids = [(7 * number + 3 * place) % 40 for place in range(5 + number)]
        mask, count = [0] * 2 + [1] * (3 + number), len(ids)
        return Sample(
            group_id="g", index=number, token_ids=ids, loss_mask=mask,
            behavior_logprobs=[-2.0] * count, versions=[0] * count,
            advantages=[float(number - 2)] * count, weights=[share / 25 for share in mask],
        )  # fmt: skip

    return [row(number) for number in range(5)]


def make_trainer(model: Any, budget: int) -> LocalTrainer:
    settings = TrainerSettings(optimizer=OptimizerSettings(learning_rate=1e-3), temperature=1.0, total_steps=10)
    packing = partial(pack, tokens_per_microbatch=budget, dtype=torch.float32)
    return LocalTrainer(model, character_tokenizer("abc"), PRESETS["dapo"], settings, pack=packing)


def loads_of_drawn_tokens(model: Any) -> dict[int, torch.Tensor]:
    """By the family's own pass, row by row: a drawn token is chosen at the token before it."""
    chosen: dict[int, list[torch.Tensor]] = {1: [], 2: []}
    for row in rows():
        hooks = [
            model.get_submodule(f"model.layers.{layer}.mlp.gate").register_forward_hook(
                lambda _module, _given, output, kept=kept: kept.append(output[2][1:-1])
            )
            for layer, kept in chosen.items()  # the first two tokens are the prompt
        ]
        model.set_attn_implementation("eager")
        with torch.no_grad():
            model.get_decoder()(input_ids=torch.tensor(row.token_ids)[None], use_cache=False)
        for hook in hooks:
            hook.remove()
    return {layer: torch.bincount(torch.cat(parts).flatten(), minlength=6).float() for layer, parts in chosen.items()}


def test_a_bias_moves_against_the_load_and_stays_where_it_is_even() -> None:
    model = make_glm()
    set_bias_rate(model, 0.5)
    move_biases(model, {"2": torch.tensor([9.0, 1.0, 5.0, 5.0, 4.0, 6.0])})
    assert biases(model)[2].tolist() == [-0.5, 0.5, 0.0, 0.0, 0.5, -0.5]
    assert biases(model)[1].tolist() == [0.0] * 6, "another layer"
    set_bias_rate(model, 0.0)
    move_biases(model, {"2": torch.arange(6.0)})
    assert biases(model)[2].tolist() == [-0.5, 0.5, 0.0, 0.0, 0.5, -0.5]


@pytest.mark.parametrize("budget", [1000, 12], ids=["one microbatch", "many"])
def test_an_update_moves_biases_by_the_tokens_of_the_whole_batch_and_trains_nothing_by_them(
    budget: int, tmp_path: Path
) -> None:
    expected = {
        layer: 0.01 * torch.sign(load.mean() - load) for layer, load in loads_of_drawn_tokens(make_glm()).items()
    }
    model, still = make_glm(), make_glm()
    set_bias_rate(model, 0.01)
    trainer = make_trainer(model, budget)
    trainer.step(Batch(updates=(tuple(rows()),)))
    make_trainer(still, budget).step(Batch(updates=(tuple(rows()),)))
    for layer, bias in biases(model).items():
        assert expected[layer].any()
        torch.testing.assert_close(bias, expected[layer], rtol=0, atol=0)
        assert bias.grad is None
        assert not biases(still)[layer].any(), "without a rate nothing moves"
    for name, parameter in still.named_parameters():  # the update itself was computed before the biases moved
        assert torch.equal(parameter, model.get_parameter(name)), name
    published = trainer.publish().tensors
    assert all(torch.equal(published[f"model.layers.{layer}.{BIAS}"], bias) for layer, bias in biases(model).items())
    trainer.save(tmp_path / "kept")
    later = make_trainer(make_glm(), budget)
    later.load(tmp_path / "kept")
    assert all(torch.equal(later.publish().tensors[name], tensor) for name, tensor in published.items())


def test_repeated_updates_even_out_who_is_chosen() -> None:
    model = make_glm()
    set_bias_rate(model, 0.02)
    trainer = make_trainer(model, 1000)
    silent = [replace(row, advantages=[0.0] * len(row.token_ids)) for row in rows()]  # nothing but biases moves
    crowded = [trainer.step(Batch(updates=(tuple(silent),))).metrics["route/load_max"] for _ in range(40)]
    assert min(crowded[-10:]) < 0.8 * crowded[0]


def test_families_are_refused_by_name_where_they_have_no_bias_or_no_softmax() -> None:
    with pytest.raises(
        UserError, match=r"routers of a qwen3_moe have no bias.* those of dots1, glm4_moe, solar_open have"
    ):
        set_bias_rate(make_qwen("fast"), 0.001)
    with pytest.raises(UserError, match=r"routers.z: .* a glm4_moe scores them one by one. Leave z out"):
        set_balance(make_glm(), BalanceSettings(balance=0.1, z=0.1))
    with pytest.raises(UserError, match=r"and this model is a llama"):
        set_bias_rate(AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE)), 0.001)
