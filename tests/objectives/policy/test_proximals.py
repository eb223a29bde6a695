"""Whom the ratio compares with, and A-3PO's worked numbers."""

from __future__ import annotations

import math

import pytest
import torch

from temper.errors import UserError
from temper.objectives.policy.proximals import PROXIMALS, behavior, interpolated, trainer

VERSIONS = [8, 7, 6, 4, 8, 7, 6, 4]
"""Under version 8 these are stale by 0, 1, 2 and 4."""


def stale_tokens(f1, **fields):
    """mu = 0.2, pi = 0.3 at every token, as in the worked example."""

    def same(probability: float) -> torch.Tensor:
        return torch.full((8,), math.log(probability), dtype=torch.float64)

    return f1(
        policy_logprobs=same(0.3).requires_grad_(),
        behavior_logprobs=same(0.2),
        versions=torch.tensor(VERSIONS),
        version=8,
        **fields,
    )


def test_trainer_and_behavior_are_what_they_say(f1) -> None:
    tokens = f1()
    assert torch.equal(trainer()(tokens), tokens.proximal_logprobs)
    assert torch.equal(behavior()(tokens), tokens.behavior_logprobs)


def test_interpolated_logs_on_the_worked_example(f1) -> None:
    probabilities = interpolated()(stale_tokens(f1)).exp().tolist()
    assert probabilities == pytest.approx([0.2, 0.2, 0.244949, 0.271081] * 2, abs=1e-6)


def test_interpolated_probabilities_mix_by_staleness(f1) -> None:
    # (1/d) 0.2 + (1 - 1/d) 0.3 for d = 1, 2, 4.
    probabilities = interpolated(space="probability")(stale_tokens(f1)).exp().tolist()
    assert probabilities == pytest.approx([0.2, 0.2, 0.25, 0.275] * 2, abs=1e-6)


def test_the_worked_example_tells_the_two_spaces_and_the_two_ends_apart(f1) -> None:
    expected = pytest.approx([0.2, 0.2, 0.244949, 0.271081] * 2, abs=1e-4)
    tokens = stale_tokens(f1)
    share_T = 1 / (tokens.version - tokens.versions).clamp(min=1)
    exchanged_T = tokens.behavior_logprobs + share_T * (tokens.policy_logprobs.detach() - tokens.behavior_logprobs)
    assert interpolated(space="probability")(tokens).exp().tolist() != expected
    assert exchanged_T.exp().tolist() != expected


def test_tokens_that_claim_to_come_from_the_future_are_taken_as_sampled(f1) -> None:
    tokens = f1(versions=torch.full((8,), 3), version=2)
    assert torch.equal(interpolated()(tokens), tokens.behavior_logprobs)


@pytest.mark.parametrize("space", ["log", "probability"])
def test_interpolated_carries_no_gradient_and_lies_between_the_two_policies(f1, space) -> None:
    tokens = f1(versions=torch.tensor(VERSIONS), version=8)
    anchor_T = interpolated(space=space)(tokens)
    assert not anchor_T.requires_grad
    lower_T = torch.minimum(tokens.policy_logprobs, tokens.behavior_logprobs)
    upper_T = torch.maximum(tokens.policy_logprobs, tokens.behavior_logprobs)
    assert ((anchor_T >= lower_T - 1e-12) & (anchor_T <= upper_T + 1e-12)).all()


@pytest.mark.parametrize("name", PROXIMALS)
def test_proximal_policies_of_nothing_are_nothing(f1, name) -> None:
    none_T = torch.zeros(0, dtype=torch.float64)
    columns = ("policy_logprobs", "proximal_logprobs", "behavior_logprobs", "advantages", "weights")
    ids = dict.fromkeys(("trajectory_ids", "versions"), none_T.long())
    assert PROXIMALS[name]()(f1(**dict.fromkeys(columns, none_T), **ids, reference_logprobs=None)).shape == (0,)


def test_interpolated_refuses_other_spaces() -> None:
    with pytest.raises(UserError, match='space="logits"'):
        interpolated(space="logits")


def test_every_proximal_policy_is_registered_under_its_own_name() -> None:
    assert all(build().name == name for name, build in PROXIMALS.items())
