"""Expected gradients by exact enumeration: which estimators are unbiased, and by how much the others are biased.

The policy is a table of logits per prefix over three tokens; answers have three tokens, or end early at token 2 where a
test needs different lengths. Every group of G answers is enumerated with its probability, credited, and run through the
loss; the gradient of that sum is the estimator's expectation, to be compared with the gradient of the expected reward.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from temper.objectives import Credit, Extent, Objective, Tokens, advantages_of, objective_loss, resolve
from temper.objectives.advantage.advantages import (
    batch_std,
    group_mean,
    group_mean_std,
    leave_one_out,
    length_weighted,
    maxrl,
    raw,
)
from temper.objectives.advantage.token_advantages import gae, gae_by_length, greedy_baseline, returns_to_go, step_values
from temper.objectives.policy.weighting import sequence_mean, sequence_sum, token_mean

VOCABULARY, LENGTH, STOP = 3, 3, 2
REINFORCE = resolve("reinforce")


@dataclass(frozen=True)
class Toy:
    """A policy that can be enumerated, and what its answers earn."""

    logits: Tensor
    """[prefixes, 3], with gradient."""
    answers: list[tuple[int, ...]]
    rewards: Tensor
    token_rewards: dict[tuple[int, ...], float]
    """By prefix that ends with the token."""

    def prefixes(self, answer: tuple[int, ...]) -> list[tuple[int, ...]]:
        return [answer[:place] for place in range(len(answer))]

    def logprobs(self, answer: tuple[int, ...]) -> Tensor:
        """[T] with gradient."""
        table = self.logits.log_softmax(1)
        rows = [PREFIXES[prefix] for prefix in self.prefixes(answer)]
        return table[rows, list(answer)]

    def paid(self, answer: tuple[int, ...]) -> list[float]:
        return [self.token_rewards.get(answer[: place + 1], 0.0) for place in range(len(answer))]

    @property
    def returns(self) -> Tensor:
        return self.rewards + torch.tensor([sum(self.paid(answer)) for answer in self.answers], dtype=torch.float64)

    @property
    def probabilities(self) -> Tensor:
        """[answers] with gradient."""
        return torch.stack([self.logprobs(answer).sum() for answer in self.answers]).exp()

    def value(self, prefix: tuple[int, ...]) -> float:
        """Expected reward after a prefix, beyond what was paid inside it."""
        after = [answer[: len(prefix)] == prefix for answer in self.answers]
        mass = self.probabilities.detach() * torch.tensor(after)
        inside = sum(self.token_rewards.get(prefix[: place + 1], 0.0) for place in range(len(prefix)))
        return float((mass * self.returns).sum() / mass.sum()) - inside


PREFIXES = {
    prefix: place
    for place, prefix in enumerate(
        prefix for length in range(LENGTH) for prefix in itertools.product(range(VOCABULARY), repeat=length)
    )
}


def make_toy(*, stops: bool = False, binary: bool = False, pays_inside: bool = False) -> Toy:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(len(PREFIXES), VOCABULARY, generator=generator, dtype=torch.float64).requires_grad_()
    whole = list(itertools.product(range(VOCABULARY), repeat=LENGTH))
    ended = [answer[: answer.index(STOP) + 1] if STOP in answer else answer for answer in whole]
    answers = sorted(set(ended if stops else whole))
    drawn = torch.rand(len(answers), generator=generator, dtype=torch.float64)
    inside = torch.randn(len(whole) * 2, generator=generator, dtype=torch.float64).tolist()
    ends = sorted({answer[: place + 1] for answer in answers for place in range(len(answer))})
    return Toy(
        logits=logits,
        answers=answers,
        rewards=(drawn > 0.6).double() if binary else drawn,
        token_rewards=dict(zip(ends, inside, strict=False)) if pays_inside else {},
    )


def true_gradient(toy: Toy) -> Tensor:
    (gradient,) = torch.autograd.grad((toy.probabilities * toy.returns).sum(), toy.logits)
    return gradient


def credit_of(toy: Toy, members: list[int], group_ids: Tensor, value: Callable[[tuple[int, ...]], float]) -> Credit:
    """Every column that the estimators read; each token is a step of its own."""
    answers = [toy.answers[member] for member in members]
    lengths = torch.tensor([len(answer) for answer in answers])
    known = {prefix: value(prefix) for answer in toy.answers for prefix in toy.prefixes(answer)}
    values = torch.tensor([known[prefix] for a in answers for prefix in toy.prefixes(a)], dtype=torch.float64)
    return Credit(
        rewards=toy.rewards[members],
        group_ids=group_ids,
        lengths=lengths,
        is_truncated=torch.zeros(len(answers), dtype=torch.bool),
        max_new_tokens=LENGTH,
        token_rewards=torch.tensor([x for a in answers for x in toy.paid(a)], dtype=torch.float64),
        greedy_rewards=torch.full((len(answers),), 0.37, dtype=torch.float64),
        values=values,
        step_ids=torch.cat([torch.arange(len(answer)) for answer in answers]),
        step_values=values,
    )


def expected_gradient(
    toy: Toy, objective: Objective, size: int, value: Callable[[tuple[int, ...]], float] | None = None
) -> Tensor:
    """Expected gradient of a batch that is one group of `size` answers. All groups are credited and summed at once."""
    groups = list(itertools.product(range(len(toy.answers)), repeat=size))
    members = [member for group in groups for member in group]
    group_ids = torch.arange(len(groups)).repeat_interleave(size)
    credit = credit_of(toy, members, group_ids, value or toy.value)
    probability_B = toy.probabilities.detach()[torch.tensor(groups)].prod(1).repeat_interleave(size)
    weights_B = probability_B * weights_by_group(objective, credit, size)
    by_answer = [toy.logprobs(answer) for answer in toy.answers]
    logprobs_N = torch.cat([by_answer[member] for member in members])
    constant_N = logprobs_N.detach()
    tokens = Tokens(
        policy_logprobs=logprobs_N,
        proximal_logprobs=constant_N,
        behavior_logprobs=constant_N,
        advantages=advantages_of(objective, credit).tokens,
        weights=credit.spread(weights_B),
        trajectory_ids=credit.owners,
        num_trajectories=len(members),
        num_batch_tokens=len(constant_N),
        versions=torch.zeros(len(constant_N), dtype=torch.int64),
    )
    loss, _ = objective_loss(objective, tokens)
    (gradient,) = torch.autograd.grad(-loss, toy.logits)
    return gradient


def weights_by_group(objective: Objective, credit: Credit, size: int) -> Tensor:
    """Each group is a batch of its own, with its own denominators."""
    one_group = torch.zeros(size, dtype=torch.int64)
    parts = [
        objective.weighting(Extent(lengths=own, group_ids=one_group, max_new_tokens=LENGTH))
        for own in credit.lengths.split(size)
    ]
    return torch.cat(parts)


def cosine(left: Tensor, right: Tensor) -> float:
    return torch.nn.functional.cosine_similarity(left.flatten(), right.flatten(), dim=0).item()


def share(estimated: Tensor, true: Tensor) -> float:
    """How much of the true gradient an estimate holds, along it."""
    return ((estimated * true).sum() / true.square().sum()).item()


def is_unbiased(estimated: Tensor, true: Tensor) -> bool:
    return torch.allclose(estimated, true, atol=1e-10, rtol=0)


@pytest.mark.parametrize(
    "advantage",
    [raw(), leave_one_out(), returns_to_go(), greedy_baseline(), gae(lam=1.0), gae(lam=0.5), step_values()],
    ids=str,
)
@pytest.mark.parametrize("stops", [False, True], ids=["equal lengths", "ends early"])
def test_these_estimators_are_unbiased(advantage, stops) -> None:
    toy = make_toy(stops=stops, pays_inside=True)
    estimated = expected_gradient(toy, replace(REINFORCE, advantage=advantage), 2)
    assert is_unbiased(estimated, true_gradient(toy))


def test_leave_one_out_is_unbiased_for_three_members() -> None:
    toy = make_toy(stops=True)
    assert is_unbiased(expected_gradient(toy, replace(REINFORCE, advantage=leave_one_out()), 3), true_gradient(toy))


def test_gae_with_lambda_one_forgives_a_wrong_critic_and_lower_lambda_does_not() -> None:
    toy = make_toy()

    def wrong(prefix: tuple[int, ...]) -> float:
        return 0.3 * len(prefix) - 0.2 * sum(prefix)

    true = true_gradient(toy)
    assert is_unbiased(expected_gradient(toy, replace(REINFORCE, advantage=gae(lam=1.0)), 2, wrong), true)
    assert not is_unbiased(expected_gradient(toy, replace(REINFORCE, advantage=gae(lam=0.95)), 2, wrong), true)


def test_gae_by_length_is_biased_even_with_true_values_where_lengths_differ() -> None:
    # The decay of a token then depends on tokens drawn after it.
    by_length = replace(REINFORCE, advantage=gae_by_length(alpha=0.4))
    equal, differing = make_toy(pays_inside=True), make_toy(stops=True, pays_inside=True)
    assert is_unbiased(expected_gradient(equal, by_length, 2), true_gradient(equal))
    estimated, true = expected_gradient(differing, by_length, 2), true_gradient(differing)
    assert not is_unbiased(estimated, true)
    assert cosine(estimated, true) > 0.99


def test_discounting_is_biased() -> None:
    toy = make_toy()
    assert not is_unbiased(
        expected_gradient(toy, replace(REINFORCE, advantage=returns_to_go(gamma=0.9)), 2), true_gradient(toy)
    )


@pytest.mark.parametrize("size", [2, 3])
def test_group_mean_is_exactly_short_of_one_gth(size) -> None:
    toy = make_toy(stops=True)
    estimated, true = expected_gradient(toy, replace(REINFORCE, advantage=group_mean()), size), true_gradient(toy)
    assert is_unbiased(estimated, (size - 1) / size * true)
    assert not is_unbiased(estimated, true)


@pytest.mark.parametrize("size", [2, 3])
def test_length_weighted_is_biased_because_its_baseline_knows_the_member(size) -> None:
    toy = make_toy(stops=True)
    estimated, true = expected_gradient(toy, replace(REINFORCE, advantage=length_weighted()), size), true_gradient(toy)
    assert not is_unbiased(estimated, true)
    assert not is_unbiased(estimated, (size - 1) / size * true)
    assert cosine(estimated, true) > 0.9


def test_length_weighted_is_group_mean_where_lengths_are_equal() -> None:
    toy = make_toy()
    estimated = expected_gradient(toy, replace(REINFORCE, advantage=length_weighted()), 2)
    assert is_unbiased(estimated, 0.5 * true_gradient(toy))


@pytest.mark.parametrize("order_of", [("baseline", 1), ("success_only", 2), ("all_fail_baseline", 2)], ids=str)
def test_maxrl_is_the_gradient_of_log_p_cut_at_its_order(order_of) -> None:
    variant, order = order_of
    toy = make_toy(binary=True)
    true, p = true_gradient(toy), (toy.probabilities * toy.rewards).sum().item()
    estimated = expected_gradient(toy, replace(REINFORCE, advantage=maxrl(variant)), 2)
    assert is_unbiased(estimated, (1 - (1 - p) ** order) / p * true)


def test_group_mean_std_of_a_binary_reward_is_a_multiple_of_the_true_gradient() -> None:
    # Two members differ with probability 2p(1-p) and then have std 1/sqrt(2): sqrt(2)/2 in place of 1/2.
    toy = make_toy(binary=True)
    estimated = expected_gradient(toy, replace(REINFORCE, advantage=group_mean_std(eps=0.0)), 2)
    assert is_unbiased(estimated, math.sqrt(0.5) * true_gradient(toy))


def test_group_mean_std_of_other_rewards_points_elsewhere() -> None:
    toy = make_toy()
    estimated, true = expected_gradient(toy, replace(REINFORCE, advantage=group_mean_std()), 2), true_gradient(toy)
    assert not is_unbiased(estimated / share(estimated, true), true)
    assert cosine(estimated, true) > 0.9


@pytest.mark.parametrize("weighting", [sequence_mean(), token_mean()], ids=str)
def test_dividing_by_drawn_lengths_is_biased_and_by_a_constant_is_not(weighting) -> None:
    toy = make_toy(stops=True)
    true, unbiased = true_gradient(toy), replace(REINFORCE, advantage=leave_one_out())
    estimated = expected_gradient(toy, replace(unbiased, weighting=weighting), 2)
    assert not is_unbiased(estimated / share(estimated, true), true)
    assert is_unbiased(expected_gradient(toy, replace(unbiased, weighting=sequence_sum()), 2), true)
    equal = make_toy()
    at_equal_lengths = expected_gradient(equal, replace(unbiased, weighting=weighting), 2)
    assert is_unbiased(at_equal_lengths, true_gradient(equal) / LENGTH)


def test_the_check_rejects_a_baseline_that_looks_at_the_answer() -> None:
    # A planted bug: the greedy baseline taken from the member's own group's best.
    toy = make_toy()

    def best_of_group(credit: Credit) -> Tensor:
        best = credit.rewards.view(-1, 2).amax(1).repeat_interleave(2)
        return credit.spread(credit.rewards - best)

    planted = replace(raw(), run=best_of_group)
    assert not is_unbiased(expected_gradient(toy, replace(REINFORCE, advantage=planted), 2), true_gradient(toy))


def bernoulli_gradient(advantage, make_credit, *, p: float, size: int) -> float:
    """E[1/N sum_i A_i S_i] for N independent successes of probability p; the gradient of p itself is 1."""
    total = 0.0
    for outcome in itertools.product([0.0, 1.0], repeat=size):
        probability = math.prod(p if x else 1 - p for x in outcome)
        scores = [(x - p) / (p * (1 - p)) for x in outcome]
        given = advantage(make_credit(list(outcome))).tolist()
        total += probability * sum(a * s for a, s in zip(given, scores, strict=True)) / size
    return total


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        (raw(), 1.0),
        (leave_one_out(), 1.0),
        (group_mean(), 2 / 3),
        (group_mean_std(eps=0.0), 1.154701),
        (maxrl("success_only"), 2.19),
        (maxrl("baseline"), 1.70),
        (maxrl("all_fail_baseline"), 2.19),
    ],
    ids=str,
)
def test_expected_gradient_of_three_bernoulli_samples(credit, advantage, expected) -> None:
    assert bernoulli_gradient(advantage, credit, p=0.3, size=3) == pytest.approx(expected, abs=1e-6)


def test_batch_std_gives_tasks_nearly_the_same_share_of_their_gradient(credit) -> None:
    """Tasks of success rate 0.3 and 0.5, two samples each, one std of all four rewards."""
    rates, shares = [0.3, 0.3, 0.5, 0.5], [0.0, 0.0]
    for outcome in itertools.product([0.0, 1.0], repeat=4):
        probability = math.prod(p if x else 1 - p for x, p in zip(outcome, rates, strict=True))
        given = batch_std(eps=0.0)(credit(list(outcome), [0, 0, 1, 1])).tolist()
        for place, (advantage, x, p) in enumerate(zip(given, outcome, rates, strict=True)):
            shares[place // 2] += probability * advantage * (x - p) / (p * (1 - p)) / 2
    assert shares == pytest.approx([0.933013, 0.943731], abs=1e-6)


def test_group_mean_std_amplifies_hard_tasks_against_even_ones(credit) -> None:
    """Closed form: sum over K successes of P(K) sqrt(K (N-K) (N-1) / N) / (N p (1-p))."""

    def closed_form(p: float, size: int = 8) -> float:
        chances = [math.comb(size, k) * p**k * (1 - p) ** (size - k) for k in range(size + 1)]
        spreads = [math.sqrt(k * (size - k) * (size - 1) / size) for k in range(size + 1)]
        return sum(map(math.prod, zip(chances, spreads, strict=True))) / (size * p * (1 - p))

    hard, even = (bernoulli_gradient(group_mean_std(eps=0.0), credit, p=p, size=8) for p in (0.05, 0.5))
    assert (hard, even) == (pytest.approx(closed_form(0.05)), pytest.approx(closed_form(0.5)))
    assert hard / even == pytest.approx(1.332716, abs=1e-6)
    assert bernoulli_gradient(group_mean(), credit, p=0.05, size=8) == pytest.approx(7 / 8)
