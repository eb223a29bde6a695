"""The likelihood of given tokens, by hand; smoothing and noise cost nothing unless asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from temper.errors import UserError
from temper.objectives import Tokens, objective_loss
from temper.objectives.losses.likelihood import LIKELIHOOD_LOSSES, SFT, likelihood


def tokens(uniform: torch.Tensor | None = None) -> Tokens:
    logprobs = torch.tensor([-1.0, -2.0, -4.0], dtype=torch.float64, requires_grad=True)
    zeros = torch.zeros(3, dtype=torch.float64)
    return Tokens(
        policy_logprobs=logprobs,
        proximal_logprobs=zeros,
        behavior_logprobs=zeros,
        advantages=zeros,  # no credit: the loss learns what is given
        weights=torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64),
        trajectory_ids=torch.tensor([0, 0, 1]),
        num_trajectories=2,
        num_batch_tokens=3,
        versions=torch.zeros(3, dtype=torch.int64),
        uniform=uniform,
    )


def test_the_loss_is_the_weighted_negative_log_likelihood() -> None:
    given = tokens()
    loss, sums = objective_loss(SFT, given)
    assert loss.item() == pytest.approx(0.5 * 1 + 0.25 * 2 + 0.25 * 4)
    metrics = sums.finish()
    assert metrics["loss/likelihood"] == pytest.approx(2.0)
    assert metrics["sft/nll"] == pytest.approx(7 / 3)
    loss.backward()  # type: ignore[no-untyped-call]
    assert torch.equal(given.policy_logprobs.grad, -given.weights)  # type: ignore[arg-type]


def test_smoothed_labels_are_the_cross_entropy_with_a_share_for_every_token() -> None:
    logits = torch.tensor([2.0, 0.5, -1.0, 0.0], dtype=torch.float64)
    logprobs, smoothing, given = logits.log_softmax(0), 0.3, 1
    target = torch.full((4,), smoothing / 4, dtype=torch.float64)
    target[given] += 1 - smoothing
    row = Tokens(
        policy_logprobs=logprobs[given : given + 1],
        proximal_logprobs=torch.zeros(1),
        behavior_logprobs=torch.zeros(1),
        advantages=torch.zeros(1),
        weights=torch.ones(1, dtype=torch.float64),
        trajectory_ids=torch.zeros(1, dtype=torch.int64),
        num_trajectories=1,
        num_batch_tokens=1,
        versions=torch.zeros(1, dtype=torch.int64),
        uniform=-logprobs.mean()[None],
    )
    loss, sums = likelihood(smoothing=smoothing)(row)
    assert loss.item() == pytest.approx(-float((target * logprobs).sum()))
    assert sums.finish()["sft/nll"] == pytest.approx(-float(logprobs[given])), "the metric is not smoothed"


def test_only_what_is_asked_for_is_needed() -> None:
    assert likelihood().needs == frozenset()
    assert likelihood(smoothing=0.1).needs == {"uniform"}
    assert likelihood(noise=5).needs == {"noise"}
    assert likelihood(smoothing=0.1, noise=5).needs == {"uniform", "noise"}
    assert str(LIKELIHOOD_LOSSES["likelihood"](noise=5.0)) == "likelihood(smoothing=0.0, noise=5.0)"
    assert likelihood() == SFT.loss
    assert likelihood(0.1) != SFT.loss


@pytest.mark.parametrize("arguments", [{"smoothing": -0.1}, {"smoothing": 1.0}, {"noise": -1.0}])
def test_settings_without_meaning_are_refused(arguments: dict[str, float]) -> None:
    with pytest.raises(UserError, match=r"likelihood: (smoothing|noise)="):
        likelihood(**arguments)


def test_a_microbatch_without_tokens_has_a_loss_with_a_graph() -> None:
    given = tokens()
    names = ("proximal_logprobs", "behavior_logprobs", "advantages", "weights", "trajectory_ids", "versions")
    empty = replace(given, policy_logprobs=given.policy_logprobs[:0], **{n: getattr(given, n)[:0] for n in names})
    loss, sums = likelihood()(empty)
    assert loss.requires_grad
    assert loss.item() == 0
    assert sums.finish() == {"loss/likelihood": 0.0}
