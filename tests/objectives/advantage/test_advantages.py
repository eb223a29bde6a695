"""Worked numbers, and the degenerate rule. Expected gradients: test_unbiased.py."""

from __future__ import annotations

import math

import pytest
import torch

from temper.errors import UserError
from temper.objectives import advantages_of, resolve
from temper.objectives.advantage.advantages import (
    ADVANTAGES,
    batch_std,
    group_mean,
    group_mean_std,
    leave_one_out,
    length_weighted,
    maxrl,
    mgpo,
    per_reward,
    raw,
)
from temper.objectives.advantage.normalizers import whiten

GROUP_BASELINES = [name for name in ADVANTAGES if name != "raw"]
NAN = math.nan


def column(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def parts_of(rewards: list[float]) -> dict[str, torch.Tensor]:
    """One part that is the whole reward, so that per_reward can stand in the tests of all estimators."""
    return {"whole": column(rewards)} if rewards else {}


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        (raw(), [1, 0, 0, 0]),
        (group_mean(), [0.75, -0.25, -0.25, -0.25]),
        (group_mean_std(), [1.499997, -0.499999, -0.499999, -0.499999]),
        (leave_one_out(), [1, -1 / 3, -1 / 3, -1 / 3]),
        (batch_std(), [1.499997, -0.499999, -0.499999, -0.499999]),
        (length_weighted(), [0.625, -0.375, -0.375, -0.375]),
        (maxrl(), [3, -1, -1, -1]),
        (maxrl("success_only"), [4, 0, 0, 0]),
        (maxrl("all_fail_baseline"), [3, -1, -1, -1]),
        (mgpo(1.0, eps=0.0), [1.5 * 0.877383, *[-0.5 * 0.877383] * 3]),
        (mgpo(4.0, eps=0.0), [1.5 * 0.592593, *[-0.5 * 0.592593] * 3]),
        (mgpo(0.0), [1.499997, -0.499999, -0.499999, -0.499999]),
        (per_reward(), [1.499997, -0.499999, -0.499999, -0.499999]),
    ],
    ids=str,
)
def test_advantages_of_f1(credit, advantage, expected) -> None:
    given = credit([1, 0, 0, 0], lengths=torch.tensor([3, 2, 1, 2]), reward_parts=parts_of([1, 0, 0, 0]))
    assert advantage(given).tolist() == pytest.approx(expected, abs=1.1e-6)


def test_std_is_the_unbiased_one(credit) -> None:
    # The population std would give 1.732047.
    assert group_mean_std()(credit([1, 0, 0, 0]))[0].item() == pytest.approx(1.499997, abs=1e-6)


def test_batch_std_keeps_the_size_of_groups_apart(credit) -> None:
    # Std over all six rewards (1, 0, 4, 0, 0, 0): 1.602082. Per group it would be 0.707107 and 2.
    given = batch_std(eps=0.0)(credit([1, 0, 4, 0, 0, 0], [0, 0, 1, 1, 1, 1]))
    expected = [0.5, -0.5, 3, -1, -1, -1]
    assert given.tolist() == pytest.approx([value / 1.602082 for value in expected], abs=1e-6)


@pytest.mark.parametrize("name", GROUP_BASELINES)
def test_groups_without_variance_get_exactly_zero(credit, name) -> None:
    noisy = torch.tensor([0.1] * 7, dtype=torch.float32).double()
    noisy[3] += 1e-9
    rewards = [*noisy.tolist(), 1.0, 0.0]
    given = credit(rewards, [0] * 7 + [1, 1], reward_parts=parts_of(rewards), lengths=torch.arange(1, 10))
    advantages = ADVANTAGES[name]()(given)
    assert advantages[:7].tolist() == [0.0] * 7
    assert advantages[7] > 0 > advantages[8]


def test_dividing_float32_noise_by_its_std_would_make_signal_of_it() -> None:
    # Why the rule exists: this is what the plain formula gives for seven equal rewards.
    rewards = torch.tensor([0.1] * 7, dtype=torch.float32)
    plain = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    assert plain.abs().max().item() == pytest.approx(0.0074, abs=2e-5)


@pytest.mark.parametrize("name", GROUP_BASELINES)
def test_a_group_with_one_scored_member_left_gets_zero(credit, name) -> None:
    given = credit([1.0, 1.0, 0.0], [0, 1, 1], reward_parts=parts_of([1.0, 1.0, 0.0]))
    advantages = ADVANTAGES[name]()(given)
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
@pytest.mark.parametrize("broken", [NAN, math.inf])
def test_a_reward_that_is_no_number_is_refused(credit, name, broken) -> None:
    with pytest.raises(UserError, match=r"trajectory 1 of the batch earned (nan|inf)"):
        ADVANTAGES[name]()(credit([1.0, broken, 0.0], reward_parts=parts_of([1.0, 1.0, 0.0])))


@pytest.mark.parametrize("name", ADVANTAGES)
def test_order_of_members_does_not_matter(credit, name) -> None:
    rewards, ids = [0.3, 1.0, 0.0, 0.7, 0.2, 0.9, 0.4], [0, 0, 1, 1, 1, 2, 2]
    lengths, order = torch.tensor([4, 1, 2, 5, 3, 2, 2]), [5, 2, 0, 6, 3, 1, 4]
    moved = [rewards[i] for i in order]
    plain = ADVANTAGES[name]()(credit(rewards, ids, lengths=lengths, reward_parts=parts_of(rewards)))
    shuffled = ADVANTAGES[name]()(
        credit(moved, [ids[i] for i in order], lengths=lengths[order], reward_parts=parts_of(moved))
    )
    assert torch.allclose(shuffled, plain[order], atol=1e-12, rtol=0)


