"""KL estimators: values and, above all, gradients; the other terms."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from temper.errors import UserError
from temper.objectives import Tokens, measure_batch, objective_loss, resolve
from temper.objectives.policy.gates import importance
from temper.objectives.policy.regularizers import (
    KL_ESTIMATORS,
    REGULARIZERS,
    behavior_square,
    entropy_bonus,
    k1,
    k3,
    kl,
    kl_cov,
    positive_nll,
    teacher_kl,
)
from temper.objectives.policy.weighting import token_mean

REVERSE = [-0.082563, 0.253008, -0.170444]
FORWARD = [-0.042559, 0.236326, -0.193767]


LOGITS, OTHER_LOGITS = [0.0, 0.5, -0.3], [0.2, -0.1, 0.4]


def all_three_tokens(logits: torch.Tensor, behavior: torch.Tensor | None = None) -> Tokens:
    """Every token of a 3-token vocabulary once, weighted by its probability under the policy that drew it (the policy
    itself unless `behavior` is given): sums are exact expectations."""
    policy = torch.log_softmax(logits, 0)
    drawn = policy.detach() if behavior is None else behavior
    other = torch.log_softmax(torch.tensor(OTHER_LOGITS, dtype=torch.float64), 0)
    return Tokens(
        policy_logprobs=policy,
        proximal_logprobs=drawn,
        behavior_logprobs=drawn,
        reference_logprobs=other,
        teacher_logprobs=other,
        advantages=torch.zeros(3, dtype=torch.float64),
        weights=drawn.exp(),
        trajectory_ids=torch.arange(3),
        num_trajectories=3,
        num_batch_tokens=3,
        versions=torch.zeros(3, dtype=torch.int64),
    )


EXPECTED = {
    "k1": (0.145097, [0, 0, 0]),
    "k2": (None, REVERSE),
    "k3": (0.145097, FORWARD),
    "k3_is": (0.145097, REVERSE),
    "k1+": (0.145097, REVERSE),
    "k3+": (0.145097, REVERSE),
}


def value_and_gradient(term, behavior=None) -> tuple[float, list[float]]:
    logits = torch.tensor(LOGITS, dtype=torch.float64, requires_grad=True)
    penalty = term(all_three_tokens(logits, behavior))
    penalty.backward()
    return penalty.item(), logits.grad.tolist()


def closed_form(direction: str) -> tuple[float, list[float]]:
    logits = torch.tensor(LOGITS, dtype=torch.float64, requires_grad=True)
    policy, other = (torch.log_softmax(x, 0) for x in (logits, torch.tensor(OTHER_LOGITS, dtype=torch.float64)))
    first, second = (policy, other) if direction == "reverse" else (other, policy)
    value = (first.exp() * (first - second)).sum()
    value.backward()
    return value.item(), logits.grad.tolist()


def test_the_worked_numbers_are_the_closed_form() -> None:
    assert closed_form("reverse")[0] == pytest.approx(0.145097, abs=1e-6)
    assert closed_form("forward")[0] == pytest.approx(0.140847, abs=1e-6)
    assert closed_form("reverse")[1] == pytest.approx(REVERSE, abs=1e-6)
    assert closed_form("forward")[1] == pytest.approx(FORWARD, abs=1e-6)


@pytest.mark.parametrize(
    "term",
    [*(kl(1.0, name) for name in EXPECTED), *(teacher_kl(1.0, name) for name in EXPECTED if name != "k1")],
    ids=str,
)
def test_expected_value_and_gradient_by_enumeration(term) -> None:
    value, gradient = value_and_gradient(term)
    expected_value, expected_gradient = EXPECTED[term.argument("estimator")]
    assert expected_value is None or value == pytest.approx(expected_value, abs=1e-6)
    assert gradient == pytest.approx(expected_gradient, abs=1.1e-6)


def test_only_k3_is_stays_exact_off_policy() -> None:
    """Tokens drawn by another policy: value and gradient of KL(pi || ref) survive only under the ratio."""
    drawn = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64).log()
    exact = closed_form("reverse")
    value, gradient = value_and_gradient(kl(1.0, "k3_is"), behavior=drawn)
    assert value == pytest.approx(exact[0], abs=1e-12)
    assert gradient == pytest.approx(exact[1], abs=1e-12)
    for estimator in ("k2", "k3", "k1+", "k3+"):
        other = value_and_gradient(kl(1.0, estimator), behavior=drawn)[1]
        assert max(abs(a - b) for a, b in zip(other, exact[1], strict=True)) > 0.01, estimator


def test_a_ratio_without_gradient_would_be_noticed() -> None:
    def detached(tokens: Tokens) -> torch.Tensor:
        distance = tokens.policy_logprobs - tokens.reference_logprobs
        ratio = (tokens.policy_logprobs - tokens.proximal_logprobs).detach().exp()
        return (ratio * k3(distance, distance) * tokens.weights).sum()

    value, gradient = value_and_gradient(detached)
    assert value == pytest.approx(0.145097, abs=1e-6)
    assert gradient == pytest.approx(FORWARD, abs=1.1e-6)  # the wrong direction, not REVERSE


def test_distilling_by_k1_is_refused_because_it_teaches_nothing() -> None:
    with pytest.raises(UserError, match="expected gradient is 0"):
        teacher_kl(1.0, "k1")
    _, gradient = value_and_gradient(lambda tokens: (k1(tokens.policy_logprobs, tokens.weights) * tokens.weights).sum())
    assert gradient == pytest.approx([0, 0, 0], abs=1e-12)


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


def kl_cov_loss(tokens: Tokens) -> tuple[torch.Tensor, dict[str, float]]:
    objective = dataclasses.replace(resolve("dapo"), gate=importance(), regularizers=(kl_cov(),))
    tokens = dataclasses.replace(tokens, measured=measure_batch(objective, tokens))
    loss, metrics = objective_loss(objective, tokens)
    return loss, metrics.finish()


def test_kl_cov_on_f1_pulls_back_the_token_of_largest_covariance(f1) -> None:
    tokens = f1(weighting=token_mean())
    loss, metrics = kl_cov_loss(tokens)
    loss.backward()
    assert loss.item() == pytest.approx(0.088055, abs=1e-6)
    assert metrics["loss/kl_cov"] * 8 + 0.5 * 0.2 == pytest.approx(1.709438, abs=1e-6)
    ratio = [1.1, 1.5, 0.7, 0.9, 0.2, 1.1, 5, 0.89]
    expected = [-1.5 * r / 8 for r in ratio[:3]] + [0.5 * r / 8 for r in ratio[3:]]
    expected[4] -= 1 / 8  # d|log r| / d log pi = -1 where the probability fell
    assert tokens.policy_logprobs.grad.tolist() == pytest.approx(expected, abs=1e-9)


def test_kl_cov_chooses_a_share_by_covariance_and_breaks_ties_by_order(f1) -> None:
    objective = dataclasses.replace(resolve("dapo"), regularizers=(kl_cov(share=0.4),))
    assert measure_batch(objective, f1())["kl_cov"].tolist() == [1, 1, 0, 0, 1, 0, 0, 0]
    equal = f1(advantages=torch.zeros(8, dtype=torch.float64))
    assert measure_batch(objective, equal)["kl_cov"].tolist() == [1, 1, 1, 0, 0, 0, 0, 0]


def test_behavior_square_on_f1(f1) -> None:
    tokens = f1(weighting=token_mean())
    penalty = behavior_square()(tokens)
    penalty.backward()
    log_w = torch.tensor([1.145833, 1.875, 0.8, 0.9, 1, 1.073171, 5, 0.741667], dtype=torch.float64).log()
    assert penalty.item() == pytest.approx(1e-3 * log_w.square().mean().item(), abs=1e-9)
    assert tokens.policy_logprobs.grad.tolist() == pytest.approx((2e-3 * log_w / 8).tolist(), abs=1e-9)


def test_positive_nll_has_its_own_denominator_and_does_not_read_the_policy_beforehand(f1) -> None:
    rewards = torch.tensor([1.0, 1, 1, 0, 0, 1, 0.5, 0.5], dtype=torch.float64)
    objective = dataclasses.replace(resolve("grpo"), regularizers=(positive_nll(coefficient=0.1),))
    assert "batch" not in objective.needs
    tokens = f1(weighting=objective.weighting, rewards=rewards)
    unknown = torch.full_like(tokens.weights, float("nan"))
    whole = dataclasses.replace(tokens, policy_logprobs=unknown, proximal_logprobs=unknown)
    tokens = dataclasses.replace(tokens, measured=measure_batch(objective, whole))
    term = positive_nll(coefficient=0.1)(tokens)
    term.backward()
    right = torch.tensor([0.55, 0.30, 0.28, 0.88], dtype=torch.float64)
    assert term.item() == pytest.approx(-0.1 * right.log().mean().item())
    assert tokens.policy_logprobs.grad.tolist() == pytest.approx([-0.025] * 3 + [0, 0, -0.025, 0, 0])


def test_positive_nll_without_a_right_answer_is_zero(f1) -> None:
    objective = dataclasses.replace(resolve("grpo"), regularizers=(positive_nll(),))
    tokens = f1(rewards=torch.zeros(8, dtype=torch.float64))
    tokens = dataclasses.replace(tokens, measured=measure_batch(objective, tokens))
    assert positive_nll()(tokens).item() == 0.0


def test_scales_multiply_each_term(f1) -> None:
    objective = resolve("grpo", {"regularizers": [{"name": "kl", "coefficient": 0.1}]})
    tokens = f1(weighting=objective.weighting)
    plain = objective_loss(objective, tokens)[1].finish()
    scaled = objective_loss(objective, dataclasses.replace(tokens, scales={"kl": 3.0}))[1].finish()
    assert scaled["loss/kl"] == pytest.approx(3 * plain["loss/kl"])
    assert scaled["loss/policy"] == plain["loss/policy"]


def test_needs_are_declared() -> None:
    needs = {name: set(build(coefficient=0.1).needs) for name, build in REGULARIZERS.items()}
    assert needs == {
        "kl": {"reference"},
        "teacher_kl": {"teacher"},
        "entropy_bonus": {"entropy"},
        "kl_cov": {"batch"},
        "behavior_square": set(),
        "positive_nll": set(),
    }


def test_an_unknown_estimator_is_refused() -> None:
    with pytest.raises(UserError, match=r'estimator="k4" is unknown\. Use one of k1, k2'):
        kl(0.1, "k4")
    with pytest.raises(UserError, match=r"kl_cov: share=0\.0"):
        kl_cov(share=0.0)


def test_proximal_that_was_not_detached_is_caught(f1) -> None:
    tokens = f1()
    with pytest.raises(AssertionError, match="proximal_logprobs must not carry a gradient"):
        dataclasses.replace(tokens, proximal_logprobs=tokens.policy_logprobs)
