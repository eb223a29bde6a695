"""How factors multiply, and the metrics of specification 5.1 and 5.2 on F1."""

from __future__ import annotations

import math

import pytest
import torch

from temper.errors import UserError
from temper.objectives import PRESETS, Tokens, objective_loss, resolve
from temper.objectives.corrections import token_tis
from temper.types import Microbatch


def test_policy_metrics_on_f1(f1) -> None:
    objective = resolve("dapo")
    entropy = torch.full((8,), 0.7, dtype=torch.float64)
    metrics = objective_loss(objective, f1(weighting=objective.weighting, entropy=entropy))[1].finish()
    expected = {
        "policy/entropy": 0.7,
        "policy/ratio_mean": 11.39 / 8,
        "policy/ratio_max": 5.0,
        "policy/ratio_min": 0.2,
        "policy/clip_frac_high": 0.125,
        "policy/clip_frac_low": 0.125,
        "policy/dual_clip_frac": 0.0,
        "policy/kl_old_k1": -0.002190,
        "policy/kl_old_k3": 0.421560,
        "policy/kl_ref_k1": -0.098761,
        "policy/kl_ref_k3": 0.607879,
        "loss/policy": -0.034375,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=1.1e-6)


def test_mismatch_metrics_on_f1(f1) -> None:
    objective = resolve("grpo", {"corrections": ["token_tis"]})
    metrics = objective_loss(objective, f1(weighting=objective.weighting))[1].finish()
    expected = {
        "mismatch/kl_k1": -0.224990,
        "mismatch/kl_k3": 0.305443,
        "mismatch/chi2_token": 3.074994,
        "mismatch/ppl_train": 3.874643,
        "mismatch/ppl_rollout": 5.377910,
        "mismatch/log_ppl_diff": -0.205341,
        "mismatch/ess": 0.920712,
        "mismatch/logp_abs_max": math.log(5),
        "mismatch/token_tis_frac": 0.125,
        "mismatch/reject_frac_token": 0.0,
        "mismatch/reject_frac_seq": 0.0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=1.1e-6)


def test_clip_fractions_count_lost_gradients_not_ratios_outside_the_band(f1) -> None:
    objective = resolve("grpo")
    tokens = f1(weighting=objective.weighting)
    ratio_T = (tokens.policy_logprobs - tokens.proximal_logprobs).exp()
    assert ((ratio_T < 0.8) | (ratio_T > 1.2)).double().mean().item() == 0.5  # the misleading number
    metrics = objective_loss(objective, tokens)[1].finish()
    assert (metrics["policy/clip_frac_low"], metrics["policy/clip_frac_high"]) == (0.125, 0.125)


def test_dual_clip_is_counted_apart(f1) -> None:
    objective = resolve("grpo", {"gate": {"dual": 4.0}})
    metrics = objective_loss(objective, f1(weighting=objective.weighting))[1].finish()
    assert metrics["policy/dual_clip_frac"] == 0.125
    assert metrics["policy/clip_frac_low"] == 0.125


def test_rejection_does_not_change_the_denominator(f1) -> None:
    # y4 is vetoed. Its tokens stay in the denominator of 8, so the others keep exactly their gradient.
    plain, vetoed = resolve("dapo"), resolve("dapo", {"corrections": [{"name": "veto", "threshold": 0.9}]})
    gradients = []
    for objective in (plain, vetoed):
        tokens = f1(weighting=objective.weighting)
        objective_loss(objective, tokens)[0].backward()
        gradients.append(tokens.policy_logprobs.grad)
    assert gradients[1][6:].tolist() == [0.0, 0.0]
    assert gradients[1][:6].tolist() == gradients[0][:6].tolist()
    metrics = objective_loss(vetoed, f1(weighting=vetoed.weighting))[1].finish()
    assert metrics["mismatch/reject_frac_seq"] == 0.25
    assert metrics["mismatch/veto_frac"] == 0.25


