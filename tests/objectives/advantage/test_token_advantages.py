"""Credit inside a trajectory. Expected gradients: test_unbiased.py."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from temper.errors import UserError
from temper.objectives import Credit
from temper.objectives.advantage.shaping import kl_in_reward
from temper.objectives.advantage.token_advantages import (
    TOKEN_ADVANTAGES,
    discounted_sums,
    distillation,
    gae,
    gae_by_length,
    greedy_baseline,
    lambda_by_length,
    returns_to_go,
    state_returns,
    step_values,
    turn_returns,
)

LENGTHS = [3, 1, 5, 2]


def column(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def full_credit(credit, order: list[int] | None = None) -> Credit:
    """Four trajectories with every column, in the given order."""
    generator = torch.Generator().manual_seed(7)
    names = ("token_rewards", "values", "step_values", "behavior_logprobs", "teacher_logprobs")
    drawn = {name: torch.randn(sum(LENGTHS), generator=generator, dtype=torch.float64) for name in names}
    drawn["step_ids"] = torch.tensor([0, 0, 1, 0, 0, 1, 1, 2, 2, 0, 0])
    drawn["turn_ids"], drawn["turn_rewards"] = drawn["step_ids"], 0.1 * torch.arange(11).double()
    drawn["turn_states"] = drawn["step_ids"] % 2
    order = order or [0, 1, 2, 3]
    tokens = torch.cat([torch.arange(sum(LENGTHS)).split(LENGTHS)[place] for place in order])
    return credit(
        [[1.0, 0.0, 0.5, -1.0][place] for place in order],
        [[0, 0, 1, 1][place] for place in order],
        lengths=torch.tensor(LENGTHS)[order],
        is_truncated=torch.tensor([False, True, True, False])[order],
        greedy_rewards=column([0.3, 0.3, 0.9, 0.9])[order],
        **{name: values[tokens] for name, values in drawn.items()},
    )


def slow_gae(given: Credit, gamma: float, lam: float, bootstraps: bool) -> list[float]:
    """The recursion of gae, token by token."""
    result, end = [], 0
    for length, reward, cut in zip(given.lengths.tolist(), given.rewards.tolist(), given.is_truncated, strict=True):
        start, end = end, end + length
        values, inside = given.values[start:end].tolist(), given.token_rewards[start:end].tolist()
        inside[-1] += reward
        following, carried, own = values[-1] if bootstraps and cut else 0.0, 0.0, []
        for value, paid in zip(reversed(values), reversed(inside), strict=True):
            carried = paid + gamma * following - value + gamma * lam * carried
            following = value
            own.append(carried)
        result += reversed(own)
    return result


def test_gae_of_three_tokens(credit) -> None:
    given = credit([1.0], lengths=torch.tensor([3]), values=column([0.2, 0.5, 0.7]))
    assert gae()(given).tolist() == pytest.approx([0.76075, 0.485, 0.3], abs=1e-12)


@pytest.mark.parametrize("bootstraps", [0, 1])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (1.0, 0.0), (0.99, 1.0)])
def test_gae_is_the_recursion(credit, gamma, lam, bootstraps) -> None:
    given = full_credit(credit)
    assert gae(gamma, lam, bootstraps)(given).tolist() == pytest.approx(slow_gae(given, gamma, lam, bool(bootstraps)))


def test_the_check_of_gae_rejects_credit_that_leaks_into_the_next_trajectory(credit) -> None:
    given = full_credit(credit)
    merged = credit([given.rewards[-1].item()], lengths=given.lengths.sum()[None], values=given.values)
    assert not torch.allclose(gae()(merged), column(slow_gae(given, 1.0, 0.95, False)))


def test_a_truncated_answer_bootstraps_from_its_last_state_only_when_asked(credit) -> None:
    given = credit(
        [0.0, 0.0],
        lengths=torch.tensor([2, 2]),
        values=column([0.5, 0.8, 0.5, 0.8]),
        is_truncated=torch.tensor([True, False]),
    )
    assert gae(lam=0.0)(given).tolist() == pytest.approx([0.3, -0.8, 0.3, -0.8])
    assert gae(lam=0.0, bootstrap_truncated=1)(given).tolist() == pytest.approx([0.3, 0.0, 0.3, -0.8])
    with pytest.raises(UserError, match="bootstrap_truncated=2"):
        gae(bootstrap_truncated=2)


def test_lambda_by_length_of_vapo() -> None:
    assert lambda_by_length(torch.tensor([20, 100, 1000]), 0.05).tolist() == pytest.approx([0, 0.8, 0.98])
    assert lambda_by_length(torch.tensor([1, 7]), 0.05).tolist() == [0.0, 0.0]


def test_gae_by_length_is_gae_with_the_lambda_of_each_length(credit) -> None:
    given = full_credit(credit)
    by_length = gae_by_length(gamma=0.9, alpha=0.4)(given)
    # 1 - 1/(0.4 T) for T = 3, 1, 5, 2, floored at 0.
    for place, lam in enumerate([1 - 1 / 1.2, 0.0, 0.5, 0.0]):
        own = given.owners == place
        assert by_length[own].tolist() == pytest.approx(gae(0.9, lam)(given)[own].tolist())


def test_returns_to_go_of_reinforce_plus_plus(credit) -> None:
    given = credit(
        [1.0],
        lengths=torch.tensor([3]),
        proximal_logprobs=column([0.1, -0.05, 0.2]),
        reference_logprobs=column([0.0, 0.0, 0.0]),
    )
    assert returns_to_go()(kl_in_reward(0.1)(given)).tolist() == pytest.approx([0.975, 0.985, 0.98])


def test_returns_to_go_discount_the_future(credit) -> None:
    given = credit([1.0, 2.0], lengths=torch.tensor([3, 1]), token_rewards=column([0.0, 4.0, 0.0, 1.0]))
    assert returns_to_go(gamma=0.5)(given).tolist() == [2.25, 4.5, 1.0, 3.0]


def test_greedy_baseline_subtracts_the_reward_of_the_greedy_answer(credit) -> None:
    given = credit(
        [1.0, 0.0],
        lengths=torch.tensor([2, 1]),
        token_rewards=column([-0.1, 0.0, 0.2]),
        greedy_rewards=column([0.5, 0.25]),
    )
    assert greedy_baseline()(given).tolist() == pytest.approx([0.4, 0.5, -0.05])
    assert greedy_baseline().needs == {"greedy"}


def test_step_values_of_vineppo(credit) -> None:
    # Four steps of 1, 2, 1 and 2 tokens with values (.25, .5, .25, .75), reward 1.
    steps = torch.tensor([0, 1, 1, 2, 3, 3])
    given = credit([1.0], lengths=torch.tensor([6]), step_ids=steps, step_values=column([0.25, 0.5, 0.25, 0.75])[steps])
    assert step_values()(given).tolist() == pytest.approx([0.25, -0.25, -0.25, 0.5, 0.25, 0.25])


def test_steps_of_neighbouring_trajectories_are_not_merged(credit) -> None:
    # Both have a single step numbered 0: the second must not continue the first.
    given = credit(
        [1.0, 0.0],
        lengths=torch.tensor([2, 1]),
        step_ids=torch.tensor([0, 0, 0]),
        step_values=column([0.4, 0.4, 0.3]),
    )
    assert step_values()(given).tolist() == pytest.approx([0.6, 0.6, -0.3])


def test_rewards_inside_a_step_belong_to_it(credit) -> None:
    given = credit(
        [1.0],
        lengths=torch.tensor([3]),
        step_ids=torch.tensor([0, 0, 1]),
        step_values=column([0.5, 0.5, 0.75]),
        token_rewards=column([0.1, 0.2, 0.0]),
    )
    assert step_values()(given).tolist() == pytest.approx([0.55, 0.55, 0.25])


def test_distillation_of_f4(credit) -> None:
    student, teacher = column([0.5, 0.3, 0.2]).log(), column([0.2, 0.5, 0.3]).log()
    given = credit([0.0], lengths=torch.tensor([3]), behavior_logprobs=student, teacher_logprobs=teacher)
    expected = [-0.916291, 0.510826, 0.405465]
    assert distillation()(given).tolist() == pytest.approx(expected, abs=1e-6)
    assert distillation(coefficient=2.0)(given).tolist() == pytest.approx([2 * value for value in expected], abs=2e-6)
    to_go = distillation(discount=0.5)(given)
    assert to_go[1].item() == pytest.approx(0.510826 + 0.5 * 0.405465, abs=1e-6)


def test_a_token_that_the_teacher_rules_out_has_a_finite_advantage(credit) -> None:
    given = credit(
        [0.0], lengths=torch.tensor([2]), behavior_logprobs=column([-1, -1]), teacher_logprobs=column([-1, -math.inf])
    )
    assert distillation()(given).tolist() == [0.0, -20.0]


def test_discounted_sums_hold_for_long_trajectories(credit) -> None:
    given = credit([0.0, 0.0], lengths=torch.tensor([5000, 777]))
    sums = discounted_sums(torch.ones(5777, dtype=torch.float64), 0.999, given.lengths)
    left = torch.cat([torch.arange(5000, 0, -1), torch.arange(777, 0, -1)]).double()
    assert torch.allclose(sums, (1 - 0.999**left) / (1 - 0.999), atol=1e-9)


@pytest.mark.parametrize("name", TOKEN_ADVANTAGES)
def test_advantages_follow_the_order_of_trajectories(credit, name) -> None:
    order = [2, 0, 3, 1]
    plain = TOKEN_ADVANTAGES[name]()(full_credit(credit)).split(LENGTHS)
    moved = TOKEN_ADVANTAGES[name]()(full_credit(credit, order))
    assert torch.allclose(moved, torch.cat([plain[place] for place in order]), atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", TOKEN_ADVANTAGES)
def test_an_empty_batch_has_no_token_advantages(credit, name) -> None:
    nothing = column([])
    names = ("values", "step_values", "behavior_logprobs", "teacher_logprobs", "greedy_rewards")
    ids = dict.fromkeys(("step_ids", "turn_ids", "turn_states"), torch.tensor([], dtype=torch.int64))
    given = credit([], [], turn_rewards=nothing, **ids, **dict.fromkeys(names, nothing))
    assert len(TOKEN_ADVANTAGES[name]()(given)) == 0


def test_trajectories_of_one_token_have_their_reward_less_the_baseline(credit) -> None:
    given = credit([1.0, 0.0], values=column([0.25, 0.5]), greedy_rewards=column([0.5, 0.5]))
    assert returns_to_go()(given).tolist() == [1.0, 0.0]
    assert greedy_baseline()(given).tolist() == [0.5, -0.5]
    assert gae()(given).tolist() == gae_by_length()(given).tolist() == [0.75, -0.5]


def test_needs_are_declared() -> None:
    needs = {name: set(build().needs) for name, build in TOKEN_ADVANTAGES.items()}
    assert needs == {
        "returns_to_go": set(),
        "greedy_baseline": {"greedy"},
        "gae": {"values"},
        "gae_by_length": {"values"},
        "step_values": {"step_values"},
        "distillation": {"teacher"},
        "turn_returns": {"turns"},
        "state_returns": {"turns"},
    }


@pytest.mark.parametrize("build", [returns_to_go, greedy_baseline, gae, gae_by_length])
def test_gamma_must_be_a_share(build) -> None:
    with pytest.raises(UserError, match=r"gamma=1.5 must be between 0 and 1"):
        build(gamma=1.5)


def test_what_is_not_finite_is_refused(credit) -> None:
    with pytest.raises(UserError, match="trajectory 0 of the batch earned nan"):
        returns_to_go()(credit([math.nan]))
    with pytest.raises(UserError, match="1 values of the critic are not finite"):
        gae()(credit([1.0, 0.0], values=column([math.nan, 0.0])))


def test_turns_are_credited_by_what_they_and_later_ones_were_paid(credit) -> None:
    """Two members: paid (1, 0) and (0, 1) over two turns of two and one tokens."""
    given = credit(
        [1.0, 1.0],
        lengths=torch.tensor([3, 3]),
        turn_ids=torch.tensor([0, 0, 1, 0, 0, 1]),
        turn_rewards=torch.tensor([0, 1.0, 0, 0, 0, 1.0], dtype=torch.float64),
    )
    assert turn_returns()(given).tolist() == [0, 0, -0.5, 0, 0, 0.5]
    assert turn_returns(gamma=0.5)(given).tolist() == [0.25, 0.25, -0.5, -0.25, -0.25, 0.5]


def test_a_member_alone_in_a_turn_has_nothing_to_be_compared_with(credit) -> None:
    given = credit(
        [1.0, 0.0],
        lengths=torch.tensor([2, 1]),
        turn_ids=torch.tensor([0, 1, 0]),
        turn_rewards=torch.tensor([0, 1.0, 0], dtype=torch.float64),
    )
    assert turn_returns()(given).tolist() == [0.5, 0.0, -0.5]


def test_without_payment_per_turn_credit_is_the_groups_mean(credit) -> None:
    given = credit([1.0, 0.0], lengths=torch.tensor([2, 1]), turn_ids=torch.tensor([0, 1, 0]))
    assert turn_returns()(given).tolist() == [0.5, 0.5, -0.5]


def test_the_outcome_is_mixed_into_the_credit_of_turns_when_asked_for(credit) -> None:
    """Paid (1, 0) and (0, 0) by turn; outcomes 1 and 0, so half of +-0.5 is added to every turn."""
    given = credit(
        [1.0, 0.0],
        lengths=torch.tensor([2, 2]),
        turn_ids=torch.tensor([0, 1, 0, 1]),
        turn_rewards=torch.tensor([1.0, 0, 0, 0], dtype=torch.float64),
    )
    assert turn_returns()(given).tolist() == [0.5, 0, -0.5, 0]
    assert turn_returns(outcome=0.5)(given).tolist() == [0.75, 0.25, -0.75, -0.25]
    assert turn_returns(gamma=0)(given).tolist() == [0.5, 0, -0.5, 0], "each turn by what it was paid"


def test_what_earlier_turns_were_paid_counts_for_later_ones_as_much_as_asked_for(credit) -> None:
    """Paid (1, 0) and (0, 1) by turn. past = 1: both turns have the whole return, which is equal. past = 0.5: second
    turns have 0 + 0.5 and 1 + 0."""
    given = credit(
        [1.0, 1.0],
        lengths=torch.tensor([2, 2]),
        turn_ids=torch.tensor([0, 1, 0, 1]),
        turn_rewards=torch.tensor([1.0, 0, 0, 1.0], dtype=torch.float64),
    )
    assert turn_returns(past=0)(given).tolist() == turn_returns()(given).tolist() == [0, -0.5, 0, 0.5]
    assert turn_returns(past=0.5)(given).tolist() == [0, -0.25, 0, 0.25]
    assert turn_returns(past=1)(given).tolist() == [0, 0, 0, 0]
    assert turn_returns(past=1, gamma=0.5)(given).tolist() == [0.25, -0.25, -0.25, 0.25]


@pytest.mark.parametrize(("gamma", "past"), [(1.0, 1.0), (0.9, 0.3), (0.5, 1.0), (0.0, 1.0)])
def test_returns_with_a_past_are_those_summed_turn_by_turn(credit, gamma: float, past: float) -> None:
    """Two groups; members with one to four turns of one to three tokens; any token may be paid."""
    draws = random.Random(7)
    sizes = [[draws.randint(1, 3) for _ in range(draws.randint(1, 4))] for _ in range(6)]
    groups = [0, 0, 0, 1, 1, 1]
    paid = [[[draws.uniform(-1, 1) for _ in range(size)] for size in turns] for turns in sizes]
    given = credit(
        [0.0] * 6,
        groups,
        lengths=torch.tensor([sum(turns) for turns in sizes]),
        turn_ids=torch.tensor([turn for turns in sizes for turn, size in enumerate(turns) for _ in range(size)]),
        turn_rewards=torch.tensor([x for turns in paid for turn in turns for x in turn], dtype=torch.float64),
    )
    worth = [
        [
            sum(
                sum(other) * gamma ** abs(place - turn) * (past if place < turn else 1)
                for place, other in enumerate(turns)
            )
            for turn in range(len(turns))
        ]
        for turns in paid
    ]
    expected = []
    for member, turns in enumerate(sizes):
        for turn, size in enumerate(turns):
            peers = [
                worth[other][turn] for other in range(6) if groups[other] == groups[member] and turn < len(sizes[other])
            ]
            expected += [worth[member][turn] - sum(peers) / len(peers)] * size
    found = turn_returns(gamma=gamma, past=past)(given)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_turns_that_began_in_the_same_state_are_compared(credit) -> None:
    """Three members, two turns of one token each. All begin alike; the first two also begin their second turn alike,
    the third stands alone there. Outcomes 1, 0, 0; the mean is 1/3. Second turns: 1 and 0, mean 0.5."""
    given = credit(
        [1.0, 0.0, 0.0],
        lengths=torch.tensor([2, 2, 2]),
        turn_ids=torch.tensor([0, 1, 0, 1, 0, 1]),
        turn_states=torch.tensor([7, 8, 7, 8, 7, 9]),
    )
    found = state_returns(gamma=0.5)(given)
    first, second = 0.5 * 2 / 3, 0.5 * -1 / 3  # what a first turn is worth beside the others: 0.5 of the outcome
    expected = [2 / 3 + first, 2 / 3 + 0.5, -1 / 3 + second, -1 / 3 - 0.5, -1 / 3 + second, -1 / 3]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))
    by_turn = state_returns(gamma=0.5)(replace(given, turn_states=given.turn_ids))
    assert not torch.allclose(by_turn, found), "states that are mixed up would be noticed"


def test_states_of_two_groups_are_not_compared(credit) -> None:
    given = credit(
        [1.0, 0.0],
        [0, 1],
        lengths=torch.tensor([1, 1]),
        turn_ids=torch.tensor([0, 0]),
        turn_states=torch.tensor([7, 7]),
    )
    assert state_returns()(given).tolist() == [0, 0]


@pytest.mark.parametrize(
    "build", [lambda: turn_returns(outcome=-1), lambda: turn_returns(past=1.5), lambda: state_returns(weight=0)]
)
def test_shares_of_credit_that_make_no_sense_are_refused(build) -> None:
    with pytest.raises(UserError, match=r"must be"):
        build()
