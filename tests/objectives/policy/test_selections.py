"""Which tokens the policy loss is taken on: Clip-Cov and the 80/20 rule."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from temper.errors import UserError
from temper.objectives import Tokens, measure_batch, objective_loss, resolve
from temper.objectives.policy.gates import dppo_topk, importance
from temper.objectives.policy.selections import SELECTIONS, clip_cov, covariances, top_entropy

COVARIANCES = [0.867119, 0.109449, 0.023208, -0.202411, 1.965368, -0.872774, 0.071072, -0.361388]
ENTROPY = [0.8, 0.1, 0.7, 0.2, 0.6, 0.3, 0.5, 0.4]


def kept(tokens: Tokens, rule, **changes) -> list[float]:
    objective = dataclasses.replace(resolve("dapo"), corrections=(rule,), **changes)
    return measure_batch(objective, tokens)[rule.name].tolist()


def many(total: int = 200, seed: int = 0) -> Tokens:
    """On-policy tokens of one trajectory each; half of them in the band of covariances 0.1 to 10."""
    generator = torch.Generator().manual_seed(1)
    logprobs = torch.randn(total, generator=generator, dtype=torch.float64)
    zeros = torch.zeros(total, dtype=torch.int64)
    return Tokens(
        policy_logprobs=logprobs,
        proximal_logprobs=logprobs,
        behavior_logprobs=logprobs,
        advantages=torch.randn(total, generator=generator, dtype=torch.float64),
        weights=torch.full((total,), 1.0 / total, dtype=torch.float64),
        trajectory_ids=torch.arange(total),
        num_trajectories=total,
        num_batch_tokens=total,
        versions=zeros,
        seed=seed,
    )


def test_covariances_on_f1(f1) -> None:
    assert covariances(f1()).tolist() == pytest.approx(COVARIANCES, abs=1e-6)


def test_clip_cov_drops_nothing_on_f1_because_its_candidate_is_clipped_already(f1) -> None:
    assert kept(f1(), clip_cov()) == [1.0] * 8


def test_without_a_clip_the_candidate_of_f1_is_dropped(f1) -> None:
    # The mutation of the test above: a rule that forgot the gate would drop this token there.
    assert kept(f1(), clip_cov(), gate=importance()) == [1, 1, 1, 1, 0, 1, 1, 1]


def test_clip_cov_drops_a_share_of_the_band_at_random_by_the_seed() -> None:
    rule = clip_cov(share=0.1, low=0.1, high=10.0)
    first = torch.tensor(kept(many(), rule))
    in_band = (covariances(many()) > 0.1) & (covariances(many()) < 10.0)
    assert (first == 0).sum() == 20
    assert in_band[first == 0].all()
    assert kept(many(), rule) == first.tolist()
    assert kept(many(seed=1), rule) != first.tolist()


def test_clip_cov_drops_one_token_when_the_share_is_tiny_and_all_when_few_are_eligible() -> None:
    assert kept(many(), clip_cov(share=1e-9, low=0.1)).count(0.0) == 1
    eligible = ((covariances(many()) > 0.5) & (covariances(many()) < 0.6)).sum().item()
    assert 0 < eligible < 20
    assert kept(many(), clip_cov(share=0.1, low=0.5, high=0.6)).count(0.0) == eligible


def test_every_candidate_is_as_likely_as_the_others() -> None:
    rule = clip_cov(share=0.1, low=0.1, high=10.0)
    drawn = sum(1 - torch.tensor(kept(many(seed=seed), rule)) for seed in range(300))
    in_band = (covariances(many()) > 0.1) & (covariances(many()) < 10.0)
    expected = 300 * 20 / in_band.sum().item()
    assert (drawn[in_band] - expected).abs().max() < 5 * expected**0.5


def test_top_entropy_keeps_the_share_above_the_quantile(f1) -> None:
    tokens = f1(entropy=torch.tensor(ENTROPY, dtype=torch.float64))
    # quantile 0.8 of 8 values lies at place 5.6: between 0.6 and 0.7.
    assert kept(tokens, top_entropy()) == [1, 0, 1, 0, 0, 0, 0, 0]
    assert kept(tokens, top_entropy(share=0.5)) == [1, 0, 1, 0, 1, 0, 1, 0]
    assert kept(tokens, top_entropy(share=1.0)) == [1.0] * 8


def test_the_quantile_is_that_of_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    for total in (1, 2, 7, 100):
        entropy = torch.rand(total, generator=generator, dtype=torch.float64)
        tokens = dataclasses.replace(many(total), entropy=entropy)
        for share in (0.2, 0.33, 0.5, 0.9):
            expected = (entropy >= torch.quantile(entropy, 1 - share)).double()
            assert kept(tokens, top_entropy(share)) == expected.tolist()


def test_a_selected_loss_keeps_its_denominator(f1) -> None:
    plain, objective = resolve("dapo"), dataclasses.replace(resolve("dapo"), corrections=(top_entropy(),))
    gradients = []
    for one in (plain, objective):
        tokens = f1(weighting=one.weighting, entropy=torch.tensor(ENTROPY, dtype=torch.float64))
        tokens = dataclasses.replace(tokens, measured=measure_batch(one, tokens))
        objective_loss(one, tokens)[0].backward()
        gradients.append(tokens.policy_logprobs.grad)
    assert gradients[1].tolist() == (gradients[0] * torch.tensor([1, 0, 1, 0, 0, 0, 0, 0])).tolist()


def test_clip_cov_refuses_a_gate_that_it_cannot_ask(f1) -> None:
    with pytest.raises(UserError, match="dppo_topk reads are not kept"):
        kept(f1(), clip_cov(), gate=dppo_topk())


def test_selections_need_the_whole_batch_and_refuse_empty_ranges() -> None:
    assert all(build().needs == {"batch"} for build in SELECTIONS.values())
    with pytest.raises(UserError, match="share=0"):
        top_entropy(share=0.0)
    with pytest.raises(UserError, match=r"band from 5\.0 to 1\.0"):
        clip_cov(low=5.0, high=1.0)
