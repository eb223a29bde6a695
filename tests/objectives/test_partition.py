"""One optimiser step is a function of the set of samples: no split or order changes gradient, loss or metrics.

The mutations at the end are rejected by the same check.
Presets with a direct loss are packed in other ways; tests/trainer has the same for them, stage by stage.
Shapes: _B trajectories of the step, _N their drawn tokens, K most likely tokens.
"""

from __future__ import annotations

import dataclasses
import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from temper.objectives import (
    POLICY_GRADIENTS,
    Credit,
    Extent,
    MetricSums,
    Objective,
    SlopedWeighting,
    Tokens,
    TopTokens,
    advantages_of,
    measure_batch,
    objective_loss,
    targets_of,
)
from temper.objectives.advantage.normalizers import whiten
from temper.objectives.advantage.token_advantages import gae, returns_to_go
from temper.objectives.policy.regularizers import KL_ESTIMATORS, entropy_bonus, kl
from temper.objectives.resolve import REGISTRY

TOLERANCE = 1e-10
VOCABULARY, TOP = 30, 20
EXTRAS = (kl(coefficient=0.3), entropy_bonus(coefficient=0.2))
REQUIRED = {
    "coefficient": 0.1, "high": 0.05, "low": -1.0, "threshold": 0.05, "limit": 0.7, "sigma": 0.1, "target": 4,
    "factor": 0.5,
}  # fmt: skip
"""For settings without a default, by name."""
ACTIVE: dict[str, dict[str, Any]] = {
    "top_entropy": {"share": 0.5},
    "clip_cov": {"share": 0.2, "low": 0.0},
    "kl_cov": {"share": 0.2},
    "opsm": {"threshold": 0.0},
    "positive_nll": {"threshold": 0.5},
    "soft_overlong": {"buffer": 4},
}
"""Settings under which rules made for thousands of tokens do something to forty."""


@dataclass(frozen=True)
class Step:
    """Everything one optimiser step reads, by trajectory and by drawn token."""

    credit: Credit
    columns: dict[str, Tensor]
    """[N] by field of Tokens."""
    top_ids: Tensor
    anchor_logprobs: Tensor
    top_logprobs: Tensor


@dataclass(frozen=True)
class Shares:
    """What is made before microbatches exist."""

    advantages_N: Tensor
    weights_B: Tensor
    slopes_B: Tensor
    is_kept_B: Tensor
    num_tokens: int


Partition = list[list[int]]
Loss = Callable[[Objective, Step, list[int], Partition], tuple[Tensor, MetricSums]]


def random_step(rewards: list[float], lengths: list[int], group_ids: list[int], seed: int) -> Step:
    """Every column that any factor may ask for."""
    generator = torch.Generator().manual_seed(seed)
    total, count = sum(lengths), len(lengths)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    proximal = -draw(total).exp()
    near = {name: proximal + 0.3 * draw(total) for name in ("policy", "behavior", "reference", "teacher")}
    logits = 2 * draw(total, VOCABULARY)
    anchor_logprobs, top_ids = torch.log_softmax(logits, 1).topk(TOP, dim=1)
    moved = torch.log_softmax(logits + 0.3 * draw(total, VOCABULARY), 1).gather(1, top_ids)
    rewards_B, lengths_B = torch.tensor(rewards, dtype=torch.float64), torch.tensor(lengths)
    place_N = torch.cat([torch.arange(length) for length in lengths])
    credit = Credit(
        rewards=rewards_B,
        group_ids=torch.tensor(group_ids),
        lengths=lengths_B,
        is_truncated=torch.arange(count) % 3 == 0,
        max_new_tokens=10,
        token_rewards=0.01 * draw(total).abs(),
        reward_parts={"answer": rewards_B, "format": draw(count)},
        part_weights={"format": 0.5},
        greedy_rewards=torch.tensor(group_ids).double() / 4,
        behavior_logprobs=near["behavior"],
        proximal_logprobs=proximal,
        reference_logprobs=near["reference"],
        teacher_logprobs=near["teacher"],
        values=draw(total),
        step_ids=place_N // 2,
        turn_ids=place_N // 2,
        turn_states=place_N // 2 % 2,
        turn_rewards=(place_N % 3).double(),
        step_values=draw(total),
        member_keys=torch.arange(count) * 7919,
    )
    columns = {f"{name}_logprobs": column for name, column in near.items()} | {
        "proximal_logprobs": proximal,
        "entropy": draw(total).abs(),
        "rewards": rewards_B.repeat_interleave(lengths_B),
        "router_shift": 0.1 * draw(total).abs(),
        "token_ids": torch.where(draw(total) > 0, top_ids[:, 0], top_ids[:, 1]),
        "versions": place_N % 4,
    }
    return Step(credit, columns, top_ids, anchor_logprobs, moved)


