"""Worked numbers of specification 1.2 and 1.3, and the degenerate rule."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from temper.objectives.advantages import ADVANTAGES, batch_std, group_mean, group_mean_std, leave_one_out, raw

GROUP_BASELINES = ["group_mean", "group_mean_std", "leave_one_out", "batch_std"]


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        (raw(), [1, 0, 0, 0]),
        (group_mean(), [0.75, -0.25, -0.25, -0.25]),
        (group_mean_std(), [1.499997, -0.499999, -0.499999, -0.499999]),
        (leave_one_out(), [1, -1 / 3, -1 / 3, -1 / 3]),
        (batch_std(), [1.499997, -0.499999, -0.499999, -0.499999]),
    ],
    ids=str,
)
def test_advantages_of_f1(credit, advantage, expected) -> None:
    assert advantage(credit([1, 0, 0, 0])).tolist() == pytest.approx(expected, abs=1.1e-6)


def test_std_is_the_unbiased_one(credit) -> None:
    # The population std would give 1.732047.
    assert group_mean_std()(credit([1, 0, 0, 0]))[0].item() == pytest.approx(1.499997, abs=1e-6)


@pytest.mark.parametrize("name", GROUP_BASELINES)
def test_groups_without_variance_get_exactly_zero(credit, name) -> None:
    noisy = torch.tensor([0.1] * 7, dtype=torch.float32).double()
    noisy[3] += 1e-9
    rewards = [*noisy.tolist(), 1.0, 0.0]
    advantages = ADVANTAGES[name]()(credit(rewards, [0] * 7 + [1, 1]))
    assert advantages[:7].tolist() == [0.0] * 7
    assert advantages[7] > 0 > advantages[8]


def test_dividing_float32_noise_by_its_std_would_make_signal_of_it() -> None:
    # Why the rule exists: this is what the plain formula gives for seven equal rewards.
    rewards = torch.tensor([0.1] * 7, dtype=torch.float32)
    plain = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    assert plain.abs().max().item() == pytest.approx(0.0074, abs=2e-5)


@pytest.mark.parametrize("name", GROUP_BASELINES)
def test_a_group_with_one_scored_member_left_gets_zero(credit, name) -> None:
    advantages = ADVANTAGES[name]()(credit([1.0, 1.0, 0.0], [0, 1, 1]))
    assert advantages[0].item() == 0.0
    assert advantages.isfinite().all()


@pytest.mark.parametrize("name", GROUP_BASELINES)
def test_group_baselines_need_two_members_and_raw_needs_one(name) -> None:
    assert ADVANTAGES[name]().min_group == 2
    assert raw().min_group == 1


def test_unscorable_members_are_not_zeros(credit) -> None:
    # (1, NaN, 0, 0): the NaN member is left out, so the mean is 1/3 and not 1/4.
    assert group_mean()(credit([1, 0, 0])).tolist() == pytest.approx([2 / 3, -1 / 3, -1 / 3])


@pytest.mark.parametrize("name", ADVANTAGES)
def test_order_of_members_does_not_matter(credit, name) -> None:
    rewards, ids = [0.3, 1.0, 0.0, 0.7, 0.2, 0.9, 0.4], [0, 0, 1, 1, 1, 2, 2]
    order = [5, 2, 0, 6, 3, 1, 4]
    plain = ADVANTAGES[name]()(credit(rewards, ids))
    shuffled = ADVANTAGES[name]()(credit([rewards[i] for i in order], [ids[i] for i in order]))
    assert torch.allclose(shuffled, plain[order], atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_an_empty_batch_has_no_advantages(credit, name) -> None:
    assert len(ADVANTAGES[name]()(credit([], []))) == 0


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [(raw(), 1.0), (leave_one_out(), 1.0), (group_mean(), 2 / 3), (group_mean_std(eps=0.0), 1.154701)],
    ids=str,
)
def test_expected_gradient_by_enumeration(credit, advantage, expected) -> None:
    """Bernoulli p = 0.3, three samples: 1 is unbiased, the others are the documented bias."""
    p, total = 0.3, 0.0
    for outcome in itertools.product([0.0, 1.0], repeat=3):
        probability = math.prod(p if x else 1 - p for x in outcome)
        scores = [(x - p) / (p * (1 - p)) for x in outcome]
        given = advantage(credit(list(outcome))).tolist()
        total += probability * sum(a * s for a, s in zip(given, scores, strict=True)) / 3
    assert total == pytest.approx(expected, abs=1e-6)
