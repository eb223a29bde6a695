"""Losses of routers have the gradient of their formulas, whatever shares a pass, and metrics do not depend on it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

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
from temper.models.experts.routes import set_replaying
from temper.objectives import PRESETS, MetricSums
from temper.trainer.passes.forward import StepFacts, checkpointing, enable_checkpointing, forward_backward
from temper.types import Microbatch, Sample
from tests.models.experts.test_bias import make_glm
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


def watched(
    logits: torch.Tensor, rows: list[int], settings: BalanceSettings, model: Any = None, scale: float = 1.0
) -> RouterWatch:
    model = make_model("fast") if model is None else model
    set_balance(model, settings)
    watch = RouterWatch(model, num_batch_tokens=len(rows), scale=scale)
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


def test_scores_of_single_experts_are_balanced_by_their_share_of_all_scores() -> None:
    """Of DeepSeek-V3's formula: alpha sum_i f_i P_i, P_i the mean of s_i / sum_j s_j over a row."""
    torch.manual_seed(1)
    logits, rows = 2 * torch.randn(9, 6, dtype=torch.float64, requires_grad=True), [0] * 4 + [1] * 5
    chosen, wanted = logits.topk(2).indices, torch.zeros((), dtype=torch.float64)
    scores = 1 / (1 + torch.exp(-logits))
    for own in (range(4), range(4, 9)):
        for expert in range(6):
            share = sum(expert in chosen[place].tolist() for place in own) / len(own)
            mean = sum(scores[place, expert] / scores[place].sum() for place in own) / len(own)
            wanted = wanted + 0.3 * len(own) / 9 * 6 / 2 * share * mean
    (expected,) = torch.autograd.grad(wanted, logits)
    watch = watched(logits, rows, BalanceSettings(balance=0.3), make_glm())
    passed, _ = watch.route(1, logits, chosen)
    (found,) = torch.autograd.grad((0 * passed).sum(), logits)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert watch.losses["balance"][1].item() == pytest.approx(wanted.item(), abs=1e-12)


def test_the_losses_are_scaled_as_the_loss_of_the_pass_is() -> None:
    torch.manual_seed(0)
    logits = torch.randn(9, 6, dtype=torch.float64, requires_grad=True)
    chosen, settings = logits.topk(2).indices, BalanceSettings(balance=0.3, z=0.2)
    found, losses = {}, {}
    for scale in (1.0, 1024.0):
        watch = watched(logits, [0] * 9, settings, scale=scale)
        passed, _ = watch.route(0, logits, chosen)
        (found[scale],) = torch.autograd.grad((0 * passed).sum(), logits)
        losses[scale] = [part[0].item() for part in watch.losses.values()]
    torch.testing.assert_close(found[1024.0], 1024 * found[1.0], rtol=1e-12, atol=0)
    assert losses[1024.0] == losses[1.0], "what is told of them is not"


def test_a_scaled_pass_scales_what_routers_are_pulled_by() -> None:
    model, (microbatch, *_) = make_model("fast"), pack(rows(), 100_000)
    set_balance(model, BalanceSettings(balance=0.5, z=0.1))
    gates = {}
    for scale in (1.0, 1024.0):
        model.zero_grad()
        facts = StepFacts(num_batch_tokens=int(microbatch.loss_mask.sum()), loss_scale=scale)
        silent = replace(microbatch, advantages=torch.zeros_like(microbatch.advantages))
        forward_backward(model, silent, PRESETS["grpo"], temperature=1.0, facts=facts)
        gates[scale] = model.model.layers[0].mlp.gate.weight.grad.clone()
    assert gates[1.0].abs().max() > 1e-4
    torch.testing.assert_close(gates[1024.0], 1024 * gates[1.0], rtol=1e-4, atol=1e-4)


def test_balance_is_of_one_row_what_transformers_loss_is_of_one_layer_over_the_number_of_chosen_experts() -> None:
    torch.manual_seed(0)
    logits = torch.randn(12, 6, dtype=torch.float64)
    for num_chosen in (1, 2, 3):
        watch = watched(logits, [0] * 12, BalanceSettings(balance=1.0))
        watch.route(0, logits, logits.topk(num_chosen).indices)
        theirs = load_balancing_loss_func((logits,), 6, num_chosen)
        assert watch.losses["balance"][0].item() == pytest.approx(float(theirs) / num_chosen)


def test_tokens_without_a_record_are_counted_and_are_no_reason_to_say_that_routes_stayed() -> None:
    model = make_model("fast")
    batch = rows()[4:]  # whose prompts differ: shared ones take the routes of the first
    with torch.no_grad():
        model.model.layers[2].mlp.gate.weight.neg_()
    _, whole = step(model, pack(batch, 100_000))
    assert whole["route/recorded_frac"] == 1.0
    half = [row if place % 2 else replace(row, routes=None) for place, row in enumerate(batch)]
    _, metrics = step(model, pack(half, 100_000))
    routed = sum(row.num_actions for row in half if row.routes is not None)
    assert metrics["route/recorded_frac"] == pytest.approx(routed / sum(row.num_actions for row in half))
    _, alone = step(model, pack([row for row in half if row.routes is not None], 100_000))
    assert metrics["route/moved_frac"] == pytest.approx(alone["route/moved_frac"])
    assert alone["route/moved_frac"] > 0.2
    _, none = step(model, pack([replace(row, routes=None) for row in batch], 100_000))
    assert none["route/recorded_frac"] == 0.0
    set_replaying(model, False)
    assert "route/recorded_frac" not in step(model, pack(batch, 100_000))[1]


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
