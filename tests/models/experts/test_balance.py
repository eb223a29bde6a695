"""Losses of routers have the gradient of their formulas, whatever shares a pass, and metrics do not depend on it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from temper.batching.pack import pack
from temper.errors import UserError
from temper.models.experts.balance import (
    BalanceSettings,
    RouterWatch,
    balance_of,
    freeze_routers,
    is_balanced,
    set_balance,
)
from temper.objectives import PRESETS, MetricSums
from temper.trainer.passes.forward import StepFacts, checkpointing, enable_checkpointing, forward_backward
from temper.types import Microbatch, Sample
from tests.models.experts.test_routes import PROMPTS, ROOMY, make_model, rows_of_all, sample


def formula(logits_AE: torch.Tensor, chosen_AK: torch.Tensor, rows: list[int], settings: BalanceSettings) -> Any:
    """By the definitions, row by row: a mean over rows that counts each by its tokens."""
    total, probabilities = torch.zeros((), dtype=logits_AE.dtype), logits_AE.softmax(-1)
    num_experts, count = logits_AE.shape[1], len(rows)
    for row in sorted(set(rows)):
        own = [place for place, of in enumerate(rows) if of == row]
        share_E = torch.stack([(chosen_AK[own] == expert).any(1).double().mean() for expert in range(num_experts)])
        crowding_E = num_experts / chosen_AK.shape[1] * share_E
        total = total + settings.balance * len(own) / count * (crowding_E * probabilities[own].mean(0)).sum()
    return total + settings.z * torch.logsumexp(logits_AE, -1).square().mean()


def watched(logits: torch.Tensor, rows: list[int], settings: BalanceSettings) -> RouterWatch:
    model = make_model("fast")
    set_balance(model, settings)
    watch = RouterWatch(model, num_batch_tokens=len(rows))
    watch._share *= 2  # the model has two routers and this test one
    watch.begin(torch.arange(len(rows)), torch.tensor(rows), max(rows) + 1, None)
    return watch


@pytest.mark.parametrize(
    "settings", [BalanceSettings(balance=0.3), BalanceSettings(z=0.2), BalanceSettings(balance=0.1, z=0.1)], ids=str
)
def test_the_gradient_is_that_of_the_formula(settings: BalanceSettings) -> None:
    torch.manual_seed(0)
    logits, rows = torch.randn(9, 6, dtype=torch.float64, requires_grad=True), [0] * 4 + [1] * 5
    chosen = logits.topk(2).indices
    (expected,) = torch.autograd.grad(wanted := formula(logits, chosen, rows, settings), logits)
    watch = watched(logits, rows, settings)
    passed, experts = watch.route(0, logits, chosen)
    (found,) = torch.autograd.grad((0 * passed).sum(), logits)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert torch.equal(passed, logits)
    assert torch.equal(experts, chosen)
    value = sum(part for by in watch.losses.values() for part in by.values())
    torch.testing.assert_close(value, wanted.detach(), rtol=0, atol=1e-12)


def test_even_experts_have_a_balance_loss_of_one_and_a_crowded_one_more() -> None:
    even = torch.tensor([[0, 1], [2, 3], [4, 5]])
    for chosen, expected in ((even, 1.0), (torch.zeros_like(even) + torch.tensor([0, 1]), 3.0)):
        logits = torch.full((3, 6), -30.0).scatter(1, chosen, 0.0)
        watch = watched(logits, [0, 0, 0], BalanceSettings(balance=1.0))
        watch.route(0, logits, chosen)
        assert watch.losses["balance"][0].item() == pytest.approx(expected)


def rows() -> list[Sample]:
    """Rows with a prompt in common, so that some passes share it."""
    drawn = rows_of_all(sample(make_model("fast"), ROOMY, PROMPTS[1:2] * 4 + PROMPTS[:3]))
    total = sum(row.num_actions for row in drawn)
    ones = [[1 / total * mask for mask in row.loss_mask] for row in drawn]
    return [
        replace(row, weights=weights, advantages=[float(place - 3)] * len(weights))
        for place, (row, weights) in enumerate(zip(drawn, ones, strict=True))
    ]


def step(model: Any, microbatches: list[Microbatch]) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    model.zero_grad()
    facts = StepFacts(num_batch_tokens=sum(int(m.loss_mask.sum()) for m in microbatches))
    metrics = MetricSums()
    for microbatch in microbatches:
        metrics = metrics.merge(forward_backward(model, microbatch, PRESETS["grpo"], temperature=1.0, facts=facts)[1])
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}, metrics.finish()


@pytest.mark.parametrize("recomputes", [False, True])
def test_neither_gradient_nor_metrics_depend_on_how_rows_are_packed(recomputes: bool) -> None:
    model, batch = make_model("fast"), rows()
    set_balance(model, BalanceSettings(balance=0.5, z=0.1))
    whole, measured = step(model, pack(batch, 100_000))
    if recomputes:
        enable_checkpointing(model)
    with checkpointing(model):
        parts, again = step(model, pack(batch, 40))
    for name, gradient in parts.items():
        torch.testing.assert_close(gradient, whole[name], rtol=1e-3, atol=1e-5, msg=name)
    names = ("loss/balance", "loss/router_z", "route/load_max", "route/entropy", "route/moved_frac")
    assert {name: again[name] for name in names} == pytest.approx({name: measured[name] for name in names}, rel=1e-4)
    assert measured["route/load_max"] >= 1
    assert measured["loss/balance"] > 0.4
    assert measured["route/moved_frac"] == 0.0
    set_balance(model, BalanceSettings())
    plain, _ = step(model, pack(batch, 100_000))
    gate = "model.layers.0.mlp.gate.weight"
    assert (plain[gate] - whole[gate]).abs().max() > 1e-4, "the losses pull at routers"


def test_routers_that_move_are_counted() -> None:
    model, batch = make_model("fast"), rows()
    with torch.no_grad():
        model.model.layers[2].mlp.gate.weight.neg_()
    _, metrics = step(model, pack(batch, 100_000))
    assert 0.2 < metrics["route/moved_frac"] <= 0.5, "all of one layer of two at most"


def test_frozen_routers_have_no_gradient() -> None:
    model = make_model("fast")
    freeze_routers(model)
    gradients, _ = step(model, pack(rows(), 100_000))
    assert not any("mlp.gate.weight" in name for name in gradients)
    assert any("mlp.experts" in name for name in gradients)
    assert not is_balanced(model)
    assert balance_of(model) == BalanceSettings()


def test_a_dense_model_is_refused() -> None:
    config = LlamaConfig(
        vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    for change in (freeze_routers, lambda model: set_balance(model, BalanceSettings())):
        with pytest.raises(UserError, match=r"model.routers is made for .* this model is a llama"):
            change(LlamaForCausalLM(config))