def test_statistics_over_half_a_group_would_be_noticed(credit) -> None:
    # The bug that the test above guards against: two ranks that each see half of the group.
    rewards = [1.0, 0.0, 0.0, 0.0]
    whole = group_mean()(credit(rewards))
    halves = torch.cat([group_mean()(credit(rewards[:2])), group_mean()(credit(rewards[2:]))])
    assert not torch.allclose(whole, halves)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_an_empty_batch_has_no_advantages(credit, name) -> None:
    assert len(ADVANTAGES[name]()(credit([], []))) == 0


def test_advantages_count_rewards_inside_the_trajectory(credit) -> None:
    given = credit([1.0, 0.0], lengths=torch.tensor([2, 1]), token_rewards=column([0.25, 0.25, 0.5]))
    assert group_mean()(given).tolist() == pytest.approx([0.5, -0.5])


def test_a_trajectory_gives_its_advantage_to_its_drawn_tokens_only(credit) -> None:
    # Observations have no place in Credit: three drawn tokens in a hundred observed ones get three numbers.
    given = advantages_of(resolve("dr_grpo"), credit([1.0, 0.0], lengths=torch.tensor([3, 1])))
    assert given.tokens.tolist() == [0.5, 0.5, 0.5, -0.5]
    assert given.is_kept.tolist() == [True, True]


def test_maxrl_is_zero_without_success_and_minus_one_on_request(credit) -> None:
    failed, solved = credit([0.0, 0.0]), credit([1.0, 1.0])
    assert maxrl()(failed).tolist() == [0.0, 0.0]
    assert maxrl("success_only")(failed).tolist() == [0.0, 0.0]
    assert maxrl("all_fail_baseline")(failed).tolist() == [-1.0, -1.0]
    assert maxrl()(solved).tolist() == maxrl("all_fail_baseline")(solved).tolist() == [0.0, 0.0]
    assert maxrl("success_only")(solved).tolist() == [1.0, 1.0]


def test_maxrl_refuses_negative_rewards_and_unknown_variants(credit) -> None:
    with pytest.raises(UserError, match=r"a return of -0.5 is negative"):
        maxrl()(credit([1.0, -0.5]))
    with pytest.raises(UserError, match='variant="a" is unknown'):
        maxrl("a")


def test_mgpo_looks_most_at_tasks_solved_half_of_the_time(credit) -> None:
    def size(num_solved: int) -> float:
        rewards = [1.0] * num_solved + [0.0] * (8 - num_solved)
        return (mgpo()(credit(rewards)) / group_mean_std()(credit(rewards)))[0].item()

    assert size(4) == pytest.approx(1.0)
    assert size(2) == pytest.approx(0.877383, abs=1e-6) == size(6)
    assert size(1) < size(2) < size(3) < size(4)
    assert mgpo().experimental


def test_per_reward_makes_scales_alike_and_weighs_them(credit) -> None:
    # Both parts have the same shape, one a thousandth of the other: standardised they count alike.
    rewards = [1.001, 0.0, 0.0, 0.0]
    parts = {"big": column([1, 0, 0, 0]), "small": column([0.001, 0, 0, 0])}
    given = credit(rewards, reward_parts=parts, part_weights={"small": 0.5})
    assert per_reward(eps=0.0)(given).tolist() == pytest.approx([2.25, -0.75, -0.75, -0.75])
    assert group_mean_std(eps=0.0)(given).tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5])


def test_per_reward_leaves_out_members_that_lack_a_part(credit) -> None:
    # Group (1, NaN, 0, 0): mean 1/3, unbiased std 0.577350, and the member without it gets 0.
    given = credit([1, 0, 0, 0], reward_parts={"score": column([1, NAN, 0, 0])})
    assert per_reward(eps=0.0)(given).tolist() == pytest.approx([1.154701, 0, -0.577350, -0.577350], abs=1e-6)
    as_zero = credit([1, 0, 0, 0], reward_parts={"score": column([1, 0, 0, 0])})
    assert per_reward(eps=0.0)(as_zero)[1] < 0


def test_per_reward_ignores_a_part_that_is_the_same_for_all_or_that_nobody_has(credit) -> None:
    parts = {"score": column([1, 0]), "format": column([0.1, 0.1]), "none": column([NAN, NAN])}
    assert per_reward(eps=0.0)(credit([1.1, 0.1], reward_parts=parts)).tolist() == pytest.approx([0.707107, -0.707107])


def test_per_reward_needs_parts(credit) -> None:
    with pytest.raises(UserError, match="no parts"):
        per_reward()(credit([1.0, 0.0]))


def test_gdpo_is_per_reward_and_whitening(credit) -> None:
    objective = resolve("grpo", {"advantage": "per_reward", "normalizers": ["whiten"]})
    assert objective.normalizers == (whiten(),)
    given = advantages_of(objective, credit([1, 0, 0, 0], reward_parts=parts_of([1, 0, 0, 0])))
    assert given.tokens.mean().item() == pytest.approx(0.0, abs=1e-12)
    assert given.tokens.square().mean().item() == pytest.approx(1.0)


@pytest.mark.parametrize("build", [group_mean_std, batch_std, mgpo, per_reward])
def test_eps_must_not_be_negative(build) -> None:
    with pytest.raises(UserError, match="eps=-1"):
        build(eps=-1)