@pytest.mark.parametrize("name", PRESETS)
def test_on_policy_every_preset_is_plain_policy_gradient(f1, name) -> None:
    """All policies equal: the gradient is A times the weight; where the ratio is of the whole trajectory, summed."""
    objective = PRESETS[name]
    tokens = f1(weighting=objective.weighting)
    same = tokens.policy_logprobs.detach()
    tokens = f1(weighting=objective.weighting, proximal_logprobs=same, behavior_logprobs=same)
    objective_loss(objective, tokens)[0].backward()
    expected_T = -tokens.advantages * tokens.weights
    if objective.ratio.name == "sequence_product":
        lengths_T = torch.tensor([3, 3, 3, 2, 2, 1, 2, 2])
        expected_T = expected_T * lengths_T  # sequence_mean of a whole-trajectory ratio = sequence_sum of its tokens
    assert torch.allclose(tokens.policy_logprobs.grad, expected_T, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", PRESETS)
def test_on_policy_ratio_is_exactly_one_and_nothing_is_clipped(f1, name) -> None:
    objective = PRESETS[name]
    tokens = f1(dtype=torch.float32)
    same = tokens.policy_logprobs.detach()
    tokens = f1(dtype=torch.float32, proximal_logprobs=same, behavior_logprobs=same)
    metrics = objective_loss(objective, tokens)[1].finish()
    assert metrics["policy/ratio_min"] == metrics["policy/ratio_max"] == 1.0
    assert metrics["policy/clip_frac_high"] == metrics["policy/clip_frac_low"] == 0.0
    assert metrics["mismatch/logp_abs_max"] == 0.0


@pytest.mark.parametrize("name", PRESETS)
def test_an_empty_microbatch_gives_a_connected_zero(name) -> None:
    objective = resolve(
        name, {"regularizers": [{"name": "kl", "coefficient": 0.1}, {"name": "entropy_bonus", "coefficient": 0.1}]}
    )
    parameter = torch.ones(3, requires_grad=True)
    none = parameter[:0]
    empty = torch.empty(0)
    tokens = Tokens(
        policy_logprobs=none,
        proximal_logprobs=empty,
        behavior_logprobs=empty,
        reference_logprobs=empty,
        advantages=empty,
        weights=empty,
        entropy=none * 2,
        trajectory_ids=torch.empty(0, dtype=torch.int64),
        versions=torch.empty(0, dtype=torch.int64),
        num_trajectories=0,
        num_batch_tokens=8,
    )
    loss, metrics = objective_loss(objective, tokens)
    loss.backward()
    assert loss.item() == 0.0
    assert parameter.grad.tolist() == [0.0, 0.0, 0.0]
    assert set(metrics.finish()) == {"loss/policy", "loss/kl", "loss/entropy_bonus"}


def test_zero_advantages_give_zero_gradient(f1) -> None:
    for objective in PRESETS.values():
        tokens = f1(weighting=objective.weighting, advantages=torch.zeros(8, dtype=torch.float64))
        objective_loss(objective, tokens)[0].backward()
        assert tokens.policy_logprobs.grad.abs().max().item() == 0.0


def test_a_factor_named_twice_is_refused() -> None:
    with pytest.raises(UserError, match="names one twice"):
        resolve("grpo", {"corrections": ["token_tis", {"name": "token_tis", "cap": 3.0}]})


def test_factors_compare_by_name_and_arguments() -> None:
    assert token_tis() == token_tis(cap=2.0)
    assert token_tis() != token_tis(cap=3.0)
    assert str(token_tis(cap=3.0)) == "token_tis(cap=3.0, low=0.0)"


def test_tokens_of_a_microbatch_are_its_drawn_tokens() -> None:
    mask = torch.tensor([0, 1, 1, 0, 0, 1])
    count = torch.arange(6, dtype=torch.float64)
    microbatch = Microbatch(
        token_ids=torch.arange(6),
        positions=torch.tensor([0, 1, 2, 0, 1, 2]),
        sequence_ids=torch.tensor([0, 0, 0, 1, 1, 1]),
        trajectory_ids=torch.tensor([0, 0, 0, 1, 1, 1]),
        loss_mask=mask,
        behavior_logprobs=-count,
        advantages=count,
        weights=count / 10,
        versions=torch.arange(6),
        lengths=(3, 3),
    )
    policy = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64, requires_grad=True)
    tokens = Tokens.of(microbatch, policy, num_batch_tokens=3)
    assert tokens.behavior_logprobs.tolist() == [-1, -2, -5]
    assert tokens.proximal_logprobs.tolist() == policy.tolist()
    assert not tokens.proximal_logprobs.requires_grad
    assert tokens.trajectory_ids.tolist() == [0, 0, 1]
    assert tokens.advantages.tolist() == [1, 2, 5]
