"""KL estimators: values and, above all, gradients. Specification 1.8 and 1.9."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from temper.errors import UserError
from temper.objectives import Tokens, objective_loss, resolve
from temper.objectives.regularizers import KL_ESTIMATORS, entropy_bonus, kl
from temper.objectives.weighting import token_mean

REVERSE = [-0.082563, 0.253008, -0.170444]
FORWARD = [-0.042559, 0.236326, -0.193767]


def all_three_tokens(logits: torch.Tensor) -> Tokens:
    """Every token of a 3-token vocabulary once, weighted by its probability: sums are exact expectations."""
    policy = torch.log_softmax(logits, 0)
    return Tokens(
        policy_logprobs=policy,
        proximal_logprobs=policy.detach(),
        behavior_logprobs=policy.detach(),
        reference_logprobs=torch.log_softmax(torch.tensor([0.2, -0.1, 0.4], dtype=torch.float64), 0),
        advantages=torch.zeros(3, dtype=torch.float64),
        weights=policy.detach().exp(),
        trajectory_ids=torch.arange(3),
        num_trajectories=3,
        num_batch_tokens=3,
        versions=torch.zeros(3, dtype=torch.int64),
    )


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [
        ("k1", 0.145097, [0, 0, 0]),
        ("k2", None, REVERSE),
        ("k3", 0.145097, FORWARD),
        ("k3_is", 0.145097, REVERSE),
        ("k1+", 0.145097, REVERSE),
        ("k3+", 0.145097, REVERSE),
    ],
)
def test_expected_value_and_gradient_by_enumeration(estimator, value, gradient) -> None:
    logits = torch.tensor([0.0, 0.5, -0.3], dtype=torch.float64, requires_grad=True)
    penalty = kl(1.0, estimator)(all_three_tokens(logits))
    penalty.backward()
    assert value is None or penalty.item() == pytest.approx(value, abs=1e-6)
    assert logits.grad.tolist() == pytest.approx(gradient, abs=1.1e-6)


@pytest.mark.parametrize(
    ("estimator", "mean"),
    [("k1", -0.098761), ("k2", 0.314196), ("k3", 0.607879), ("k3_is", 0.318631), ("k1+", -0.098761), ("k3+", 0.607879)],
)
def test_token_means_on_f1(f1, estimator, mean) -> None:
    assert kl(1.0, estimator)(f1(weighting=token_mean())).item() == pytest.approx(mean, abs=1e-6)
    assert kl(0.5, estimator)(f1(weighting=token_mean())).item() == pytest.approx(mean / 2, abs=1e-6)


def test_gradient_of_k3_is_on_f1_is_ratio_times_distance(f1) -> None:
    tokens = f1()
    kl(1.0)(tokens).backward()
    expected = [0.220738, 0.273482, -0.048295, -0.138736, -0.402981, 0.175834, 4.581454, -0.009944]
    assert tokens.policy_logprobs.grad.tolist() == pytest.approx(expected, abs=1.1e-6)


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_kl_stays_finite_for_tokens_the_reference_forbids(f1, estimator) -> None:
    tokens = f1(dtype=torch.float32, reference_logprobs=torch.full((8,), -1000.0))
    penalty = kl(1.0, estimator)(tokens)
    penalty.backward()
    assert penalty.isfinite()
    assert tokens.policy_logprobs.grad.isfinite().all()


def test_entropy_bonus_is_a_token_mean_under_any_weighting(f1) -> None:
    entropy = torch.linspace(0.1, 0.8, 8, dtype=torch.float64, requires_grad=True)
    for preset in ("grpo", "dr_grpo", "dapo"):
        objective = resolve(preset, {"regularizers": [{"name": "entropy_bonus", "coefficient": 0.5}]})
        tokens = f1(weighting=objective.weighting, entropy=entropy)
        _, metrics = objective_loss(objective, tokens)
        assert metrics.finish()["loss/entropy_bonus"] == pytest.approx(-0.5 * 0.45)
    (gradient,) = torch.autograd.grad(entropy_bonus(0.5)(tokens), entropy)
    assert gradient.tolist() == pytest.approx([-0.5 / 8] * 8)


def test_regularizers_add_to_the_policy_loss_and_are_reported_alone(f1) -> None:
    plain, with_kl = resolve("grpo"), resolve("grpo", {"regularizers": [{"name": "kl", "coefficient": 0.04}]})
    tokens = f1(weighting=plain.weighting)
    loss, metrics = objective_loss(with_kl, tokens)
    finished = metrics.finish()
    assert finished["loss/policy"] == pytest.approx(objective_loss(plain, tokens)[0].item())
    assert loss.item() == pytest.approx(finished["loss/policy"] + finished["loss/kl"])


def test_needs_are_declared() -> None:
    assert kl(0.1).needs == {"reference"}
    assert entropy_bonus(0.1).needs == {"entropy"}


def test_an_unknown_estimator_is_refused() -> None:
    with pytest.raises(UserError, match=r'estimator="k4" is unknown\. Use one of k1, k2'):
        kl(0.1, "k4")


def test_proximal_that_was_not_detached_is_caught(f1) -> None:
    tokens = f1()
    with pytest.raises(AssertionError, match="proximal_logprobs must not carry a gradient"):
        dataclasses.replace(tokens, proximal_logprobs=tokens.policy_logprobs)
