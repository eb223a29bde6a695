"""Fully on-policy every trust region is open: each form is plain policy gradient."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from temper.objectives import POLICY_GRADIENTS, Extent, Objective, PolicyObjective, Tokens, TopTokens, objective_loss
from temper.objectives.advantage.advantages import raw
from temper.objectives.objective import BatchMeasure, Gain
from temper.objectives.policy.gates import GATES, clip, gmpo, none
from temper.objectives.policy.proximals import trainer
from temper.objectives.policy.ratios import RATIOS, sequence_geometric, token
from temper.objectives.policy.weighting import sequence_mean, sequence_sum, token_sum

SPREADING = {"top_k_spread"}
"""Ratios that move gradient to tokens that were not drawn."""
SEQUENCE_GATES = {"gmpo"}
LOGARITHMIC_GATES = {"none", "cispo", "vespo", "dppo_tv", "dppo_kl", "dppo_topk"}
"""Constant x A log pi: the ratio is not differentiated, so its level does not matter."""
SEQUENCE_RATIOS = {"sequence_geometric", "sequence_product"}


def on_policy(f1, weighting) -> Tokens:
    """F1 with one policy in every role, and everything a factor may ask for in agreement."""
    tokens = f1(weighting=weighting)
    policy_T = tokens.policy_logprobs.detach()
    likely_TK = torch.linspace(-4, -6, 20, dtype=torch.float64).expand(8, -1)
    top = TopTokens(
        ids=torch.arange(20).expand(8, -1),
        anchor_logprobs=likely_TK,
        policy_logprobs=likely_TK.clone().requires_grad_(),
    )
    return dataclasses.replace(
        tokens,
        policy_logprobs=policy_T.clone().requires_grad_(),
        proximal_logprobs=policy_T,
        behavior_logprobs=policy_T,
        reference_logprobs=policy_T,
        teacher_logprobs=policy_T,
        token_ids=torch.arange(8),
        rewards=tokens.advantages,
        entropy=torch.linspace(0, 1, 8, dtype=torch.float64),
        top=top,
        router_shift=torch.zeros(8, dtype=torch.float64),
    )


def gradient(objective: Objective, tokens: Tokens) -> list[float]:
    fresh = dataclasses.replace(tokens, policy_logprobs=tokens.policy_logprobs.detach().requires_grad_())
    objective_loss(objective, fresh)[0].backward()
    return fresh.policy_logprobs.grad.tolist()


def plain_gradient(tokens: Tokens, weights_T: Tensor | None = None) -> list[float]:
    """Gradient under the gate none: -weight A."""
    tokens = tokens if weights_T is None else dataclasses.replace(tokens, weights=weights_T)
    return gradient(objective(token(), none(), token_sum()), tokens)


def objective(ratio, gate, weighting) -> Objective:
    return PolicyObjective(
        name="test", advantage=raw(), ratio=ratio, gate=gate, proximal=trainer(), weighting=weighting
    )


@pytest.mark.parametrize("name", sorted(GATES.keys() - SEQUENCE_GATES))
@pytest.mark.parametrize("ratio", sorted(RATIOS.keys() - SEQUENCE_RATIOS - SPREADING))
def test_every_token_level_form_has_gradient_weight_one(f1, name, ratio) -> None:
    tokens = on_policy(f1, token_sum())
    got_T = torch.tensor(gradient(objective(RATIOS[ratio](), GATES[name](), token_sum()), tokens), dtype=torch.float64)
    assert (-got_T / tokens.advantages).tolist() == pytest.approx([1.0] * 8, abs=1e-12)


@pytest.mark.parametrize(
    ("ratio", "gate"),
    [(token(), gmpo()), *[(sequence_geometric(), build()) for name, build in GATES.items() if name != "gmpo"]],
    ids=str,
)
def test_sequence_forms_are_policy_gradient_under_sequence_mean(f1, ratio, gate) -> None:
    tokens = on_policy(f1, sequence_mean())
    got = gradient(objective(ratio, gate, sequence_mean()), tokens)
    assert got == pytest.approx(plain_gradient(tokens), abs=1e-12)


def test_the_product_ratio_under_sequence_mean_is_the_policy_gradient_of_whole_trajectories(f1) -> None:
    # Every token holds the ratio of the whole trajectory, so the mean over tokens becomes a sum: REINFORCE.
    got = gradient(objective(RATIOS["sequence_product"](), clip(), sequence_mean()), on_policy(f1, sequence_mean()))
    assert got == pytest.approx(plain_gradient(on_policy(f1, sequence_sum())), abs=1e-12)


@pytest.mark.parametrize("name", [name for name, one in POLICY_GRADIENTS.items() if one.ratio.name not in SPREADING])
def test_every_preset_is_policy_gradient_on_policy(f1, name) -> None:
    preset = without_regularizers(POLICY_GRADIENTS[name])
    tokens = on_policy(f1, preset.weighting)
    expected = plain_gradient(tokens, expected_weights(preset, tokens))
    assert gradient(preset, tokens) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", POLICY_GRADIENTS)
def test_the_comparison_rejects_every_preset_whose_gate_is_off_by_a_percent(f1, name) -> None:
    preset = without_regularizers(POLICY_GRADIENTS[name])
    tokens = on_policy(f1, preset.weighting)
    gate = preset.gate

    def too_large(tokens: Tokens, log_ratio_T: Tensor) -> Gain:
        gain = gate(tokens, log_ratio_T)
        return Gain(1.01 * gain.value, gain.clipped)

    mutant = dataclasses.replace(preset, gate=dataclasses.replace(gate, run=too_large))
    expected = plain_gradient(tokens, expected_weights(preset, tokens))
    assert gradient(mutant, tokens) != pytest.approx(expected, abs=1e-12)


def without_regularizers(preset: Objective) -> Objective:
    """Leaves out what need not be plain: added terms, emphasis, and rules that pick tokens of the whole batch."""
    corrections = tuple(rule for rule in preset.corrections if not isinstance(rule.run, BatchMeasure))
    return dataclasses.replace(preset, regularizers=(), emphasis=(), corrections=corrections)


def expected_weights(preset: Objective, tokens: Tokens) -> Tensor:
    """Those of the preset; a differentiated product ratio collects the weights of its whole trajectory (RLOO)."""
    if preset.ratio.name != "sequence_product" or preset.gate.name in LOGARITHMIC_GATES:
        return tokens.weights
    return tokens.sum_by_trajectory(tokens.weights)[tokens.trajectory_ids]


def test_presets_of_sequence_ratios_weigh_trajectories_and_not_tokens() -> None:
    # A sequence-level ratio with token_mean would weigh a trajectory by its length.
    extent = Extent(lengths=torch.tensor([3, 1]), group_ids=torch.zeros(2, dtype=torch.int64), max_new_tokens=4)
    for preset in POLICY_GRADIENTS.values():
        if preset.ratio.name == "sequence_geometric" or preset.gate.name == "gmpo":
            weights_B = preset.weighting(extent)
            assert (weights_B * extent.lengths).tolist() == pytest.approx([0.5, 0.5]), preset.name
