"""Levels of the ratio, the ratios of SimKO and RSPO, and log-ratios too large to exponentiate."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from temper.errors import UserError
from temper.objectives import Tokens, TopTokens
from temper.objectives.policy.measures import policy_sums
from temper.objectives.policy.ratios import (
    RATIOS,
    router_deviation,
    router_shift,
    sequence_geometric,
    sequence_geometric_token,
    sequence_product,
    token,
    top_k_spread,
)

FIRST_TOKENS = [0, 3, 5, 6]


def with_everything(tokens: Tokens) -> Tokens:
    """Also what the ratios of SimKO and RSPO read; the last token of each trajectory is its fork."""
    count, dtype = len(tokens), tokens.policy_logprobs.dtype
    likely_TK = torch.full((count, 3), -2.0, dtype=dtype)
    top = TopTokens(
        ids=torch.arange(3).expand(count, -1),
        anchor_logprobs=likely_TK,
        policy_logprobs=likely_TK.clone().requires_grad_(),
    )
    entropy_T = torch.arange(count, dtype=dtype)
    return dataclasses.replace(tokens, top=top, entropy=entropy_T, router_shift=torch.zeros(count, dtype=dtype))


def test_token_ratio_on_f1(f1) -> None:
    assert token()(f1()).exp().tolist() == pytest.approx([1.1, 1.5, 0.7, 0.9, 0.2, 1.1, 5.0, 0.89])


def test_geometric_and_product_ratios_on_f1(f1) -> None:
    geometric_T, product_T = sequence_geometric()(f1()).exp(), sequence_product()(f1()).exp()
    assert geometric_T[FIRST_TOKENS].tolist() == pytest.approx([1.049206, 0.424264, 1.1, 2.109502], abs=1e-6)
    assert product_T[FIRST_TOKENS].tolist() == pytest.approx([1.155, 0.18, 1.1, 4.45])


def test_token_form_of_the_geometric_ratio_has_its_value_and_the_tokens_own_gradient(f1) -> None:
    tokens = f1()
    ratio_T = sequence_geometric_token()(tokens).exp()
    assert ratio_T.tolist() == pytest.approx(sequence_geometric()(tokens).exp().tolist())
    ratio_T[1].backward()
    assert tokens.policy_logprobs.grad.nonzero().flatten().tolist() == [1]


def test_geometric_ratio_spreads_its_gradient_evenly_over_the_trajectory(f1) -> None:
    tokens = f1()
    sequence_geometric()(tokens).exp()[0].backward()
    assert tokens.policy_logprobs.grad[:3].tolist() == pytest.approx([1.049206 / 3] * 3, abs=1e-6)


@pytest.mark.parametrize("name", RATIOS)
@pytest.mark.parametrize("gap", [1000.0, -1000.0])
def test_a_log_ratio_of_1000_stays_finite(f1, name, gap) -> None:
    tokens = with_everything(f1(dtype=torch.float32))
    tokens = dataclasses.replace(tokens, proximal_logprobs=tokens.policy_logprobs.detach() - gap)
    ratio_T = RATIOS[name]()(tokens).exp()
    assert ratio_T.tolist() == pytest.approx([math.exp(math.copysign(20, gap))] * 8, rel=1e-5)
    ratio_T.sum().backward()
    assert tokens.policy_logprobs.grad.isfinite().all()


@pytest.mark.parametrize("name", RATIOS)
def test_ratios_of_nothing_are_nothing(f1, name) -> None:
    none_T = torch.zeros(0, dtype=torch.float64)
    columns = ("proximal_logprobs", "behavior_logprobs", "reference_logprobs", "advantages", "weights")
    ids = {"trajectory_ids": none_T.long(), "versions": none_T.long()}
    empty = f1(policy_logprobs=none_T.clone().requires_grad_(), **dict.fromkeys(columns, none_T), **ids)
    assert RATIOS[name]()(with_everything(empty)).shape == (0,)


@pytest.mark.parametrize("name", RATIOS)
def test_in_trajectories_of_one_token_every_ratio_is_the_tokens_own(f1, name) -> None:
    tokens = with_everything(f1(trajectory_ids=torch.arange(8), num_trajectories=8))
    log_ratio_T = RATIOS[name]()(tokens)
    assert log_ratio_T.tolist() == pytest.approx(token()(tokens).tolist(), rel=1e-12)
    log_ratio_T.sum().backward()
    assert tokens.policy_logprobs.grad.tolist() == pytest.approx([1.0] * 8)


# RSPO: two layers of two old experts.
OLD = torch.tensor([[[0.5, 0.3], [0.4, 0.2]]], dtype=torch.float64).log()
NEW = torch.tensor([[[0.4, 0.3], [0.5, 0.1]]], dtype=torch.float64).log()


def test_router_deviation_on_the_worked_example() -> None:
    by_layer = [router_deviation(OLD[:, layer : layer + 1], NEW[:, layer : layer + 1]).item() for layer in (0, 1)]
    assert by_layer == pytest.approx([0.111572, 0.458145], abs=1e-6)
    shift_T = router_deviation(OLD, NEW.clone().requires_grad_())
    assert shift_T.item() == pytest.approx(0.284859, abs=1e-6)
    assert (-shift_T).exp().item() == pytest.approx(0.752121, abs=1e-6)
    assert not shift_T.requires_grad


def test_the_early_form_of_router_deviation_would_miss_the_example() -> None:
    # exp(-|difference|) averaged over layers, as in the paper's first version.
    early = (-(NEW - OLD).abs().mean(2)).exp().mean(1)
    assert early.item() != pytest.approx(0.752121, abs=1e-3)


def test_the_shift_of_routers_is_a_metric_where_it_is_known(f1) -> None:
    moved = f1(router_shift=torch.tensor([0.0, 0.1, 0.3, 5.0, 0.0, 0.0, 0.0, 0.2], dtype=torch.float64))
    assert policy_sums(moved).finish()["route/shift"] == pytest.approx(0.7)
    assert "route/shift" not in policy_sums(f1()).finish()


def test_router_shift_scales_the_ratio_down_to_its_floor_and_leaves_its_gradient_direction(f1) -> None:
    shifts = [0.0, 0.1, 0.284859, 5.0, 0.0, 0.0, 0.0, 0.0]
    tokens = f1(router_shift=torch.tensor(shifts, dtype=torch.float64))
    log_ratio_T = router_shift()(tokens)
    scale_T = (log_ratio_T - token()(tokens)).exp()
    assert scale_T.tolist() == pytest.approx([1, math.exp(-0.1), 0.8, 0.8, 1, 1, 1, 1], abs=1e-6)
    log_ratio_T.sum().backward()
    assert tokens.policy_logprobs.grad.tolist() == pytest.approx([1.0] * 8)
    assert router_shift(floor=0.5)(tokens)[2].exp().item() == pytest.approx(0.7 * 0.752121, abs=1e-6)


def simko_tokens(logprobs_V: torch.Tensor, *, advantage: float = 1.0) -> Tokens:
    """Two tokens of one trajectory; the second is the fork: token 2 drawn, top 3 = {0, 1, 2}."""
    old_V = torch.tensor([0.9, 0.7, 0.2, -1.0], dtype=torch.float64).log_softmax(0)
    old_TK, policy_TK = old_V[:3].expand(2, -1), logprobs_V[:3].expand(2, -1)
    top = TopTokens(ids=torch.arange(3).expand(2, -1), anchor_logprobs=old_TK, policy_logprobs=policy_TK)
    anchor_T = old_V[2].expand(2)
    return Tokens(
        policy_logprobs=logprobs_V[2].expand(2),
        proximal_logprobs=anchor_T,
        behavior_logprobs=anchor_T,
        advantages=torch.full((2,), advantage, dtype=torch.float64),
        weights=torch.ones(2, dtype=torch.float64),
        trajectory_ids=torch.zeros(2, dtype=torch.int64),
        num_trajectories=1,
        num_batch_tokens=2,
        versions=torch.zeros(2, dtype=torch.int64),
        entropy=torch.tensor([0.1, 1.2], dtype=torch.float64),
        top=top,
    )


def current_logprobs() -> torch.Tensor:
    return torch.tensor([1.0, 0.6, 0.2, -1.0], dtype=torch.float64).log_softmax(0).requires_grad_()


def test_top_k_spread_on_the_worked_example() -> None:
    logprobs_V = current_logprobs()
    ratio = top_k_spread()(simko_tokens(logprobs_V))[1].exp()
    ratio.backward()
    assert ratio.item() == pytest.approx(0.989062, abs=1e-6)
    assert logprobs_V.grad.tolist() == pytest.approx([0.003297, 0.003297, 0.982469, 0], abs=1e-6)


def test_top_k_spread_equals_its_formula_written_out() -> None:
    # (1 - e) r + (e/K) sum_k sg[r / r_k] r_k with the ratios of every token, old policy included.
    logprobs_V = current_logprobs()
    tokens = simko_tokens(logprobs_V)
    r, r_K = (
        token()(tokens)[1].exp(),
        (tokens.top.policy_logprobs[1] - tokens.top.anchor_logprobs[1]).exp(),
    )
    written = 0.7 * r + 0.3 / 3 * ((r / r_K).detach() * r_K).sum()
    ratio = top_k_spread(share=0.3)(tokens)[1].exp()
    assert ratio.item() == pytest.approx(written.item(), abs=1e-12)
    gradients = [torch.autograd.grad(value, logprobs_V, retain_graph=True)[0].tolist() for value in (ratio, written)]
    assert gradients[0] == pytest.approx(gradients[1], abs=1e-12)


def test_the_worked_example_rejects_a_spread_without_stop_gradient() -> None:
    # sg[] forgotten: r / r_k * r_k is r again, and nothing is spread.
    logprobs_V = current_logprobs()
    tokens = simko_tokens(logprobs_V)
    r, r_K = token()(tokens)[1].exp(), (tokens.top.policy_logprobs[1] - tokens.top.anchor_logprobs[1]).exp()
    (0.99 * r + 0.01 / 3 * (r / r_K * r_K).sum()).backward()
    assert logprobs_V.grad.tolist() != pytest.approx([0.003297, 0.003297, 0.982469, 0], abs=1e-5)


@pytest.mark.parametrize(("place", "advantage"), [(0, 1.0), (1, -1.0), (1, 0.0)], ids=["no fork", "wrong", "no credit"])
def test_only_forks_of_right_answers_spread(place, advantage) -> None:
    logprobs_V = current_logprobs()
    top_k_spread()(simko_tokens(logprobs_V, advantage=advantage))[place].backward()
    assert logprobs_V.grad.tolist() == [0, 0, 1, 0]


@pytest.mark.parametrize(
    ("build", "arguments"),
    [
        (router_shift, {"floor": 0.0}),
        (router_shift, {"floor": 1.1}),
        (top_k_spread, {"k": 0}),
        (top_k_spread, {"share": 1.5}),
        (top_k_spread, {"quantile": 1.0}),
    ],
)
def test_ratios_refuse_settings_that_mean_nothing(build, arguments) -> None:
    with pytest.raises(UserError, match=build.__name__):
        build(**arguments)


def test_ratios_say_what_they_need_and_what_is_not_established() -> None:
    assert all(build().name == name for name, build in RATIOS.items())
    needs = {name: set(build().needs) for name, build in RATIOS.items() if build().needs}
    assert needs == {"router_shift": {"router"}, "top_k_spread": {"policy_top_k"}}
    assert {name for name, build in RATIOS.items() if build().experimental} == {"router_shift"}
