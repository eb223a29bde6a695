"""Losses read pairs off tokens: worked numbers on F3, and no partition of the pairs changes anything."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from temper.errors import UserError
from temper.objectives import MetricSums, Objective, Tokens, join, measure_batch, objective_loss, resolve
from temper.objectives.losses.pairs import (
    PAIR_LOSSES,
    PairSides,
    Rollouts,
    implicit_rewards,
    margin_memory,
)
from temper.objectives.losses.preferences import correlated
from temper.objectives.objective import Loss, control
from temper.objectives.presets.preferences import BETA_DPO, PRESETS


@dataclass(frozen=True)
class Row:
    """One completion: log-probabilities per token, by the policy and by the reference."""

    policy: list[float]
    reference: list[float]
    reward: float
    advantage: float = 0.0
    version: int = -1


def rows_f3() -> list[Row]:
    return [Row([-2.0] * 5, [-2.2] * 5, 1.0), Row([-3.5] * 4, [-3.25] * 4, 0.0, version=0)]


def tokens_of(rows: Sequence[Row], weight: float = 1.0, *, first: int = 0, **fields: Any) -> Tokens:
    """`first`: number of the first trajectory; gaps are allowed."""
    lengths = torch.tensor([len(row.policy) for row in rows], dtype=torch.int64)

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64).repeat_interleave(lengths)

    policy = torch.tensor([p for row in rows for p in row.policy], dtype=torch.float64).requires_grad_()
    return Tokens(
        policy_logprobs=policy,
        proximal_logprobs=policy.detach(),
        behavior_logprobs=torch.zeros_like(policy).detach(),
        advantages=column([row.advantage for row in rows]),
        weights=column([weight] * len(rows)),
        trajectory_ids=torch.arange(first, first + len(rows)).repeat_interleave(lengths),
        num_trajectories=first + len(rows) + 2,
        num_batch_tokens=100,
        versions=torch.tensor([row.version for row in rows]).repeat_interleave(lengths),
        rewards=column([row.reward for row in rows]),
        reference_logprobs=torch.tensor([r for row in rows for r in row.reference], dtype=torch.float64),
        entropy=torch.full_like(policy, 0.5).detach(),
        **fields,
    )


def taught(direct_loss: Loss, tokens: Tokens) -> float:
    return direct_loss(tokens)[0].item()


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("dpo", {}, 0.598139), ("cdpo", {}, 0.618139), ("robust", {}, 0.573139), ("ipo", {}, 20.7025),
        ("ipo", {"average": 0}, 9.0), ("hinge", {}, 0.8), ("length_normalized", {}, 0.670900), ("rpo", {}, 2.598139),
        ("dpo_shift", {}, 0.600393), ("simpo", {}, 0.126928), ("orpo", {}, 2.018144),
        ("cpo", {}, 2 + math.log1p(math.exp(-0.4))), ("power", {}, 0.04 + math.log1p(math.exp(-2.9))),
        ("xpo", {"alpha": 0.0}, 0.598139), ("xpo", {"alpha": 0.1}, 0.598139 - 1.0),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("is_turned", [False, True], ids=["chosen first", "rejected first"])
def test_numbers_on_f3(name: str, arguments: dict[str, Any], expected: float, is_turned: bool) -> None:
    """Here the reference said what was chosen, whose log-probability is -10."""
    rows = rows_f3()[::-1] if is_turned else rows_f3()
    assert taught(PAIR_LOSSES[name](**arguments), tokens_of(rows)) == pytest.approx(expected, abs=1e-6)


def test_the_gradient_of_dpo_is_that_worked_out_by_hand_at_every_token() -> None:
    tokens = tokens_of(rows_f3())
    PAIR_LOSSES["dpo"]()(tokens)[0].backward()
    gradient = tokens.policy_logprobs.grad
    assert gradient is not None
    assert gradient.tolist() == pytest.approx([-0.045017] * 5 + [0.045017] * 4, abs=1e-6)


def test_kto_on_f3_with_a_baseline_of_point_4() -> None:
    direct_loss = PAIR_LOSSES["kto"]()
    for row, expected in zip(rows_f3(), (0.485004, 0.465057), strict=True):
        tokens = tokens_of([dataclasses.replace(row, advantage=0.4)])
        assert taught(direct_loss, tokens) == pytest.approx(expected, abs=1e-6)
    metrics = direct_loss(tokens_of([dataclasses.replace(row, advantage=0.4) for row in rows_f3()], 0.5))[1].finish()
    assert metrics["preference/baseline"] == pytest.approx(0.4)
    assert metrics["preference/desirable_reward"] == pytest.approx(0.1)


def test_nash_md_by_hand() -> None:
    rows = [dataclasses.replace(row, advantage=wins) for row, wins in zip(rows_f3(), (1.0, 0.0), strict=True)]
    # winner: -0.5 * -10 + 0.1 * (5 * 0.2 * -2); loser: 0.5 * -14 + 0.1 * (4 * -0.25 * -3.5)
    expected = 0.5 * ((5.0 - 0.2) + (-7.0 + 0.35))
    tokens = tokens_of(rows, 0.5)
    assert taught(PAIR_LOSSES["nash_md"](beta=0.1), tokens) == pytest.approx(expected)


def test_the_opponent_of_a_direct_loss_is_the_reference_a_mixture_or_nobody() -> None:
    assert PAIR_LOSSES["xpo"]().opponent_share == 1.0
    assert PAIR_LOSSES["nash_md"]().opponent_share == 0.5
    assert PAIR_LOSSES["nash_md"](mixture=0.125).opponent_share == 0.125
    assert all(PAIR_LOSSES[name]().opponent_share is None for name in PAIR_LOSSES.keys() - {"xpo", "nash_md"})
    for mixture in (-0.1, 1.5):
        with pytest.raises(UserError, match=f"mixture={mixture} must lie between 0"):
            PAIR_LOSSES["nash_md"](mixture=mixture)


def test_the_schedule_of_dpo_shift_follows_the_version() -> None:
    direct_loss = PAIR_LOSSES["dpo_shift"](factor=0.5, until=1.0, steps=10)
    for version, factor in ((0, 0.5), (5, 0.75), (10, 1.0), (20, 1.0)):
        fixed = PAIR_LOSSES["dpo_shift"](factor=factor)
        assert taught(direct_loss, tokens_of(rows_f3(), version=version)) == taught(fixed, tokens_of(rows_f3()))
    for wrong in ({"until": 1.0}, {"steps": 3}, {"factor": 0.0}, {"until": 1.5, "steps": 3}):
        with pytest.raises(UserError, match="dpo_shift"):
            PAIR_LOSSES["dpo_shift"](**wrong)


def test_beta_dpo_takes_the_beta_of_the_batch_and_remembers_margins() -> None:
    objective = dataclasses.replace(BETA_DPO, loss=PAIR_LOSSES["beta_dpo"](dropped=0.0, decay=0.5))
    scales = {"beta_dpo.mean": 0.4, "beta_dpo.std": 1.0}
    tokens = tokens_of(rows_f3(), 0.125, scales=scales)  # delta 2: M = 0.5 * 0.4 + 0.5 * 2 = 1.2
    measured = measure_batch(objective, join([tokens]))
    loss, sums = objective_loss(objective, dataclasses.replace(tokens, measured=measured))
    assert loss.item() == pytest.approx(math.log1p(math.exp(-0.148 * 2)))
    metrics = sums.finish()
    assert metrics["preference/beta"] == pytest.approx(0.148)
    following = control(objective, scales, metrics)
    assert following == {"beta_dpo.mean": pytest.approx(1.2), "beta_dpo.std": pytest.approx(0.5)}
    assert control(objective, {}, {}) == {}
    assert control(objective, following, {}) == following


def test_beta_dpo_without_a_memory_is_refused() -> None:
    forgetful = dataclasses.replace(BETA_DPO, controllers=())
    with pytest.raises(UserError, match="margin_memory"):
        measure_batch(forgetful, join([tokens_of(rows_f3())]))


def test_xpo_refuses_pairs_of_one_side() -> None:
    rows = [dataclasses.replace(row, version=3) for row in rows_f3()]
    with pytest.raises(UserError, match="is_chosen_from_policy"):
        PAIR_LOSSES["xpo"]()(tokens_of(rows))


# --- partitions ---


def random_groups(count: int = 9, seed: int = 0) -> list[list[Row]]:
    draw = random.Random(seed)

    def row(reward: float, version: int) -> Row:
        size = draw.randint(1, 9)
        policy = [-draw.expovariate(1.0) - 0.01 for _ in range(size)]
        return Row(policy, [p + draw.gauss(0, 0.3) for p in policy], reward, advantage=0.3, version=version)

    groups = []
    for _ in range(count):
        sampled = draw.randint(0, 1)
        pair = [row(1.0, sampled - 1), row(0.0, -sampled)]
        groups.append(pair if draw.random() < 0.5 else pair[::-1])
    return groups


SPLITS: tuple[tuple[int, ...], ...] = ((9,), (1,) * 9, (2, 3, 4), (8, 1))


def objective_of(name: str, direct_loss: Loss) -> Objective:
    given = {preset.name: preset for preset in PRESETS}[name]
    return dataclasses.replace(given, loss=direct_loss)


def whole_step(objective: Objective, groups: list[list[Row]], split: Sequence[int], weight: float) -> tuple[Any, ...]:
    """Loss, gradient by row and metrics of one optimiser step in microbatches of so many groups."""
    ends = list(itertools.accumulate(split))
    chunks = [groups[end - size : end] for size, end in zip(split, ends, strict=True)]
    scales = {"beta_dpo.mean": 0.1, "beta_dpo.std": 0.8}
    parts = [tokens_of([row for group in chunk for row in group], weight, scales=scales, seed=5) for chunk in chunks]
    columns = measure_batch(objective, join(parts))
    loss, metrics, gradients, start = 0.0, MetricSums(), [], 0
    for part in parts:
        measured = {name: column[start : start + len(part)] for name, column in columns.items()}
        start += len(part)
        own, sums = objective_loss(objective, dataclasses.replace(part, measured=measured))
        own.backward()
        loss, metrics = loss + own.item(), metrics.merge(sums)
        gradients.append(part.policy_logprobs.grad)
    return loss, torch.cat(gradients), metrics.finish()


def assert_same_step(left: tuple[Any, ...], right: tuple[Any, ...]) -> None:
    assert left[0] == pytest.approx(right[0], abs=1e-12)
    assert torch.allclose(left[1], right[1], atol=1e-12)
    assert left[2] == pytest.approx(right[2], abs=1e-12)


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_no_partition_of_the_pairs_changes_loss_gradient_or_metrics(name: str) -> None:
    objective, groups = objective_of(name, PAIR_LOSSES[name]()), random_groups()
    expected = whole_step(objective, groups, SPLITS[0], 1 / 9)
    assert expected[1].abs().max() > 1e-6
    for split in SPLITS[1:]:
        assert_same_step(expected, whole_step(objective, groups, split, 1 / 9))


def test_the_check_rejects_a_choice_made_per_microbatch() -> None:
    """The mutation: beta_dpo that measures each microbatch alone."""
    objective, groups = BETA_DPO, random_groups()
    expected = whole_step(objective, groups, (9,), 1 / 9)
    alone = [whole_step(objective, [group], (1,), 1 / 9) for group in groups]
    with pytest.raises(AssertionError):
        assert_same_step(expected, (sum(part[0] for part in alone) / 9, expected[1], expected[2]))


def test_an_empty_microbatch_is_a_zero_that_is_connected_to_the_graph() -> None:
    for name, build in PAIR_LOSSES.items():
        tokens = tokens_of([])
        measured = {"beta_dpo": torch.zeros(0, 4, dtype=torch.float64)} if name == "beta_dpo" else {}
        loss, metrics = build()(dataclasses.replace(tokens, measured=measured))
        assert loss.item() == 0.0, name
        loss.backward()
        assert [key for key in metrics.finish() if key != "loss/preference"] == [], name


def test_trajectory_numbers_may_have_gaps_and_rows_of_one_trajectory_add_up() -> None:
    plain, shifted = tokens_of(rows_f3()), tokens_of(rows_f3(), first=3)
    direct_loss = PAIR_LOSSES["dpo"]()
    assert taught(direct_loss, plain) == taught(direct_loss, shifted)
    assert Rollouts.of(plain).sums(plain.policy_logprobs).tolist() == [-10.0, -14.0]


@pytest.mark.parametrize(
    "rewards", [(1.0, 1.0, 0.0, 0.0), (1.0, 0.0, 1.0), (0.0, 0.0)], ids=["two pairs mixed", "odd", "no chosen"]
)
def test_rows_that_are_no_pairs_are_found_out(rewards: tuple[float, ...]) -> None:
    """As when rows were packed one by one instead of by group."""
    rows = [Row([-1.0] * 2, [-1.0] * 2, reward) for reward in rewards]
    with pytest.raises(AssertionError, match="together"):
        PairSides.of(tokens_of(rows))


def test_sums_over_long_answers_keep_what_float32_loses() -> None:
    """4,000 tokens: a float32 sum is off by 1e-3, half a percent of a margin of 0.2."""
    draw = random.Random(0)
    values = torch.tensor([-draw.expovariate(1.0) for _ in range(4000)], dtype=torch.float32)
    exact = math.fsum(values.tolist())
    assert Rollouts(torch.tensor([4000])).sums(values).item() == pytest.approx(exact, abs=1e-9)


# --- presets and what is watched ---


def test_every_direct_loss_has_a_preset_that_says_what_it_is() -> None:
    assert {preset.loss.name for preset in PRESETS if preset.loss} == set(PAIR_LOSSES)
    assert len({preset.name for preset in PRESETS}) == len(PRESETS)
    for preset in PRESETS:
        assert preset.formula
        assert preset.source
        assert preset.note
        assert preset.loss is not None
        assert preset.loss.needs <= preset.needs
    assert "reference" not in resolve("reinforce").needs


def test_direct_losses_keep_names_arguments_and_refusals_of_their_rules() -> None:
    assert str(PAIR_LOSSES["dpo"](beta=0.2)) == "dpo(beta=0.2)"
    assert PAIR_LOSSES["dpo"]() == PAIR_LOSSES["dpo"](beta=0.1)
    assert PAIR_LOSSES["simpo"]().needs == frozenset()
    for name in ("dpo", "kto", "beta_dpo", "ipo"):
        with pytest.raises(UserError, match="beta"):
            PAIR_LOSSES[name](beta=-1.0)


def test_the_correlation_of_reward_and_length_is_that_of_all_completions() -> None:
    objective, groups = objective_of("dpo", PAIR_LOSSES["dpo"]()), random_groups()
    finished = correlated(whole_step(objective, groups, (2, 3, 4), 1 / 9)[2])
    rows = [row for group in groups for row in group]
    rewards = torch.tensor([0.1 * (sum(row.policy) - sum(row.reference)) for row in rows])
    lengths = torch.tensor([float(len(row.policy)) for row in rows])
    expected = torch.corrcoef(torch.stack([rewards, lengths]))[0, 1].item()
    assert finished["preference/reward_length_correlation"] == pytest.approx(expected, abs=1e-5)
    assert not [name for name in finished if name.endswith("_square_mean")]
    assert correlated({"loss/policy": 1.0}) == {"loss/policy": 1.0}


@pytest.mark.parametrize(
    "name", sorted(set(PAIR_LOSSES) - {"ipo", "orpo", "simpo", "cpo", "power", "length_normalized"})
)
def test_held_out_pairs_are_judged_by_what_the_direct_loss_compares(name: str) -> None:
    tokens = tokens_of(rows_f3())
    chosen, rejected = implicit_rewards(PAIR_LOSSES[name](), PairSides.of(tokens).pairs(tokens))
    assert (chosen.item(), rejected.item()) == pytest.approx((0.1, -0.1))


def test_held_out_pairs_of_simpo_are_judged_per_token() -> None:
    tokens = tokens_of(rows_f3())
    chosen, rejected = implicit_rewards(PAIR_LOSSES["simpo"](), PairSides.of(tokens).pairs(tokens))
    assert (chosen.item(), rejected.item()) == pytest.approx((-4.0, -7.0))


def test_margin_memory_ignores_what_is_not_finite() -> None:
    follow: Callable[..., Any] = margin_memory()
    state = {"beta_dpo.mean": 1.0, "beta_dpo.std": 2.0}
    assert follow(state, {"preference/margin_average": math.nan, "preference/margin_deviation": 1.0}) == state
