"""Direct losses of scores: which rows are a pair, whose margin counts, what is reported. (Real models: trainer.)"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from temper.errors import UserError
from temper.objectives.losses.reward_models import calibration_error
from temper.objectives.losses.scores import (
    PRESETS,
    PROCESS_REWARD_MODEL,
    REWARD_MODEL,
    SCORE_LOSSES,
    bradley_terry,
    steps,
)
from temper.objectives.objective import objective_loss
from temper.objectives.tokens import Tokens


def tokens(
    scores: Sequence[float],
    advantages: Sequence[float] | None = None,
    rewards: Sequence[float] | None = None,
    owners: Sequence[int] | None = None,
    weight: float = 1.0,
) -> Tokens:
    size = len(scores)
    zeros = torch.zeros(size, dtype=torch.float64)
    rewards = [1.0, 0.0] * (size // 2) if rewards is None else rewards
    return Tokens(
        policy_logprobs=torch.tensor(scores, dtype=torch.float64, requires_grad=True),
        proximal_logprobs=zeros,
        behavior_logprobs=zeros,
        advantages=zeros if advantages is None else torch.tensor(advantages, dtype=torch.float64),
        weights=torch.full((size,), weight, dtype=torch.float64),
        trajectory_ids=torch.tensor(range(size) if owners is None else owners),
        num_trajectories=size,
        num_batch_tokens=size,
        versions=torch.zeros(size, dtype=torch.int64),
        rewards=torch.tensor(rewards, dtype=torch.float64),
    )


def test_a_pair_is_compared_and_a_margin_moves_the_comparison() -> None:
    assert objective_loss(REWARD_MODEL, tokens([1.2, 0.5]))[0].item() == pytest.approx(0.403186, abs=1e-6)
    loss, metrics = bradley_terry(margin=1.0)(tokens([1.2, 0.5]))
    assert loss.item() == pytest.approx(0.854355, abs=1e-6)
    finished = metrics.finish()
    assert finished["loss/reward_model"] == pytest.approx(0.854355, abs=1e-6)
    assert finished["reward_model/margin"] == pytest.approx(0.7)  # of the scores, not of what the loss wants
    assert (finished["reward_model/score_min"], finished["reward_model/score_max"]) == (0.5, 1.2)


def test_the_margin_of_a_pair_stands_in_its_chosen_row() -> None:
    assert steps_apart([0.0, 9.0, 0.0, 9.0]) == steps_apart([0.0] * 4)
    assert steps_apart([1.0, 0.0, 0.0, 0.0]) > steps_apart([0.0] * 4)


def steps_apart(advantages: Sequence[float]) -> float:
    return bradley_terry()(tokens([1.2, 0.5, 0.1, 0.3], advantages, weight=0.5))[0].item()


def test_the_gradient_raises_the_chosen_score_and_lowers_the_other() -> None:
    given = tokens([0.2, 0.2])
    bradley_terry()(given)[0].backward()
    assert given.policy_logprobs.grad is not None
    assert given.policy_logprobs.grad.tolist() == pytest.approx([-0.5, 0.5])


@pytest.mark.parametrize(
    "torn",
    [
        tokens([1.0, 2.0], rewards=[0.0, 1.0]),
        tokens([1.0, 2.0, 3.0, 4.0], rewards=[1.0, 1.0, 0.0, 0.0]),
        tokens([1.0, 2.0, 3.0], rewards=[1.0, 0.0, 1.0]),
        tokens([1.0, 2.0], owners=[0, 0]),
    ],
)
def test_rows_that_are_no_pairs_are_refused(torn: Tokens) -> None:
    with pytest.raises(AssertionError, match=r"pair"):
        bradley_terry()(torn)


def test_labelled_steps_are_averaged_and_their_probabilities_judged() -> None:
    logits = torch.logit(torch.tensor([0.9, 0.8, 0.7], dtype=torch.float64)).tolist()
    loss, metrics = steps()(tokens(logits, [1.0, 1.0, 0.0], rewards=[0.0] * 3, owners=[0, 0, 0], weight=1 / 3))
    finished = metrics.finish()
    assert loss.item() == pytest.approx(0.510826, abs=1e-6)
    assert finished["process_reward/accuracy"] == pytest.approx(2 / 3)
    assert finished["process_reward/good_share"] == pytest.approx(2 / 3)
    assert finished["process_reward/score"] == pytest.approx(0.8)
    assert calibration_error(finished) == pytest.approx((0.1 + 0.2 + 0.7) / 3)


def test_a_microbatch_without_rows_gives_a_zero_that_is_connected() -> None:
    for direct_loss in (bradley_terry(), steps()):
        given = tokens([])
        loss, _ = direct_loss(given)
        loss.backward()
        assert loss.item() == 0.0


def test_steps_need_something_that_ends_them() -> None:
    with pytest.raises(UserError, match="separator is empty"):
        steps(separator="")


def test_centring_must_not_be_negative() -> None:
    with pytest.raises(UserError, match="centring=-1"):
        bradley_terry(centring=-1)


def test_direct_losses_and_presets_are_known_by_name_and_ask_for_scores() -> None:
    assert set(SCORE_LOSSES) == {"bradley_terry", "steps"}
    assert [preset.name for preset in PRESETS] == ["reward_model", "process_reward_model"]
    for preset in (REWARD_MODEL, PROCESS_REWARD_MODEL):
        assert preset.loss is not None
        assert "scores" in preset.needs
        assert SCORE_LOSSES[preset.loss.name]() == preset.loss
