"""Reward terms before credit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from temper.errors import UserError
from temper.objectives import advantages_of, resolve
from temper.objectives.advantage.advantages import group_mean
from temper.objectives.advantage.shaping import (
    SHAPINGS,
    clip_reward,
    exclude_truncated_from_stats,
    kl_in_reward,
    length_exact,
    length_max,
    soft_overlong,
    stop_properly,
)

ARGUMENTS = {
    "length_exact": {"target": 2},
    "length_max": {"target": 2},
    "stop_properly": {"factor": 0.5},
    "clip_reward": {"low": -1.0, "high": 1.0},
    "kl_in_reward": {"coefficient": 0.1},
    "soft_overlong": {"buffer": 2},
}


def column(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_soft_overlong_falls_from_zero_to_minus_one_over_the_buffer(credit) -> None:
    lengths = torch.tensor([10000, 16384, 18432, 20480, 20481])
    shaped = soft_overlong(buffer=4096)(credit([0.0] * 5, lengths=lengths, max_new_tokens=20480))
    assert shaped.rewards.tolist() == pytest.approx([0, 0, -0.5, -1, -1])


def test_soft_overlong_refuses_a_buffer_longer_than_the_answer(credit) -> None:
    with pytest.raises(UserError, match="buffer=4096 is longer than max_new_tokens=64"):
        soft_overlong(buffer=4096)(credit([0.0], max_new_tokens=64))


def test_soft_overlong_punishes_the_last_fifth_unless_told(credit) -> None:
    given = credit([0.0] * 3, lengths=torch.tensor([80, 90, 100]), max_new_tokens=100)
    assert soft_overlong()(given).rewards.tolist() == pytest.approx([0.0, -0.5, -1.0])


def test_soft_overlong_compares_each_turn_with_its_limit_and_all_with_theirs(credit) -> None:
    """Three turns of 60 tokens are far from a limit of 100 a turn; one of 100 is at it. 180 are near 200 in all."""
    turns = [[60, 60, 60], [100], [20, 90], [60, 30]]
    given = credit(
        [0.0] * 4,
        lengths=torch.tensor([sum(sizes) for sizes in turns]),
        turn_ids=torch.tensor([number for sizes in turns for number, size in enumerate(sizes) for _ in range(size)]),
        max_new_tokens=100,
    )
    assert soft_overlong()(given).rewards.tolist() == pytest.approx([0.0, -1.0, -0.5, 0.0])
    bounded = replace(given, max_episode_tokens=200)
    assert soft_overlong()(bounded).rewards.tolist() == pytest.approx([-0.5, -1.0, -0.5, 0.0])
    with pytest.raises(UserError, match="buffer=50 is longer than max_episode_tokens=40"):
        soft_overlong(buffer=50)(replace(given, max_episode_tokens=40))


def test_length_exact_and_length_max_of_a_right_answer_of_1500_tokens(credit) -> None:
    given = credit([1.0, 0.0], lengths=torch.tensor([1500, 1500]), max_new_tokens=4096)
    assert length_exact(1000)(given).rewards.tolist() == pytest.approx([0.85, -0.15], abs=1e-12)
    assert length_max(1000)(given).rewards.tolist() == pytest.approx([0.35, 0.0], abs=1e-12)
    assert length_max(1000, form="repository")(given).rewards.tolist() == pytest.approx([0.425, 0.0], abs=1e-12)


def test_length_max_is_bounded_on_both_sides(credit) -> None:
    given = credit([1.0, 1.0], lengths=torch.tensor([1, 9000]), max_new_tokens=9000)
    assert length_max(4000)(given).rewards.tolist() == [1.0, 0.0]
    assert length_max(4000, form="repository")(given).rewards.tolist() == pytest.approx([1.0, 0.0])


def test_length_max_says_that_its_sources_differ() -> None:
    assert "differ" in length_max(10).experimental
    with pytest.raises(UserError, match='form="code" is unknown'):
        length_max(10, form="code")


def test_stop_properly_changes_truncated_answers_only(credit) -> None:
    given = credit([1.0, 1.0, -1.0], is_truncated=torch.tensor([False, True, True]))
    assert stop_properly(0.25)(given).rewards.tolist() == [1.0, 0.25, -0.25]
    assert stop_properly(0.0)(given).rewards.tolist() == [1.0, 0.0, 0.0]
    assert stop_properly(-0.5)(given).rewards.tolist() == [1.0, -0.5, -0.5]
    with pytest.raises(UserError, match=r"factor=1.5"):
        stop_properly(1.5)


def test_truncated_answers_are_not_scored_as_wrong_unless_asked(credit) -> None:
    given = credit([1.0, 0.0], is_truncated=torch.tensor([True, False]))
    assert group_mean()(given).tolist() == [0.5, -0.5]


def test_excluded_answers_enter_no_mean_and_get_nothing(credit) -> None:
    given = credit([1.0, 0.0, 0.0, 0.0], [0, 0, 0, 1], is_truncated=torch.tensor([False, False, True, False]))
    shaped = exclude_truncated_from_stats()(given)
    # (1, 0) without the third: mean 1/2 and not 1/3. The second group stays a group of its own.
    assert group_mean()(shaped).tolist() == [0.5, -0.5, 0.0, 0.0]
    assert group_mean()(given)[0].item() == pytest.approx(2 / 3)
    assert len(set(shaped.group_ids.tolist())) == 3


def test_a_batch_that_is_all_truncated_has_nothing_to_compare(credit) -> None:
    given = credit([1.0, 0.0, 1.0], is_truncated=torch.ones(3, dtype=torch.bool))
    assert group_mean()(exclude_truncated_from_stats()(given)).tolist() == [0.0, 0.0, 0.0]
    assert stop_properly(-1.0)(given).rewards.tolist() == [-1.0] * 3


def test_clip_reward_bounds_the_outcome_and_not_the_kl(credit) -> None:
    given = credit([3.0, -3.0], token_rewards=column([-5.0, 0.0]))
    shaped = clip_reward(-1.0, 1.0)(given)
    assert shaped.rewards.tolist() == [1.0, -1.0]
    assert shaped.returns.tolist() == [-4.0, -1.0]
    with pytest.raises(UserError, match=r"low=1.0 must be below high=0.0"):
        clip_reward(1.0, 0.0)


def test_kl_in_reward_pays_at_each_token_and_subtracts_the_sum(credit) -> None:
    distance = column([0.1, -0.05, 0.2, 0.4])
    given = credit(
        [1.0, 0.0],
        lengths=torch.tensor([3, 1]),
        proximal_logprobs=distance - 1.0,
        reference_logprobs=torch.full_like(distance, -1.0),
    )
    shaped = kl_in_reward(0.1)(given)
    assert shaped.token_rewards.tolist() == pytest.approx([-0.01, 0.005, -0.02, -0.04])
    assert shaped.returns.tolist() == pytest.approx([1 - 0.025, -0.04])
    twice = kl_in_reward(0.1)(replace(given, scales={"kl_in_reward": 2.0}))
    assert twice.returns.tolist() == pytest.approx([1 - 0.05, -0.08])


def test_kl_in_reward_declares_both_passes() -> None:
    assert kl_in_reward(0.05).needs == {"reference", "proximal"}


def test_penalties_come_before_group_statistics(credit) -> None:
    # Shaped rewards (1, 0, 0, -0.5): applied after the normalisation, the penalty would not move the group's mean.
    shaped = resolve("dr_grpo", {"shaping": [{"name": "soft_overlong", "buffer": 2}]})
    given = credit([1, 0, 0, 0], lengths=torch.tensor([1, 1, 1, 3]))
    advantages = advantages_of(shaped, given).tokens
    assert advantages.tolist() == pytest.approx([0.875, -0.125, -0.125, -0.625, -0.625, -0.625])
    penalty = soft_overlong(buffer=2)(replace(given, rewards=torch.zeros(4, dtype=torch.float64))).rewards
    applied_late = given.spread(group_mean()(given) + penalty)
    assert not torch.allclose(advantages, applied_late)


def test_the_registry_is_in_the_order_of_the_page(credit) -> None:
    # Length terms, truncation, clip range, KL. In another order the result differs: -1 here, if clipped first -1.15.
    places = {name: place for place, name in enumerate(SHAPINGS)}
    assert places["length_exact"] < places["stop_properly"] < places["clip_reward"] < places["kl_in_reward"]
    given = credit([-1.0], lengths=torch.tensor([1500]), max_new_tokens=2000)
    ordered = clip_reward(-1.0, 1.0)(length_exact(1000)(given)).rewards.item()
    reversed_order = length_exact(1000)(clip_reward(-1.0, 1.0)(given)).rewards.item()
    assert (ordered, reversed_order) == (-1.0, pytest.approx(-1.15))


@pytest.mark.parametrize("name", SHAPINGS)
def test_shaping_follows_the_order_of_trajectories_and_changes_no_argument(credit, name) -> None:
    lengths, order = torch.tensor([1, 3, 2]), [2, 0, 1]
    inside = [column([0.1]), column([0.2, -0.3, 0.5]), column([-0.2, 0.9])]
    shape = SHAPINGS[name](**ARGUMENTS.get(name, {}))

    def make(places: list[int]):
        logprobs = torch.cat([inside[place] for place in places])
        return credit(
            [[1.0, 0.5, -2.0][place] for place in places],
            [[0, 0, 1][place] for place in places],
            lengths=lengths[places],
            is_truncated=torch.tensor([False, True, False])[places],
            token_rewards=logprobs,
            proximal_logprobs=logprobs,
            reference_logprobs=2 * logprobs,
        )

    given = make([0, 1, 2])
    before = given.returns.clone()
    assert torch.allclose(shape(make(order)).returns, shape(given).returns[order])
    assert torch.equal(given.returns, before)


@pytest.mark.parametrize("name", SHAPINGS)
def test_shaping_an_empty_batch_is_nothing(credit, name) -> None:
    nothing = column([])
    given = credit([], [], proximal_logprobs=nothing, reference_logprobs=nothing)
    assert len(SHAPINGS[name](**ARGUMENTS.get(name, {}))(given).rewards) == 0