SMALL = random_step([0.8, 0, 0, 0.8], [3, 2, 1, 2], [0, 0, 1, 1], seed=0)
LARGE = random_step(
    rewards=[0.8, 0, 0.5, 0, 0.8, 0.8, 0, 0.8, 0, 0.8, 0],
    lengths=[5, 1, 7, 2, 9, 3, 1, 4, 2, 6, 3],
    group_ids=[0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3],
    seed=1,
)


def places_of(step: Step, part: list[int]) -> Tensor:
    """Where the tokens of some trajectories are."""
    owners = step.credit.owners
    parts = [(owners == i).nonzero().flatten() for i in part]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


def some_of(step: Step, part: list[int]) -> Credit:
    """Credit as someone sees it who has only these trajectories."""
    credit, members, places = step.credit, torch.tensor(part), places_of(step, part)
    total = len(credit.owners)

    def take(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: take(entry) for name, entry in value.items()}
        if not isinstance(value, Tensor):
            return value
        return value[places if len(value) == total else members]

    fields = {name: take(getattr(credit, name)) for name in credit.__dataclass_fields__}
    return Credit(**fields)


def shares_of(objective: Objective, step: Step) -> Shares:
    credit = step.credit
    advantages = advantages_of(objective, credit)
    lengths_B = credit.lengths * advantages.is_kept
    weights_B, slopes_B = weights_of(objective, lengths_B, credit)
    return Shares(advantages.tokens, weights_B, slopes_B, advantages.is_kept, int(lengths_B.sum()))


def weights_of(objective: Objective, lengths_B: Tensor, credit: Credit) -> tuple[Tensor, Tensor]:
    extent = Extent(lengths=lengths_B, group_ids=credit.group_ids, max_new_tokens=10, scales={"length_softmax": 0.7})
    rule = objective.weighting.run
    slopes_B = (
        rule.slopes(extent) if isinstance(rule, SlopedWeighting) else torch.zeros(len(lengths_B), dtype=torch.float64)
    )
    return objective.weighting(extent), slopes_B


def tokens_of(step: Step, part: list[int], shares: Shares, measured: dict[str, Tensor] | None = None) -> Tokens:
    """The tokens of some trajectories; shares and measures are given for all of the step."""
    part = [i for i in part if shares.is_kept_B[i]]
    places, members = places_of(step, part), torch.tensor(part, dtype=torch.int64)
    lengths_S = step.credit.lengths[members]
    return Tokens(
        **{name: column[places] for name, column in step.columns.items()},  # type: ignore[arg-type]
        top=TopTokens(
            ids=step.top_ids[places],
            anchor_logprobs=step.anchor_logprobs[places],
            policy_logprobs=step.top_logprobs[places],
        ),
        advantages=shares.advantages_N[places],
        weights=shares.weights_B[members].repeat_interleave(lengths_S),
        weight_slopes=shares.slopes_B[members].repeat_interleave(lengths_S),
        trajectory_ids=torch.arange(len(part)).repeat_interleave(lengths_S),
        num_trajectories=len(part),
        num_batch_tokens=shares.num_tokens,
        version=4,
        seed=11,
        measured={name: column[places] for name, column in (measured or {}).items()},
    )


def measured_of(objective: Objective, step: Step, part: list[int], shares: Shares) -> dict[str, Tensor]:
    """What measure_batch takes from these trajectories, at their places among all tokens of the step."""
    whole = tokens_of(step, part, shares)
    if "batch" not in objective.needs:
        unknown = torch.full_like(whole.weights, float("nan"))  # as the trainer does: no pass has run
        whole = dataclasses.replace(whole, policy_logprobs=unknown, proximal_logprobs=unknown, entropy=unknown)
    places = places_of(step, [i for i in part if shares.is_kept_B[i]])
    columns = measure_batch(objective, whole)
    return {
        name: torch.zeros(len(step.credit.owners), dtype=column.dtype).index_put((places,), column)
        for name, column in columns.items()
    }


def honest(objective: Objective, step: Step, part: list[int], partition: Partition) -> tuple[Tensor, MetricSums]:
    key = objective, id(step.credit)
    if key not in _PREPARED:
        shares = shares_of(objective, step)
        _PREPARED[key] = shares, measured_of(objective, step, list(range(len(step.credit.lengths))), shares)
    return objective_loss(objective, tokens_of(step, part, *_PREPARED[key]))


_PREPARED: dict[tuple[Objective, int], tuple[Shares, dict[str, Tensor]]] = {}
"""What does not depend on the partition; once per objective and step, for speed."""


