"""One weight per token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from temper.errors import UserError
from temper.objectives import Extent
from temper.objectives.objective import SlopedWeighting
from temper.objectives.policy.gates import clip
from temper.objectives.policy.ratios import token
from temper.objectives.policy.weighting import (
    WEIGHTINGS,
    constant_length,
    length_softmax,
    prompt_mean,
    sequence_mean,
    sequence_sum,
    token_mean,
    token_sum,
)

LENGTHS, ONE_GROUP, TWO_GROUPS = torch.tensor([3, 2, 1, 2]), [0] * 4, [0, 0, 1, 1]


def extent(lengths: list[int], group_ids: list[int], max_new_tokens: int = 4, **fields) -> Extent:
    ids = torch.tensor(group_ids, dtype=torch.int64)
    return Extent(
        lengths=torch.tensor(lengths, dtype=torch.int64), group_ids=ids, max_new_tokens=max_new_tokens, **fields
    )


def factors_of(weights_B: Tensor, given: Extent) -> list[float]:
    """f_i of lambda-GRPO: the weights without 1/N."""
    return (weights_B * given.lengths.sum()).tolist()


@pytest.mark.parametrize(
    ("weighting", "expected"),
    [
        (token_mean(), [1 / 8] * 4),
        (sequence_mean(), [1 / 12, 1 / 8, 1 / 4, 1 / 8]),
        (sequence_sum(), [1 / 4] * 4),
        (constant_length(), [1 / 64] * 4),
        (constant_length(length=4), [1 / 16] * 4),
        (prompt_mean(), [1 / 10, 1 / 10, 1 / 6, 1 / 6]),
        (token_sum(), [1.0] * 4),
        (length_softmax(), [1 / 8] * 4),
    ],
    ids=str,
)
def test_weights_of_f1(weighting, expected) -> None:
    assert weighting(extent([3, 2, 1, 2], TWO_GROUPS, 16)).tolist() == pytest.approx(expected)


def test_prompt_mean_of_clip_on_f1(f1) -> None:
    tokens = f1()
    loss_T = -clip()(tokens, token()(tokens)).value
    weights_T = prompt_mean()(extent([3, 2, 1, 2], TWO_GROUPS)).repeat_interleave(LENGTHS)
    assert (loss_T * weights_T).sum().item() == pytest.approx(0.2175)


def test_token_mean_is_not_the_mean_of_local_means(f1) -> None:
    tokens = f1()
    loss_T = -clip()(tokens, token()(tokens)).value
    weights_T = token_mean()(extent([3, 2, 1, 2], ONE_GROUP)).repeat_interleave(LENGTHS)
    assert (loss_T * weights_T).sum().item() == pytest.approx(-0.019375)
    assert ((loss_T[:3].mean() + loss_T[3:].mean()) / 2).item() == pytest.approx(-0.3155)


def test_two_and_six_losses_weigh_by_token() -> None:
    weights_T = token_mean()(extent([2, 6], [0, 0], 6)).repeat_interleave(torch.tensor([2, 6]))
    losses_T = torch.tensor([1.0, 3.0, *[4.0] * 6], dtype=torch.float64)
    assert (weights_T * losses_T).sum().item() == pytest.approx(3.5)


@pytest.mark.parametrize("name", WEIGHTINGS)
def test_a_trajectory_without_tokens_counts_nowhere(name) -> None:
    weighting = WEIGHTINGS[name]()
    scales = {"length_softmax": 2.0}
    with_empty = weighting(extent([3, 0, 2, 5, 0], [0, 0, 1, 0, 2], scales=scales))
    without = weighting(extent([3, 2, 5], [0, 1, 0], scales=scales))
    assert with_empty[[0, 2, 3]].tolist() == without.tolist()
    assert with_empty[[1, 4]].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", WEIGHTINGS)
def test_a_batch_without_tokens_has_zero_weights(name) -> None:
    weighting = WEIGHTINGS[name]()
    assert weighting(extent([0, 0], [0, 1])).tolist() == [0.0, 0.0]
    assert len(weighting(extent([], []))) == 0


@pytest.mark.parametrize("name", WEIGHTINGS)
def test_weights_follow_the_order_of_trajectories(name) -> None:
    lengths, ids, order = [3, 2, 1, 2, 7], [0, 0, 1, 1, 1], [4, 2, 0, 3, 1]
    weighting, scales = WEIGHTINGS[name](), {"length_softmax": -1.5}
    plain = weighting(extent(lengths, ids, scales=scales))
    moved = weighting(extent([lengths[i] for i in order], [ids[i] for i in order], scales=scales))
    assert torch.allclose(moved, plain[order], atol=1e-15, rtol=0)


@pytest.mark.parametrize(
    ("power", "expected"),
    [
        (1.0, [1.140488, 0.995385, 0.868742, 0.995385]),
        (-1.0, [0.874496, 0.985776, 1.153952, 0.985776]),
        (0.0, [1.0] * 4),
    ],
)
def test_length_softmax_of_f1(power, expected) -> None:
    given = extent([3, 2, 1, 2], ONE_GROUP)
    assert factors_of(length_softmax(power)(given), given) == pytest.approx(expected, abs=1e-6)
    learned = extent([3, 2, 1, 2], ONE_GROUP, scales={"length_softmax": power})
    assert factors_of(length_softmax(5.0)(learned), learned) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("power", [-2.0, -0.3, 0.0, 1.0, 3.0])
def test_slopes_of_length_softmax_are_derivatives_of_log_weights(power) -> None:
    lengths, ids, step = [3, 2, 1, 2, 9, 4, 0], [0, 0, 0, 0, 1, 1, 1], 1e-5

    def weights(number: float) -> Tensor:
        return length_softmax()(extent(lengths, ids, scales={"length_softmax": number}))[:-1]

    rule = length_softmax(power).run
    assert isinstance(rule, SlopedWeighting)
    slopes = rule.slopes(extent(lengths, ids))
    measured = (weights(power + step).log() - weights(power - step).log()) / (2 * step)
    assert slopes[:-1].tolist() == pytest.approx(measured.tolist(), abs=1e-8)
    assert slopes[-1].item() == 0.0


def test_the_slope_check_rejects_slopes_that_forget_the_softmax_denominator() -> None:
    given, step = extent([3, 2, 1, 2], ONE_GROUP), 1e-5
    height = 1 + (LENGTHS - 2.0).double() / LENGTHS.double().std() / 9
    measured = (length_softmax(1 + step)(given).log() - length_softmax(1 - step)(given).log()) / (2 * step)
    assert not torch.allclose(height * height.log(), measured, atol=1e-3)
    assert torch.allclose(length_softmax(1.0).run.slopes(given), measured, atol=1e-8)


def test_length_softmax_is_token_mean_for_equal_lengths_and_lone_members() -> None:
    given = extent([5, 5, 5, 2], [0, 0, 0, 1], scales={"length_softmax": 3.0})
    assert length_softmax()(given).tolist() == pytest.approx(token_mean()(given).tolist())
    assert length_softmax().run.slopes(given).tolist() == pytest.approx([0.0] * 4)


def test_length_softmax_stays_finite_at_large_powers() -> None:
    given = extent([9, 1, 1, 1], ONE_GROUP, scales={"length_softmax": 500.0})
    assert length_softmax()(given).isfinite().all()
    assert length_softmax()(given).sum().item() == pytest.approx(4 / 12)


def test_length_softmax_holds_for_82_members_and_is_refused_for_83() -> None:
    assert length_softmax()(extent([1] + [1000] * 81, [0] * 82)).isfinite().all()
    with pytest.raises(UserError, match="too steep for a group of 83"):
        length_softmax()(extent([1] + [1000] * 82, [0] * 83))


def test_length_softmax_is_experimental() -> None:
    assert length_softmax().experimental
