"""What is done to advantages over the whole batch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from temper.errors import UserError
from temper.objectives import Advantages, Credit, advantages_of, resolve
from temper.objectives.advantage.advantages import group_mean
from temper.objectives.advantage.normalizers import (
    NORMALIZERS,
    add_distillation,
    clip_advantages,
    drop_small,
    gaussian_noise,
    interquartile,
    percentile,
    standard_normal,
    whiten,
)

ARGUMENTS = {"clip_advantages": {"limit": 0.5}, "drop_small": {"threshold": 0.3}, "gaussian_noise": {"sigma": 0.1}}
KEYS = [11, 2**55 + 3, 0, 2**56 - 1]


def column(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def f1_credit(credit, order: list[int] | None = None) -> Credit:
    order = order or [0, 1, 2, 3]
    lengths = torch.tensor([3, 2, 1, 2])
    tokens = torch.cat([torch.arange(8).split(lengths.tolist())[place] for place in order])
    return credit(
        [[1, 0, 0, 0][place] for place in order],
        lengths=lengths[order],
        member_keys=torch.tensor(KEYS)[order],
        behavior_logprobs=column([-0.1, -0.2, -0.3, -0.4, -0.5, -0.6, -0.7, -0.8])[tokens],
        teacher_logprobs=column([-0.3, -0.1, -0.2, -0.9, -0.5, -0.7, -0.1, -0.4])[tokens],
    )


def given_to(credit: Credit, values_B: list[float] | Tensor, is_kept: list[bool] | None = None) -> Advantages:
    kept_B = torch.ones_like(credit.is_truncated) if is_kept is None else torch.tensor(is_kept)
    return Advantages(tokens=credit.spread(torch.as_tensor(values_B, dtype=torch.float64)), is_kept=kept_B)


@pytest.mark.parametrize(
    ("variance", "high", "low"), [("biased", 1.290994, -0.774597), ("unbiased", 1.207615, -0.724569)]
)
def test_reinforce_plus_plus_baseline_of_f1(credit, variance, high, low) -> None:
    # Token mean .125, biased variance .234375: whitening counts tokens, not trajectories.
    objective = resolve("grpo", {"advantage": "group_mean", "normalizers": [{"name": "whiten", "variance": variance}]})
    given = advantages_of(objective, f1_credit(credit)).tokens
    assert given.tolist() == pytest.approx([high] * 3 + [low] * 5, abs=1e-6)


def test_whitening_per_rank_would_be_noticed(credit) -> None:
    whole = f1_credit(credit)
    advantages = given_to(whole, group_mean()(whole))
    right = whiten()(whole, advantages).tokens

    def local(part: slice) -> Tensor:
        own = advantages.tokens[part]
        return (own - own.mean()) / own.var(correction=0).clamp(min=1e-8).sqrt()

    assert not torch.allclose(torch.cat([local(slice(0, 5)), local(slice(5, 8))]), right, atol=1e-3)


def test_whitening_counts_kept_trajectories_only(credit) -> None:
    given = f1_credit(credit)
    kept = whiten()(given, given_to(given, [1.0, 0.0, 100.0, 1.0], [True, True, False, True])).tokens
    # Kept: five ones and two zeros.
    mean, std = 5 / 7, (10 / 49) ** 0.5
    assert kept[:5].tolist() == pytest.approx([(1 - mean) / std] * 3 + [-mean / std] * 2)
    polluted = whiten()(given, given_to(given, [1.0, 0.0, 100.0, 1.0])).tokens
    assert not torch.allclose(kept[:5], polluted[:5], atol=0.1)


@pytest.mark.parametrize("variance", ["biased", "unbiased"])
def test_whitening_what_does_not_vary_gives_zero(credit, variance) -> None:
    for values in ([0.0] * 4, [0.5] * 4):
        given = f1_credit(credit)
        assert whiten(variance)(given, given_to(given, values)).tokens.tolist() == [0.0] * 8
    one = credit([1.0])
    assert whiten(variance)(one, given_to(one, [3.0])).tokens.tolist() == [0.0]
    nobody = whiten(variance)(one, given_to(one, [3.0], [False]))
    assert nobody.tokens.isfinite().all()


def test_percentiles_are_of_kept_tokens_and_scale_without_moving_zero(credit) -> None:
    given = f1_credit(credit)  # tokens: three of the first, two, one, two
    advantages = given_to(given, [4.0, 0.0, 900.0, -2.0], [True, True, False, True])
    scaled = percentile(low=0.1, high=0.9)(given, advantages).tokens
    assert scaled.tolist() == pytest.approx([4 / 6] * 3 + [0.0] * 2 + [150.0] + [-2 / 6] * 2)
    polluted = percentile(low=0.1, high=0.9)(given, given_to(given, [4.0, 0.0, 900.0, -2.0])).tokens
    assert polluted[0] < 0.01


def test_percentiles_are_values_at_ranks(credit) -> None:
    given = credit([0.0] * 20)
    advantages = given_to(given, [float(number) for number in range(20)])
    assert percentile()(given, advantages).tokens[19] == pytest.approx(19 / 18)  # ranks 1 and 19 of 20
    assert interquartile()(given, advantages).tokens[19] == pytest.approx(19 / (10 / 1.349))  # ranks 5 and 15


def test_the_range_of_percentiles_forgives_one_wild_advantage_where_whitening_does_not(credit) -> None:
    given = credit([0.0] * 40)
    plain = [1.0, -1.0] * 20
    wild = [*plain[:-1], -1000.0]
    for normalizer in (percentile(), interquartile()):
        calm, shaken = (normalizer(given, given_to(given, values)).tokens[:39] for values in (plain, wild))
        assert torch.equal(calm, shaken)
    assert whiten()(given, given_to(given, wild)).tokens[:39].abs().max() < 0.2


def test_small_advantages_are_not_blown_up_and_nothing_kept_is_no_crash(credit) -> None:
    given = credit([0.0] * 4)
    assert percentile()(given, given_to(given, [0.1, -0.1, 0.1, -0.1])).tokens.tolist() == [0.1, -0.1, 0.1, -0.1]
    five = credit([0.0] * 5)
    same = interquartile(floor=0.5)(five, given_to(five, [1.0, 1.0, 1.0, 1.0, -3.0])).tokens
    assert same.tolist() == [2.0, 2.0, 2.0, 2.0, -6.0]
    for normalizer in (percentile(), interquartile()):
        assert normalizer(given, given_to(given, [1.0] * 4, [False] * 4)).tokens.isfinite().all()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: percentile(low=0.9, high=0.1), "low=0.9"),
        (lambda: percentile(floor=0.0), "floor=0.0"),
        (lambda: interquartile(floor=-1.0), "floor=-1.0"),
    ],
)
def test_ranges_that_are_none_are_refused(make, said) -> None:
    with pytest.raises(UserError, match=said):
        make()


def test_clip_advantages_is_symmetric(credit) -> None:
    given = credit([0.0] * 3)
    assert clip_advantages(2.0)(given, given_to(given, [5.0, -3.0, 1.0])).tokens.tolist() == [2.0, -2.0, 1.0]
    with pytest.raises(UserError, match="limit=0"):
        clip_advantages(0)


def test_drop_small_removes_trajectories_without_advantage_and_keeps_their_numbers(credit) -> None:
    given = f1_credit(credit)
    advantages = given_to(given, [1.5, 0.0, -0.2, 0.0], [True, True, True, True])
    assert drop_small(0.0)(given, advantages).is_kept.tolist() == [True] * 4
    assert drop_small(1e-9)(given, advantages).is_kept.tolist() == [True, False, True, False]
    assert drop_small(0.5)(given, advantages).is_kept.tolist() == [True, False, False, False]
    assert torch.equal(drop_small(0.5)(given, advantages).tokens, advantages.tokens)


def test_drop_small_judges_a_trajectory_by_its_largest_token_and_revives_nobody(credit) -> None:
    given = credit([0.0, 0.0], lengths=torch.tensor([2, 1]))
    advantages = Advantages(tokens=column([0.0, -2.0, 3.0]), is_kept=torch.tensor([True, False]))
    assert drop_small(1.0)(given, advantages).is_kept.tolist() == [True, False]


def test_noise_is_one_draw_per_trajectory_whatever_else_is_in_the_batch(credit) -> None:
    given = f1_credit(credit)
    noise = gaussian_noise(0.1)(given, given_to(given, [0.0] * 4)).tokens
    by_trajectory = [own.unique().numel() for own in noise.split([3, 2, 1, 2])]
    assert by_trajectory == [1, 1, 1, 1]
    alone = credit([0.0], member_keys=torch.tensor([KEYS[1]]))
    assert gaussian_noise(0.1)(alone, given_to(alone, [0.0])).tokens[0] == noise[3]
    assert gaussian_noise(0.0)(given, given_to(given, [1.0] * 4)).tokens.tolist() == [1.0] * 8


def test_draws_are_standard_normal() -> None:
    draws = standard_normal(torch.arange(200_000))
    assert draws.isfinite().all()
    assert draws.mean().item() == pytest.approx(0.0, abs=0.01)
    assert draws.var().item() == pytest.approx(1.0, abs=0.02)
    assert (draws.abs() < 1.959964).double().mean().item() == pytest.approx(0.95, abs=0.003)
    assert (draws**3).mean().item() == pytest.approx(0.0, abs=0.03)
    assert (draws[:-1] * draws[1:]).mean().item() == pytest.approx(0.0, abs=0.01)
    assert standard_normal(torch.tensor([-1, 2**62, 2**56 - 1])).isfinite().all()


def test_draws_come_from_splitmix64() -> None:
    # The first two outputs of the published generator with seed 0, cut to 53 bits, through Box and Muller.
    first, second = (0xE220A8397B1DCDAF >> 11) / 2**53, (0x6E789E6AA1B965F4 >> 11) / 2**53
    expected = math.sqrt(-2 * math.log(first)) * math.cos(2 * math.pi * second)
    assert standard_normal(torch.tensor([0])).item() == pytest.approx(expected, abs=1e-12)


def test_a_teacher_is_added_to_the_advantage_of_the_task(credit) -> None:
    given = f1_credit(credit)
    task = given_to(given, [1.5, -0.5, -0.5, -0.5])
    both = add_distillation(coefficient=0.5)(given, task).tokens
    assert both[0].item() == pytest.approx(1.5 - 0.5 * (-0.1 + 0.3))
    assert both[3].item() == pytest.approx(-0.5 - 0.5 * (-0.4 + 0.9))
    assert add_distillation().needs == {"teacher"}


@pytest.mark.parametrize("name", NORMALIZERS)
def test_normalizers_follow_the_order_of_trajectories(credit, name) -> None:
    normalize, order, values = NORMALIZERS[name](**ARGUMENTS.get(name, {})), [3, 1, 0, 2], column([1.5, -0.2, 0.4, 0.1])
    kept = torch.tensor([True, True, False, True])

    def run(places: list[int]) -> Advantages:
        given = f1_credit(credit, places)
        return normalize(given, Advantages(tokens=given.spread(values[places]), is_kept=kept[places]))

    plain, moved = run([0, 1, 2, 3]), run(order)
    expected = torch.cat([plain.tokens.split([3, 2, 1, 2])[place] for place in order])
    assert torch.allclose(moved.tokens, expected, atol=1e-12, rtol=0)
    assert torch.equal(moved.is_kept, plain.is_kept[order])


@pytest.mark.parametrize("name", NORMALIZERS)
def test_normalizing_an_empty_batch_is_nothing(credit, name) -> None:
    nothing = column([])
    given = credit(
        [], [], member_keys=torch.tensor([], dtype=torch.int64), behavior_logprobs=nothing, teacher_logprobs=nothing
    )
    result = NORMALIZERS[name](**ARGUMENTS.get(name, {}))(given, given_to(given, []))
    assert len(result.tokens) == len(result.is_kept) == 0


def test_recipes_without_a_source_are_experimental() -> None:
    assert drop_small(0.1).experimental
    assert gaussian_noise(0.1).experimental
    assert not whiten().experimental
    with pytest.raises(UserError, match='variance="population" is unknown'):
        whiten("population")