def result(loss_of: Loss, objective: Objective, step: Step, partition: Partition) -> tuple[Tensor, dict[str, float]]:
    """Gradient with respect to everything that has one, and finished metrics."""
    policy, entropy = (step.columns[name].clone().requires_grad_() for name in ("policy_logprobs", "entropy"))
    top = step.top_logprobs.clone().requires_grad_()
    columns = step.columns | {"policy_logprobs": policy, "entropy": entropy}
    step = dataclasses.replace(step, columns=columns, top_logprobs=top)
    merged = MetricSums()
    for part in partition:
        loss, sums = loss_of(objective, step, part, partition)
        loss.backward()
        merged = merged.merge(sums)
    assert policy.grad is not None
    gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in (policy, entropy, top)]
    return torch.cat([gradient.flatten() for gradient in gradients]), merged.finish()


def is_invariant(loss_of: Loss, objective: Objective, step: Step, partitions: list[Partition]) -> bool:
    whole = [list(range(len(step.credit.lengths)))]
    gradient, metrics = result(honest, objective, step, whole)
    assert gradient.isfinite().all()
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
SOME_OF_ELEVEN = [*random_partitions(11, tries=4), [[3, 7], [], [10, 0, 5, 1], [2, 9, 4, 8, 6]]]


def with_extras(objective: Objective) -> Objective:
    own = {regularizer.name for regularizer in objective.regularizers}
    extras = tuple(extra for extra in EXTRAS if extra.name not in own)
    return dataclasses.replace(objective, regularizers=(*objective.regularizers, *extras))


def built(builder: Callable[..., Any]) -> Any:
    """A factor with its defaults, and with numbers for the settings that have none."""
    parameters = inspect.signature(builder).parameters.values()
    needed = {p.name: REQUIRED[p.name] for p in parameters if p.default is inspect.Parameter.empty}
    return builder(**(needed | ACTIVE.get(builder.__name__, {})))


def with_factor(kind: str, factor: Any, base: str = "dapo") -> Objective:
    own = getattr(POLICY_GRADIENTS[base], kind)
    return dataclasses.replace(POLICY_GRADIENTS[base], **{kind: (factor,) if isinstance(own, tuple) else factor})


def test_partitions_are_all_there() -> None:
    assert len(ALL_OF_FOUR) == 15
    assert any([] in partition for partition in SOME_OF_ELEVEN)


@pytest.mark.parametrize("name", POLICY_GRADIENTS)
def test_every_preset(name) -> None:
    objective = with_extras(POLICY_GRADIENTS[name])
    assert is_invariant(honest, objective, SMALL, ALL_OF_FOUR)
    assert is_invariant(honest, objective, LARGE, SOME_OF_ELEVEN)


LOSS_KINDS = ("proximal", "ratio", "gate", "emphasis", "corrections", "weighting", "regularizers")


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in LOSS_KINDS for name in REGISTRY[kind]])
def test_every_factor_of_the_loss(kind, name) -> None:
    assert is_invariant(honest, with_factor(kind, built(REGISTRY[kind][name])), LARGE, SOME_OF_ELEVEN)


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_every_kl_estimator(estimator) -> None:
    objective = with_factor("regularizers", kl(coefficient=0.1, estimator=estimator), base="grpo")
    assert is_invariant(honest, objective, LARGE, SOME_OF_ELEVEN)


def test_rules_over_the_whole_batch_together() -> None:
    names = ("token_tis", "m2po", "top_entropy", "clip_cov", "batch_normalize")
    rules = tuple(built(REGISTRY["corrections"][name]) for name in names)
    terms = tuple(built(REGISTRY["regularizers"][name]) for name in ("kl_cov", "positive_nll"))
    objective = dataclasses.replace(POLICY_GRADIENTS["grpo"], corrections=rules, regularizers=terms)
    assert is_invariant(honest, objective, LARGE, SOME_OF_ELEVEN)


CREDIT_KINDS = ("shaping", "advantage", "normalizers")
CREDIT_FACTORS = [with_factor(kind, built(make)) for kind in CREDIT_KINDS for make in REGISTRY[kind].values()]


@pytest.mark.parametrize(
    "objective",
    [*POLICY_GRADIENTS.values(), *CREDIT_FACTORS],
    ids=lambda o: "-".join(map(str, (o.name, *o.credit_factors))),
)
def test_credit_does_not_depend_on_the_order_of_trajectories(objective) -> None:
    """Groups and batch statistics survive any order of arrival."""
    order = random.Random(2).sample(range(11), 11)
    places, members = places_of(LARGE, order), torch.tensor(order)
    given, shuffled = advantages_of(objective, LARGE.credit), advantages_of(objective, some_of(LARGE, order))
    assert torch.allclose(given.tokens[places], shuffled.tokens, atol=TOLERANCE, rtol=0)
    assert torch.equal(given.is_kept[members], shuffled.is_kept)
    targets = targets_of(objective, LARGE.credit)
    if targets is not None:
        other = targets_of(objective, some_of(LARGE, order))
        assert other is not None
        assert torch.allclose(targets[places], other, atol=TOLERANCE, rtol=0)


