"""Sampler corrections: worked numbers on F1."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from temper.errors import UserError
from temper.objectives import Tokens, measure_batch, objective_loss, resolve
from temper.objectives.policy.corrections import (
    CORRECTIONS,
    batch_normalize,
    geometric_keep,
    kept_denominator,
    kl_keep,
    m2po,
    opsm,
    sequence_mis,
    sequence_tis,
    token_importance,
    token_mis,
    token_tis,
    veto,
)

RHO = [1.041667, 1.25, 1.142857, 1, 5, 0.975610, 1, 0.833333]
REQUIRED = {"kl_keep": {"high": 0.1}, "m2po": {"threshold": 0.02}}
LEVELS = ["token", "sum", "mean", "max"]


def by_length(values):
    return [value for value, length in zip(values, [3, 2, 1, 2], strict=True) for _ in range(length)]


def with_corrections(*corrections, preset="dapo"):
    return dataclasses.replace(resolve(preset), corrections=corrections)


def multipliers(tokens, *corrections) -> list[float]:
    """Product of the corrections, those over the whole batch included."""
    objective = with_corrections(*corrections)
    tokens = dataclasses.replace(tokens, measured=measure_batch(objective, tokens))
    product = torch.ones_like(tokens.weights)
    for correct in corrections:
        product = product * correct(tokens).multiplier
    return product.tolist()


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        (token_importance(), RHO),
        (token_tis(), [*RHO[:4], 2.0, *RHO[5:]]),
        (token_mis(high=2.0), [*RHO[:4], 0.0, *RHO[5:]]),
        (token_mis(high=10.0), RHO),
        (sequence_tis(), by_length([1.488095, 2.0, 0.975610, 0.833333])),
        (sequence_tis(cap=10.0), by_length([1.488095, 5.0, 0.975610, 0.833333])),
        (sequence_mis(), by_length([1.488095, 0.0, 0.975610, 0.833333])),
        (geometric_keep(low=0.9, high=1.2), by_length([1, 0, 1, 1])),
        (geometric_keep(low=0.9, high=2.23607), by_length([1, 1, 1, 1])),
        (geometric_keep(low=0.9, high=2.23606), by_length([1, 0, 1, 1])),
        (veto(), [1.0] * 8),
        (veto(threshold=0.9), by_length([1, 1, 1, 0])),
        (opsm(), [1.0] * 8),
        (opsm(threshold=0.05), by_length([1, 0, 1, 1])),
        (m2po(threshold=0.02), [1, 1, 1, 1, 0, 1, 1, 1]),
        (m2po(threshold=0.337), [1.0] * 8),
        (m2po(threshold=1e-9), [0, 0, 0, 1, 0, 0, 1, 0]),
    ],
    ids=str,
)
def test_multipliers_on_f1(f1, correction, expected) -> None:
    assert multipliers(f1(), correction) == pytest.approx(expected, abs=1e-6)


def test_kl_rejection_is_by_hand_arithmetic_at_every_level(f1) -> None:
    log_rho = torch.tensor(RHO, dtype=torch.float64).log()
    values = {"k2": log_rho.square() / 2, "k3": log_rho.exp() - 1 - log_rho}
    reduce = {"sum": torch.sum, "mean": torch.mean, "max": torch.amax}
    for estimator, kl_T in values.items():
        for level in LEVELS:
            parts = kl_T.split([3, 2, 1, 2])
            judged = kl_T.tolist() if level == "token" else by_length([reduce[level](part).item() for part in parts])
            for high in (0.01, 0.02, 0.03, 0.5, 2.0, 3.0):
                expected = [float(value <= high) for value in judged]
                assert multipliers(f1(), kl_keep(high, estimator, level)) == expected, (estimator, level, high)


def test_opsm_looks_at_the_sampler_the_current_policy_and_the_sign_of_the_advantage(f1) -> None:
    # With pi_old as the base y2's mean gap is 0.857399 and it is dropped; with mu nothing is.
    tokens = f1()
    old = dataclasses.replace(tokens, behavior_logprobs=tokens.proximal_logprobs)
    assert multipliers(old, opsm()) == by_length([1, 0, 1, 1])
    assert multipliers(old, opsm(threshold=0.8574)) == [1.0] * 8
    assert multipliers(dataclasses.replace(old, advantages=-old.advantages), opsm()) == [1.0] * 8
    gaps = tokens.mean_by_trajectory(tokens.behavior_logprobs - tokens.policy_logprobs.detach())
    assert gaps.tolist() == pytest.approx([-0.180532, 0.052680, -0.070618, -0.655291], abs=1e-6)


def test_m2po_brings_the_second_moment_below_the_threshold(f1) -> None:
    tokens = f1()
    square_T = (tokens.behavior_logprobs - tokens.proximal_logprobs).square()
    kept_T = torch.tensor(multipliers(tokens, m2po(threshold=0.02))).bool()
    assert square_T.mean().item() == pytest.approx(0.336679, abs=1e-6)
    assert square_T[kept_T].mean().item() == pytest.approx(0.014734, abs=1e-6)


def test_m2po_breaks_ties_by_the_order_of_the_batch(f1) -> None:
    tokens = f1(dtype=torch.float32)
    tokens = dataclasses.replace(tokens, behavior_logprobs=tokens.proximal_logprobs - 1.0)
    assert multipliers(tokens, m2po(threshold=0.5)) == [0.0] * 8  # all equal and too large: none can stay
    one_good = tokens.behavior_logprobs.clone()
    one_good[6] += 1.0
    kept = multipliers(dataclasses.replace(tokens, behavior_logprobs=one_good), m2po(threshold=0.7))
    assert kept == [1, 1, 0, 0, 0, 0, 1, 0]


def test_batch_normalize_makes_the_mean_weight_one(f1) -> None:
    by_token = multipliers(f1(), token_tis(), batch_normalize())
    assert sum(by_token) / 8 == pytest.approx(1.0)
    mean = (sum(RHO) - 3) / 8
    assert by_token[4] == pytest.approx(2.0 / mean, abs=1e-6)
    by_sequence = multipliers(f1(), sequence_tis(), batch_normalize(level="sequence"))
    assert sum(by_sequence[place] for place in (0, 3, 5, 6)) / 4 == pytest.approx(1.0)


def test_the_place_of_batch_wide_rules_in_the_list_does_not_matter(f1) -> None:
    rules = (m2po(0.02), token_tis(), batch_normalize())
    first, second = multipliers(f1(), *rules), multipliers(f1(), *reversed(rules))
    assert first == pytest.approx(second)
    assert first[4] == 0.0
    assert sum(first) / 8 == pytest.approx(1.0)


@pytest.mark.parametrize("rule", [batch_normalize(), batch_normalize(level="sequence"), kept_denominator()], ids=str)
def test_rescaling_a_batch_that_was_dropped_whole_stays_finite(f1, rule) -> None:
    assert multipliers(f1(), m2po(threshold=1e-300), geometric_keep(low=5.0, high=6.0), rule) == [0.0] * 8
    assert multipliers(f1(), rule) == pytest.approx([1.0] * 8)


def test_kept_denominator_is_the_mean_over_kept_tokens(f1) -> None:
    plain, kept = with_corrections(token_mis(high=2.0)), with_corrections(token_mis(high=2.0), kept_denominator())
    losses = []
    for objective in (plain, kept):
        tokens = f1(weighting=objective.weighting)
        tokens = dataclasses.replace(tokens, measured=measure_batch(objective, tokens))
        losses.append(objective_loss(objective, tokens)[0].item())
    assert losses[1] == pytest.approx(losses[0] * 8 / 7)


def test_making_up_for_dropped_tokens_twice_is_refused(f1) -> None:
    with pytest.raises(UserError, match="Use one of them"):
        multipliers(f1(), token_mis(), batch_normalize(), kept_denominator())


def test_acted_marks_what_was_truncated_or_rejected(f1) -> None:
    assert token_tis()(f1()).acted.tolist() == [False] * 4 + [True] + [False] * 3
    assert sequence_mis()(f1()).acted.tolist() == by_length([False, True, False, False])
    assert not token_importance()(f1()).acted.any()


@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize("gap", [-500.0, 500.0])
def test_multipliers_carry_no_gradient_and_survive_absurd_gaps(f1, name, gap) -> None:
    tokens = f1(dtype=torch.float32)
    tokens = dataclasses.replace(tokens, behavior_logprobs=tokens.proximal_logprobs + gap)
    correction = CORRECTIONS[name](**REQUIRED.get(name, {}))
    tokens = dataclasses.replace(tokens, measured=measure_batch(with_corrections(correction), tokens))
    multiplier_T = correction(tokens).multiplier
    assert not multiplier_T.requires_grad
    assert multiplier_T.isfinite().all()
    assert multiplier_T.dtype == torch.float32


def test_truncation_and_masking_are_biased_by_the_documented_amount() -> None:
    # Every token of a 3-token vocabulary once: sums under mu are exact expectations. The true value is 0.6.
    mu, pi, advantage = (torch.tensor(x).double() for x in ([0.6, 0.3, 0.1], [0.5, 0.3, 0.2], [1.0, -1.0, 2.0]))
    tokens = Tokens(
        policy_logprobs=pi.log(),
        proximal_logprobs=pi.log(),
        behavior_logprobs=mu.log(),
        advantages=advantage,
        weights=mu,
        trajectory_ids=torch.arange(3),
        num_trajectories=3,
        num_batch_tokens=3,
        versions=torch.zeros(3, dtype=torch.int64),
    )
    corrections = (token_importance(), token_tis(cap=1.5), token_mis(low=0.0, high=1.5))
    values = [(mu * correct(tokens).multiplier * advantage).sum().item() for correct in corrections]
    assert values == pytest.approx([0.6, 0.5, 0.2])


def test_impossible_settings_are_refused() -> None:
    for build in (token_mis, sequence_mis, geometric_keep):
        with pytest.raises(UserError, match="must be ordered"):
            build(low=2.0, high=1.0)
    for build, settings, message in [
        (veto, {"threshold": 0.0}, "threshold=0"),
        (kl_keep, {"high": 0.0}, "high=0.0 must be positive"),
        (kl_keep, {"high": 1.0, "estimator": "k1"}, 'estimator="k1" is unknown'),
        (kl_keep, {"high": 1.0, "level": "median"}, 'level="median" is unknown'),
        (m2po, {"threshold": 0.0}, "threshold=0.0 must be positive"),
        (batch_normalize, {"level": "group"}, 'level="group" is unknown'),
    ]:
        with pytest.raises(UserError, match=message):
            build(**settings)


def test_needs_and_doubts_are_declared() -> None:
    assert {name for name, build in CORRECTIONS.items() if "batch" in build(**REQUIRED.get(name, {})).needs} == {
        "m2po",
        "batch_normalize",
        "kept_denominator",
    }
    assert "not public" in opsm().experimental


@pytest.mark.parametrize(("member", "mean"), enumerate([1.141678, 2.236068, 0.975610, 0.912871]))
def test_geometric_keep_bounds_the_geometric_mean_as_worked_out(f1, member, mean) -> None:
    tokens = f1()
    inside = geometric_keep(low=mean - 2e-6, high=mean + 2e-6)(tokens).multiplier
    assert set(tokens.trajectory_ids[inside > 0].tolist()) == {member}
    assert not geometric_keep(low=mean + 2e-6, high=mean + 4e-6)(tokens).multiplier.any()


@pytest.mark.parametrize("base", ["behavior", "proximal"])
def test_opsm_bounds_the_mean_log_ratio_as_worked_out(f1, base) -> None:
    """Worked numbers; with pi_old as the base the means are those of the second list."""
    means = {"behavior": [-0.180532, 0.052680, -0.070618, -0.655291]}
    means["proximal"] = [-0.048033, 0.857399, -0.095310, -0.746452]
    tokens = f1()
    if base == "proximal":
        tokens = dataclasses.replace(tokens, behavior_logprobs=tokens.proximal_logprobs)
    for member in (1, 2, 3):  # those with a negative advantage
        mean = means[base][member]
        for threshold, is_kept in ((mean - 2e-6, False), (mean + 2e-6, True)):
            kept = opsm(threshold=threshold)(tokens).multiplier[tokens.trajectory_ids == member]
            assert bool(kept.all()) == is_kept
    assert opsm(threshold=-1.0)(tokens).multiplier[tokens.trajectory_ids == 0].all(), "good answers stay"
