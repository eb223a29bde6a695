"""One optimiser step is a function of the set of samples: no split or order changes gradient, loss or metrics.

Specification 1.7 and bugs 7.1, 7.2, 7.15, 7.16, 7.19. The mutations at the end are rejected by the same check.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from temper.objectives import PRESETS, Credit, MetricSums, Objective, Tokens, advantages_of, objective_loss, resolve
from temper.objectives.corrections import CORRECTIONS
from temper.objectives.regularizers import KL_ESTIMATORS
from temper.objectives.weighting import WEIGHTINGS

TOLERANCE = 1e-10
EXTRAS = [{"name": "kl", "coefficient": 0.3}, {"name": "entropy_bonus", "coefficient": 0.2}]


@dataclass(frozen=True)
class Step:
    """Everything one optimiser step reads; log-probabilities and entropy over all drawn tokens."""

    lengths_B: Tensor
    group_ids_B: Tensor
    rewards_B: Tensor
    logprobs: dict[str, Tensor]
    entropy: Tensor


Partition = list[list[int]]
Loss = Callable[[Objective, Step, list[int], Partition], tuple[Tensor, MetricSums]]


def random_step(lengths: list[int], group_ids: list[int], seed: int = 0) -> Step:
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)

    def draw(count: int) -> Tensor:
        return torch.randn(count, generator=generator, dtype=torch.float64)

    proximal = -draw(total).exp()
    return Step(
        torch.tensor(lengths),
        torch.tensor(group_ids),
        draw(len(lengths)),
        {
            "policy_logprobs": proximal + 0.3 * draw(total),
            "proximal_logprobs": proximal,
            "behavior_logprobs": proximal + 0.3 * draw(total),
            "reference_logprobs": proximal + 0.3 * draw(total),
        },
        draw(total).abs(),
    )


SMALL = random_step([3, 2, 1, 2], [0, 0, 1, 1])
LARGE = random_step([5, 1, 7, 2, 9, 3, 1, 4, 2, 6, 3], [0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3], seed=1)


def credit_of(step: Step, members: Tensor) -> Credit:
    gap_N = step.logprobs["proximal_logprobs"] - step.logprobs["reference_logprobs"]
    parts = torch.split(gap_N, step.lengths_B.tolist())
    return Credit(
        rewards=step.rewards_B[members],
        group_ids=step.group_ids_B[members],
        lengths=step.lengths_B[members],
        is_truncated=torch.zeros(len(members), dtype=torch.bool),
        max_new_tokens=10,
        reference_log_ratio=torch.cat([parts[i] for i in members.tolist()]),
    )


def tokens_of(step: Step, part: list[int], advantages_B: Tensor, weights_B: Tensor) -> Tokens:
    """The tokens of some trajectories; advantages and weights are given for all of the step."""
    members = torch.tensor(part, dtype=torch.int64)
    owner_N = torch.arange(len(step.lengths_B)).repeat_interleave(step.lengths_B)
    places = torch.cat([(owner_N == i).nonzero().flatten() for i in part]) if part else members
    lengths_S = step.lengths_B[members]
    return Tokens(
        **{name: value[places] for name, value in step.logprobs.items()},
        entropy=step.entropy[places],
        advantages=advantages_B[members].repeat_interleave(lengths_S),
        weights=weights_B[members].repeat_interleave(lengths_S),
        trajectory_ids=torch.arange(len(part)).repeat_interleave(lengths_S),
        num_trajectories=len(part),
        num_batch_tokens=int(step.lengths_B.sum()),
        versions=torch.zeros(len(places), dtype=torch.int64),
    )


def honest(objective: Objective, step: Step, part: list[int], partition: Partition) -> tuple[Tensor, MetricSums]:
    advantages_B = advantages_of(objective, credit_of(step, torch.arange(len(step.lengths_B))))
    weights_B = objective.weighting(step.lengths_B, step.group_ids_B, 10)
    return objective_loss(objective, tokens_of(step, part, advantages_B, weights_B))


def result(loss_of: Loss, objective: Objective, step: Step, partition: Partition) -> tuple[Tensor, dict[str, float]]:
    """Gradient with respect to policy log-probabilities and entropy, and finished metrics."""
    step = Step(
        step.lengths_B, step.group_ids_B, step.rewards_B, dict(step.logprobs), step.entropy.clone().requires_grad_()
    )
    policy = step.logprobs["policy_logprobs"] = step.logprobs["policy_logprobs"].clone().requires_grad_()
    merged = MetricSums()
    for part in partition:
        loss, sums = loss_of(objective, step, part, partition)
        loss.backward()
        merged = merged.merge(sums)
    entropy_gradient = torch.zeros_like(policy) if step.entropy.grad is None else step.entropy.grad
    assert policy.grad is not None
    return torch.cat([policy.grad, entropy_gradient]), merged.finish()


def is_invariant(loss_of: Loss, objective: Objective, step: Step, partitions: list[Partition]) -> bool:
    whole = [list(range(len(step.lengths_B)))]
    gradient, metrics = result(honest, objective, step, whole)
    for partition in partitions:
        other_gradient, other_metrics = result(loss_of, objective, step, partition)
        if (gradient - other_gradient).abs().max() > TOLERANCE or set(metrics) != set(other_metrics):
            return False
        if any(abs(metrics[name] - other_metrics[name]) > TOLERANCE for name in metrics):
            return False
    return True


def all_partitions(items: list[int]) -> Iterator[Partition]:
    """Every way to split the items into non-empty parts."""
    if not items:
        yield []
        return
    for rest in all_partitions(items[1:]):
        yield [[items[0]], *rest]
        for place, part in enumerate(rest):
            yield [*rest[:place], [items[0], *part], *rest[place + 1 :]]


def random_partitions(count: int, tries: int) -> list[Partition]:
    """Random orders and splits, among them empty microbatches."""
    rng = random.Random(0)
    partitions = []
    for _ in range(tries):
        order = rng.sample(range(count), count)
        cuts = sorted(rng.choices(range(count + 1), k=rng.randint(0, 6)))
        partitions.append([order[a:b] for a, b in zip([0, *cuts], [*cuts, count], strict=True)])
    return partitions


ALL_OF_FOUR = list(all_partitions([0, 1, 2, 3]))
SOME_OF_ELEVEN = random_partitions(11, tries=12)


def check(objective: Objective) -> None:
    assert is_invariant(honest, objective, SMALL, ALL_OF_FOUR)
    assert is_invariant(honest, objective, LARGE, SOME_OF_ELEVEN)


def test_partitions_are_all_there() -> None:
    assert len(ALL_OF_FOUR) == 15
    assert any([] in partition for partition in SOME_OF_ELEVEN)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset(name) -> None:
    check(PRESETS[name])
    check(resolve(name, {"regularizers": EXTRAS}))


@pytest.mark.parametrize("name", WEIGHTINGS)
def test_every_weighting(name) -> None:
    check(resolve("grpo", {"weighting": name, "regularizers": EXTRAS}))


@pytest.mark.parametrize("name", CORRECTIONS)
def test_every_correction(name) -> None:
    check(resolve("dapo", {"corrections": [name]}))


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_every_kl_estimator(estimator) -> None:
    check(resolve("grpo", {"regularizers": [{"name": "kl", "coefficient": 0.1, "estimator": estimator}]}))


def mean_per_microbatch(objective: Objective, step: Step, part: list[int], partition: Partition):
    """Bug 7.1: each microbatch has its own denominator, and the results are averaged."""
    advantages_B = advantages_of(objective, credit_of(step, torch.arange(len(step.lengths_B))))
    lengths_B = torch.zeros_like(step.lengths_B)
    lengths_B[part] = step.lengths_B[part]
    weights_B = objective.weighting(lengths_B, step.group_ids_B, 10) / len(partition)
    return objective_loss(objective, tokens_of(step, part, advantages_B, weights_B))


def divided_by_accumulation_steps(objective: Objective, step: Step, part: list[int], partition: Partition):
    """Bug 7.2: the usual division by the number of microbatches, on top of the right denominator."""
    loss, sums = honest(objective, step, part, partition)
    return loss / len(partition), sums


def denominator_of_kept_tokens(objective: Objective, step: Step, part: list[int], partition: Partition):
    """Bug 7.19: rejected tokens leave the denominator, here that of the microbatch."""
    advantages_B = advantages_of(objective, credit_of(step, torch.arange(len(step.lengths_B))))
    weights_B = objective.weighting(step.lengths_B, step.group_ids_B, 10)
    tokens = tokens_of(step, part, advantages_B, weights_B)
    kept_T = objective.corrections[0](tokens).multiplier != 0
    loss, sums = objective_loss(objective, tokens)
    return loss * len(kept_T) / kept_T.sum().clamp(min=1), sums


def statistics_of_the_microbatch(objective: Objective, step: Step, part: list[int], partition: Partition):
    """Bugs 7.15 and 7.16: baselines from whatever part of a group happens to be here."""
    members = torch.tensor(part, dtype=torch.int64)
    advantages_B = torch.zeros_like(step.rewards_B)
    if part:
        advantages_B[members] = advantages_of(objective, credit_of(step, members))
    weights_B = objective.weighting(step.lengths_B, step.group_ids_B, 10)
    return objective_loss(objective, tokens_of(step, part, advantages_B, weights_B))


MUTATIONS = [
    mean_per_microbatch,
    divided_by_accumulation_steps,
    denominator_of_kept_tokens,
    statistics_of_the_microbatch,
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "cispo"])
def test_the_check_rejects_planted_bugs(name, mutation) -> None:
    objective = resolve(name, {"corrections": [{"name": "token_mis", "low": 0.8, "high": 1.2}]})
    assert is_invariant(honest, objective, LARGE, SOME_OF_ELEVEN)
    assert not is_invariant(mutation, objective, LARGE, SOME_OF_ELEVEN)
