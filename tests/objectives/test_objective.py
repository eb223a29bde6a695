"""How factors multiply, and the metrics on F1."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from temper.errors import UserError
from temper.objectives import (
    POLICY_GRADIENTS,
    Objective,
    Scored,
    SlopedWeighting,
    Tokens,
    TopTokens,
    join,
    measure_batch,
    objective_loss,
    resolve,
)
from temper.objectives.policy.corrections import token_tis
from temper.objectives.policy.regularizers import entropy_bonus, kl
from temper.objectives.policy.selections import SELECTIONS
from temper.types import Microbatch

TOP = 20


def every_column(logprobs: Tensor) -> dict[str, object]:
    """Fields that only some objectives read, for tokens with these log-probabilities."""
    count, dtype = len(logprobs), logprobs.dtype
    likely = torch.log_softmax(torch.linspace(2, -2, TOP + 1, dtype=dtype), 0)[:TOP].expand(count, TOP)
    return {
        "entropy": torch.linspace(0.1, 0.8, count, dtype=dtype),
        "reference_logprobs": logprobs.detach(),
        "teacher_logprobs": logprobs.detach(),
        "rewards": torch.ones(count, dtype=dtype),
        "router_shift": torch.zeros(count, dtype=dtype),
        "weight_slopes": torch.zeros(count, dtype=dtype),
        "token_ids": torch.arange(count),
        "top": TopTokens(
            ids=torch.arange(TOP).expand(count, TOP), anchor_logprobs=likely, policy_logprobs=likely.clone()
        ),
    }


def on_policy(f1, objective: Objective, **fields) -> Tokens:
    """F1 with all policies equal, and every column that any objective reads."""
    tokens = f1(weighting=objective.weighting, **fields)
    same = tokens.policy_logprobs.detach()
    tokens = dataclasses.replace(tokens, proximal_logprobs=same, behavior_logprobs=same, **every_column(same))
    return measured(objective, tokens)


def measured(objective: Objective, tokens: Tokens) -> Tokens:
    return dataclasses.replace(tokens, measured=measure_batch(objective, tokens))


def policy_part(objective: Objective) -> Objective:
    """Without explicit regularisers, and without rules that choose or emphasise tokens on purpose."""
    corrections = tuple(correct for correct in objective.corrections if correct.name not in SELECTIONS)
    return dataclasses.replace(objective, regularizers=(), corrections=corrections, emphasis=())


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


def test_a_regularizer_and_a_correction_are_reported_by_name(f1) -> None:
    objective = dataclasses.replace(resolve("grpo"), corrections=(token_tis(),), regularizers=(kl(0.1),))
    metrics = objective_loss(objective, f1(weighting=objective.weighting))[1].finish()
    assert {"loss/policy", "loss/kl", "mismatch/token_tis_frac"} <= set(metrics)


ON_POLICY = [name for name in POLICY_GRADIENTS if name != "simko"]
"""SimKO spreads gradient to other tokens on purpose."""


@pytest.mark.parametrize("name", ON_POLICY)
def test_on_policy_every_preset_is_plain_policy_gradient(f1, name) -> None:
    """All policies equal: the gradient is A times the weight; where the ratio is of the whole trajectory, summed."""
    objective = policy_part(POLICY_GRADIENTS[name])
    tokens = on_policy(f1, objective)
    objective_loss(objective, tokens)[0].backward()
    expected_T = -tokens.advantages * tokens.weights
    if objective.ratio.name == "sequence_product" and objective.gate.name == "clip":
        lengths_T = torch.tensor([3, 3, 3, 2, 2, 1, 2, 2])
        expected_T = expected_T * lengths_T  # sequence_mean of a whole-trajectory ratio = sequence_sum of its tokens
    assert torch.allclose(tokens.policy_logprobs.grad, expected_T, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", ON_POLICY)
def test_the_on_policy_check_rejects_a_gate_whose_slope_at_one_is_wrong(f1, name) -> None:
    objective = policy_part(POLICY_GRADIENTS[name])

    def halved(tokens: Tokens, log_ratio_T: Tensor):
        gain = objective.gate(tokens, log_ratio_T)
        return dataclasses.replace(gain, value=gain.value / 2)

    wrong = dataclasses.replace(objective, gate=dataclasses.replace(objective.gate, run=halved))
    gradients = []
    for one in (objective, wrong):
        tokens = on_policy(f1, one)
        objective_loss(one, tokens)[0].backward()
        gradients.append(tokens.policy_logprobs.grad)
    assert (gradients[0] - gradients[1]).abs().max() > 1e-3


@pytest.mark.parametrize("name", POLICY_GRADIENTS)
def test_on_policy_ratio_is_exactly_one_and_nothing_is_clipped(f1, name) -> None:
    objective = POLICY_GRADIENTS[name]
    metrics = objective_loss(objective, on_policy(f1, objective, dtype=torch.float32))[1].finish()
    assert metrics["policy/ratio_min"] == metrics["policy/ratio_max"] == 1.0
    assert metrics["policy/clip_frac_high"] == metrics["policy/clip_frac_low"] == 0.0
    assert metrics["mismatch/logp_abs_max"] == 0.0


@pytest.mark.parametrize("name", POLICY_GRADIENTS)
def test_an_empty_microbatch_gives_a_connected_zero(name) -> None:
    own = POLICY_GRADIENTS[name].regularizers
    extras = tuple(extra for extra in (kl(0.1), entropy_bonus(0.1)) if extra.name not in {term.name for term in own})
    objective = dataclasses.replace(POLICY_GRADIENTS[name], regularizers=(*own, *extras))
    parameter = torch.ones(3, requires_grad=True)
    none, empty = parameter[:0], torch.empty(0)
    columns = {
        "policy_logprobs": none,
        "proximal_logprobs": empty,
        "behavior_logprobs": empty,
        "advantages": empty,
        "weights": empty,
        "trajectory_ids": torch.empty(0, dtype=torch.int64),
        "versions": torch.empty(0, dtype=torch.int64),
        "num_trajectories": 0,
        "num_batch_tokens": 8,
    }
    tokens = Tokens(**(columns | every_column(empty) | {"entropy": none * 2}))
    # Another microbatch was measured; this one has no entries of it.
    tokens = dataclasses.replace(tokens, measured=dict.fromkeys((f.name for f in objective.loss_factors), empty))
    loss, metrics = objective_loss(objective, tokens)
    loss.backward()
    assert loss.item() == 0.0
    assert parameter.grad.tolist() == [0.0, 0.0, 0.0]
    terms = {f"loss/{term.name}" for term in objective.regularizers} | {"loss/policy"}
    assert set(metrics.finish()) == terms | (
        {"loss/weight_slope"} if isinstance(objective.weighting.run, SlopedWeighting) else set()
    )


@pytest.mark.parametrize("name", POLICY_GRADIENTS)
def test_a_batch_without_tokens_can_be_measured(name) -> None:
    objective = POLICY_GRADIENTS[name]
    empty, none = torch.empty(0), torch.empty(0, dtype=torch.int64)
    columns = dict.fromkeys(
        ("policy_logprobs", "proximal_logprobs", "behavior_logprobs", "advantages", "weights"), empty
    )
    counts = {"trajectory_ids": none, "versions": none, "num_trajectories": 0, "num_batch_tokens": 0}
    whole = Tokens(**(columns | counts | every_column(empty)))
    assert all(len(column) == 0 for column in measure_batch(objective, whole).values())


@pytest.mark.parametrize("name", POLICY_GRADIENTS)
def test_zero_advantages_give_zero_gradient(f1, name) -> None:
    # Credit that some objectives make at the loss, from a teacher or a reference, is exempt: it is a regulariser.
    objective = dataclasses.replace(POLICY_GRADIENTS[name], regularizers=())
    tokens = f1(weighting=objective.weighting, advantages=torch.zeros(8, dtype=torch.float64))
    tokens = measured(objective, dataclasses.replace(tokens, **every_column(tokens.policy_logprobs)))
    objective_loss(objective, tokens)[0].backward()
    assert tokens.policy_logprobs.grad.abs().max().item() == 0.0


@pytest.mark.parametrize("name", POLICY_GRADIENTS)
@pytest.mark.parametrize("gap", [-1000.0, 1000.0])
def test_absurd_log_ratios_stay_finite(f1, name, gap) -> None:
    """In float32, against the proximal policy and against the sampler."""
    objective = POLICY_GRADIENTS[name]
    tokens = f1(weighting=objective.weighting, dtype=torch.float32)
    far = tokens.policy_logprobs.detach() - gap
    tokens = dataclasses.replace(tokens, **every_column(tokens.policy_logprobs), behavior_logprobs=far)
    tokens = measured(objective, dataclasses.replace(tokens, proximal_logprobs=far))
    loss, _ = objective_loss(objective, tokens)
    loss.backward()
    assert loss.isfinite()
    assert tokens.policy_logprobs.grad.isfinite().all()


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
    tokens = Tokens.of(microbatch, Scored(logprobs=policy, entropy=policy.exp()), num_batch_tokens=3)
    assert tokens.behavior_logprobs.tolist() == [-1, -2, -5]
    assert tokens.proximal_logprobs.tolist() == policy.tolist()
    assert not tokens.proximal_logprobs.requires_grad
    assert tokens.trajectory_ids.tolist() == [0, 0, 1]
    assert tokens.advantages.tolist() == [1, 2, 5]
    assert tokens.token_ids is not None
    assert tokens.token_ids.tolist() == [1, 2, 5]


def test_joined_parts_are_one_batch_in_their_order(f1) -> None:
    tokens = f1(rewards=torch.arange(8, dtype=torch.float64))
    joined = join([tokens, tokens])
    assert len(joined) == 16
    assert joined.num_trajectories == 8
    assert joined.trajectory_ids.tolist() == [0, 0, 0, 1, 1, 2, 3, 3, 4, 4, 4, 5, 5, 6, 7, 7]
    assert joined.rewards.tolist() == [*range(8), *range(8)]
    assert not joined.policy_logprobs.requires_grad
