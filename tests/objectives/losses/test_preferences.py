"""Worked numbers on F3: chosen log-ratio 1 over 5 tokens, rejected -1 over 4, delta 2."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from temper.errors import UserError
from temper.objectives import MetricSums
from temper.objectives.losses.preferences import (
    PREFERENCES,
    PairLosses,
    Pairs,
    Preference,
    cdpo,
    cpo,
    dpo,
    dpo_shift,
    hinge,
    ipo,
    length_normalized,
    orpo,
    power,
    preference_loss,
    reward_length_correlation,
    robust,
    rpo,
    shift_schedule,
    simpo,
    xpo,
)

SAMPLED = {"is_chosen_from_policy": torch.tensor([True])}


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def f3(**fields: Any) -> Pairs:
    values: dict[str, Any] = {
        "chosen_logprobs": column(-10).requires_grad_(),
        "rejected_logprobs": column(-14).requires_grad_(),
        "chosen_lengths": torch.tensor([5]),
        "rejected_lengths": torch.tensor([4]),
        "weights": column(1),
        "reference_chosen_logprobs": column(-11),
        "reference_rejected_logprobs": column(-13),
    }
    return Pairs(**(values | fields))


def random_pairs(count: int, seed: int = 0) -> Pairs:
    generator = torch.Generator().manual_seed(seed)

    def draw() -> Tensor:
        return -20 * torch.rand(count, generator=generator, dtype=torch.float64) - 1

    def lengths() -> Tensor:
        return torch.randint(1, 30, (count,), generator=generator)

    return Pairs(
        chosen_logprobs=draw().requires_grad_(),
        rejected_logprobs=draw().requires_grad_(),
        chosen_lengths=lengths(),
        rejected_lengths=lengths(),
        weights=torch.full((count,), 1 / count, dtype=torch.float64),
        reference_chosen_logprobs=draw(),
        reference_rejected_logprobs=draw(),
        is_chosen_from_policy=torch.rand(count, generator=generator) < 0.5,
    )


def part(pairs: Pairs, rows: list[int]) -> Pairs:
    return Pairs(**{name: getattr(pairs, name)[rows] for name in Pairs.__dataclass_fields__})


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (dpo(), 0.598139),
        (cdpo(), 0.618139),
        (robust(), 0.573139),
        (ipo(), 20.7025),
        (ipo(average=0), 9.0),
        (hinge(), 0.8),
        (length_normalized(), 0.670900),
        (rpo(), 2.598139),
        (rpo(alpha=0.005), 0.598139 + 0.01),
        (dpo_shift(), 0.600393),
        (simpo(), 0.126928),
        (cpo(), 2.513015),
        (power(), 0.093563),
        (orpo(), 2.018144),
        (xpo(), 0.598139 - 14e-5),
    ],
    ids=str,
)
def test_losses_are_those_worked_out_by_hand(rule: Preference, expected: float) -> None:
    loss, metrics = preference_loss(rule, f3(**SAMPLED))
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    assert metrics.finish()["loss/preference"] == pytest.approx(expected, abs=1e-6)


def test_the_gradient_of_dpo_is_minus_beta_times_the_probability_of_being_wrong() -> None:
    pairs = f3()
    preference_loss(dpo(), pairs)[0].backward()
    assert pairs.chosen_logprobs.grad is not None
    assert pairs.rejected_logprobs.grad is not None
    assert pairs.chosen_logprobs.grad.item() == pytest.approx(-0.045017, abs=1e-6)
    assert pairs.rejected_logprobs.grad.item() == pytest.approx(0.045017, abs=1e-6)


@pytest.mark.parametrize("name", PREFERENCES)
def test_gradients_agree_with_finite_differences(name: str) -> None:
    pairs = random_pairs(6)

    def losses(chosen: Tensor, rejected: Tensor) -> Tensor:
        fields = {key: getattr(pairs, key) for key in Pairs.__dataclass_fields__}
        return PREFERENCES[name]()(
            Pairs(**(fields | {"chosen_logprobs": chosen, "rejected_logprobs": rejected}))
        ).losses

    assert torch.autograd.gradcheck(losses, (pairs.chosen_logprobs, pairs.rejected_logprobs))


@pytest.mark.parametrize("name", sorted(PREFERENCES.keys() - {"ipo"}))
def test_every_rule_prefers_a_larger_margin(name: str) -> None:
    near, far = f3(**SAMPLED), f3(chosen_logprobs=column(-8), rejected_logprobs=column(-16), **SAMPLED)
    assert PREFERENCES[name]()(far).losses < PREFERENCES[name]()(near).losses


def test_ipo_wants_its_target_margin_and_no_more() -> None:
    at_target = f3(chosen_logprobs=column(-11 + 5), rejected_logprobs=column(-13))
    assert ipo(beta=0.1, average=0)(at_target).losses.item() == pytest.approx(0, abs=1e-12)


def test_a_large_beta_saturates_at_a_smaller_log_ratio_and_so_stays_close_to_the_reference() -> None:
    def push(beta: float) -> float:
        pairs = f3(chosen_logprobs=column(9).requires_grad_())  # far from the reference: u_w = 20
        preference_loss(dpo(beta), pairs)[0].backward()
        assert pairs.chosen_logprobs.grad is not None
        return abs(pairs.chosen_logprobs.grad.item()) / beta

    assert push(1.0) < push(0.1) < push(0.01)
    assert "LARGE beta stays close to\n    the reference" in str(dpo.__doc__)


def test_without_noise_cdpo_and_robust_are_dpo_and_without_shift_dpo_shift_is() -> None:
    pairs = random_pairs(5)
    expected = dpo()(pairs).losses
    for rule in (cdpo(noise=0.0), robust(noise=0.0), dpo_shift(factor=1.0), rpo(alpha=0.0), xpo(alpha=0.0)):
        assert torch.equal(rule(pairs).losses, expected)
    assert torch.equal(xpo(alpha=0.0, loss="ipo")(pairs).losses, ipo(average=0)(pairs).losses)


def test_xpo_lowers_the_likelihood_of_the_sample_of_the_reference_whichever_side_it_is_on() -> None:
    for won, name in ((True, "rejected_logprobs"), (False, "chosen_logprobs")):
        pairs = f3(is_chosen_from_policy=torch.tensor([won]))
        (xpo(alpha=1.0)(pairs).losses - dpo()(pairs).losses).sum().backward()
        grads = {side: getattr(pairs, side).grad.item() for side in ("chosen_logprobs", "rejected_logprobs")}
        assert grads == {"chosen_logprobs": 0.0, "rejected_logprobs": 0.0} | {name: 1.0}


def test_orpo_stays_finite_for_a_certain_completion() -> None:
    pairs = f3(chosen_logprobs=column(0).requires_grad_())
    loss, _ = preference_loss(orpo(), pairs)
    loss.backward()
    assert loss.isfinite()
    assert pairs.chosen_logprobs.grad is not None
    assert pairs.chosen_logprobs.grad.isfinite().all()


def test_extreme_log_ratios_give_finite_losses_and_gradients() -> None:
    pairs = f3(chosen_logprobs=column(-5000).requires_grad_(), **SAMPLED)
    for name, build in PREFERENCES.items():
        loss, _ = preference_loss(build(), pairs)
        (gradient,) = torch.autograd.grad(loss, pairs.chosen_logprobs)
        assert loss.isfinite(), name
        assert gradient.isfinite().all(), name


def test_the_schedule_of_the_shift_is_linear_and_stays_inside() -> None:
    assert [shift_schedule(progress) for progress in (0.0, 0.5, 1.0, 1.7)] == [0.5, 0.75, 1.0, 1.0]
    assert shift_schedule(0.25, start=1.0, end=0.5) == 0.875


# Partition: one step is a function of the set of pairs.


def whole_and_parts(
    loss: Callable[[Preference, Pairs], tuple[Tensor, MetricSums]], rule: Preference, seed: int
) -> tuple[list[Tensor], list[Tensor], dict[str, float], dict[str, float]]:
    pairs = random_pairs(12)
    inputs = (pairs.chosen_logprobs, pairs.rejected_logprobs)
    value, metrics = loss(rule, pairs)
    shuffler = random.Random(seed)
    rows = list(range(12))
    shuffler.shuffle(rows)
    cuts = [0, *sorted(shuffler.sample(range(1, 12), shuffler.randint(1, 5))), 12]
    total, merged = torch.zeros((), dtype=torch.float64), MetricSums()
    for start, stop in itertools.pairwise(cuts):
        piece, sums = loss(rule, part(pairs, rows[start:stop]))
        total, merged = total + piece, merged.merge(sums)
    return (
        [value.detach(), *torch.autograd.grad(value, inputs)],
        [total.detach(), *torch.autograd.grad(total, inputs)],
        metrics.finish(),
        merged.finish(),
    )


@pytest.mark.parametrize("name", PREFERENCES)
@pytest.mark.parametrize("seed", range(3))
def test_no_split_or_order_of_pairs_changes_loss_gradient_or_metrics(name: str, seed: int) -> None:
    whole, parts, metrics, merged = whole_and_parts(preference_loss, PREFERENCES[name](), seed)
    for left, right in zip(whole, parts, strict=True):
        assert torch.allclose(left, right, rtol=0, atol=1e-10)
    assert merged == pytest.approx(metrics, abs=1e-10)


def test_the_partition_check_rejects_a_mean_per_microbatch() -> None:
    def mean_of_means(rule: Preference, pairs: Pairs) -> tuple[Tensor, MetricSums]:
        return rule(pairs).losses.mean(), MetricSums()

    whole, parts, _, _ = whole_and_parts(mean_of_means, dpo(), 0)
    assert not torch.allclose(whole[1], parts[1], rtol=0, atol=1e-10)


def test_a_pair_of_weight_zero_is_left_out_of_the_loss() -> None:
    pairs = random_pairs(3)
    loss, _ = preference_loss(dpo(), Pairs(**{n: getattr(pairs, n) for n in Pairs.__dataclass_fields__} | {
        "weights": column(0.5, 0.0, 0.5)}))  # fmt: skip
    alone, _ = preference_loss(dpo(), part(pairs, [0, 2]))
    assert loss.item() == pytest.approx(alone.item() * 1.5)


def test_an_empty_microbatch_gives_a_connected_zero() -> None:
    pairs = part(random_pairs(2), [])
    loss, metrics = preference_loss(dpo(), pairs)
    loss.backward()
    assert loss.item() == 0
    assert metrics.finish() == {"loss/preference": 0.0}


# Monitoring.


def test_metrics_report_what_the_rule_compares() -> None:
    metrics = preference_loss(dpo(), f3())[1].finish()
    expected = {"chosen_reward": 0.1, "rejected_reward": -0.1, "margin": 0.2, "accuracy": 1.0, "chosen_logprob": -10,
                "rejected_logprob": -14, "length_difference": 1, "log_ratio": 0.0}  # fmt: skip
    assert {name: metrics[f"preference/{name}"] for name in expected} == pytest.approx(expected)
    assert preference_loss(simpo(), f3())[1].finish()["preference/margin"] == pytest.approx(3.0)


def test_the_correlation_of_reward_and_length_is_that_of_all_completions() -> None:
    pairs = random_pairs(20)
    compared = dpo()(pairs)
    rewards = torch.cat([compared.chosen_rewards, compared.rejected_rewards])
    lengths = torch.cat([pairs.chosen_lengths, pairs.rejected_lengths]).double()
    expected = torch.corrcoef(torch.stack([rewards, lengths]))[0, 1].item()
    assert reward_length_correlation(preference_loss(dpo(), pairs)[1].finish()) == pytest.approx(expected)
    constant = f3(rejected_lengths=torch.tensor([5]))
    assert reward_length_correlation(preference_loss(dpo(), constant)[1].finish()) == 0.0


# Refusals.


def test_a_reference_with_gradient_is_refused() -> None:
    with pytest.raises(AssertionError, match="must not carry a gradient"):
        f3(reference_chosen_logprobs=column(-11).requires_grad_())


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(AssertionError, match="parallel"):
        f3(weights=column(1, 1))


@pytest.mark.parametrize("name", PREFERENCES)
def test_rules_that_read_the_reference_say_so(name: str) -> None:
    rule = PREFERENCES[name]()
    bare = f3(reference_chosen_logprobs=None, reference_rejected_logprobs=None, **SAMPLED)
    if "reference" in rule.needs:
        with pytest.raises(AssertionError, match="the rule needs the reference"):
            rule(bare)
    else:
        assert isinstance(rule(bare), PairLosses)


@pytest.mark.parametrize(
    "build",
    [lambda: dpo(0.0), lambda: robust(noise=0.5), lambda: ipo(average=2), lambda: dpo_shift(factor=0.0),
     lambda: rpo(alpha=-1.0), lambda: orpo(weight=-0.1), lambda: xpo(loss="kto")],
)  # fmt: skip
def test_settings_without_meaning_are_refused(build: Callable[[], Any]) -> None:
    with pytest.raises(UserError):
        build()


def test_methods_that_no_code_establishes_do_not_exist() -> None:
    assert "pg_dpo" not in PREFERENCES


def test_the_reward_of_power_is_the_one_whose_best_policy_is_the_policy() -> None:
    """On three answers: gradient ascent over policies finds the policy that the rewards were made of."""
    beta, lengths, policy = 2.0, torch.tensor([2.0, 5.0, 3.0]).double(), torch.tensor([0.5, 0.2, 0.3]).double()
    rewards = beta * (policy.log() + 1) / lengths
    logits = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.02)
    for _ in range(1500):
        probabilities = logits.softmax(0)
        value = (probabilities * (rewards - beta * probabilities.log() / lengths)).sum()
        optimizer.zero_grad()
        (-value).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert torch.allclose(logits.softmax(0), policy, atol=1e-4)
    rule = power(beta=beta)
    pairs = f3(
        chosen_logprobs=policy[:1].log(),
        rejected_logprobs=policy[1:2].log(),
        chosen_lengths=lengths[:1],
        rejected_lengths=lengths[1:2],
    )
    assert (rule(pairs).chosen_rewards - rule(pairs).rejected_rewards).item() == pytest.approx(
        (rewards[0] - rewards[1]).item()
    )


# Mutations: the numbers above reject the usual slips.


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (dpo(), lambda p: -torch.nn.functional.logsigmoid(0.1 * (p.chosen_logprobs - p.rejected_logprobs))),
        (ipo(), lambda p: ((p.chosen_logprobs - p.reference_chosen_logprobs) / 5 - 5).square()),
        (robust(), lambda p: cdpo()(p).losses),
        (simpo(), lambda p: simpo(margin=0.0)(p).losses),
        (power(), lambda p: simpo(margin=0.0)(p).losses),
        (orpo(), lambda p: -p.chosen_logprobs / 5 - 0.1 * torch.nn.functional.logsigmoid(column(1.5))),
    ],
    ids=["no reference", "one side only", "wrong sign", "no margin", "no weights", "log-probabilities for odds"],
)
def test_the_worked_numbers_reject_mutations(right: Preference, wrong: Callable[[Pairs], Tensor]) -> None:
    assert abs(right(f3()).losses.item() - wrong(f3()).item()) > 1e-3