def mean_per_microbatch(objective: Objective, step: Step, part: list[int], partition: Partition):
    """The mutation: each microbatch has its own denominator, and the results are averaged."""
    lengths_B = torch.zeros_like(step.credit.lengths)
    lengths_B[part] = step.credit.lengths[part]
    weights_B, _ = weights_of(objective, lengths_B, step.credit)
    shares = dataclasses.replace(shares_of(objective, step), weights_B=weights_B / len(partition))
    return objective_loss(objective, tokens_of(step, part, shares))


def divided_by_accumulation_steps(objective: Objective, step: Step, part: list[int], partition: Partition):
    """The mutation: the usual division by the number of microbatches, on top of the right denominator."""
    loss, sums = honest(objective, step, part, partition)
    return loss / len(partition), sums


def denominator_of_kept_tokens(objective: Objective, step: Step, part: list[int], partition: Partition):
    """The mutation: rejected tokens leave the denominator, here that of the microbatch."""
    tokens = tokens_of(step, part, shares_of(objective, step))
    kept_T = objective.corrections[0](tokens).multiplier != 0
    loss, sums = objective_loss(objective, tokens)
    return loss * len(kept_T) / kept_T.sum().clamp(min=1), sums


def statistics_of_the_microbatch(objective: Objective, step: Step, part: list[int], partition: Partition):
    """The mutation: baselines and whitening from whatever happens to be here."""
    shares = shares_of(objective, step)
    advantages_N = torch.zeros_like(shares.advantages_N)
    if part:
        advantages_N[places_of(step, part)] = advantages_of(objective, some_of(step, part)).tokens
    return objective_loss(objective, tokens_of(step, part, dataclasses.replace(shares, advantages_N=advantages_N)))


def measured_per_microbatch(objective: Objective, step: Step, part: list[int], partition: Partition):
    """Quantiles, covariances, moments and counts of the tokens that happen to be here."""
    shares = shares_of(objective, step)
    measured = measured_of(objective, step, part, shares)
    return objective_loss(objective, tokens_of(step, part, shares, measured))


MUTATIONS = [
    mean_per_microbatch,
    divided_by_accumulation_steps,
    denominator_of_kept_tokens,
    statistics_of_the_microbatch,
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "cispo"])
def test_the_check_rejects_planted_bugs(name, mutation) -> None:
    rule = REGISTRY["corrections"]["token_mis"](low=0.8, high=1.2)
    objective = with_factor("corrections", rule, base=name)
    assert is_invariant(honest, objective, LARGE, SOME_OF_ELEVEN)
    assert not is_invariant(mutation, objective, LARGE, SOME_OF_ELEVEN)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("corrections", "top_entropy"),
        ("corrections", "clip_cov"),
        ("corrections", "m2po"),
        ("corrections", "batch_normalize"),
        ("corrections", "kept_denominator"),
        ("regularizers", "kl_cov"),
        ("regularizers", "positive_nll"),
    ],
)
def test_the_check_rejects_measuring_each_microbatch_alone(kind, name) -> None:
    rule = built(REGISTRY[kind][name])
    objective = with_factor(kind, rule)
    if name in ("batch_normalize", "kept_denominator"):
        mask = REGISTRY["corrections"]["token_mis"](low=0.8, high=1.2)
        objective = dataclasses.replace(objective, corrections=(mask, rule))
    assert is_invariant(honest, objective, LARGE, SOME_OF_ELEVEN)
    assert not is_invariant(measured_per_microbatch, objective, LARGE, SOME_OF_ELEVEN)


@pytest.mark.parametrize("advantage", [returns_to_go(), gae()], ids=str)
def test_the_check_rejects_whitening_on_local_statistics(advantage) -> None:
    """For advantages that differ from token to token and are otherwise made trajectory by trajectory."""
    objective = dataclasses.replace(POLICY_GRADIENTS["dapo"], advantage=advantage)
    whitened = dataclasses.replace(objective, normalizers=(whiten(),))
    assert is_invariant(statistics_of_the_microbatch, objective, LARGE, SOME_OF_ELEVEN)
    assert is_invariant(honest, whitened, LARGE, SOME_OF_ELEVEN)
    assert not is_invariant(statistics_of_the_microbatch, whitened, LARGE, SOME_OF_ELEVEN)
