"""Losses for models that score: a preference between two conversations, and a verdict on every step of a solution.

Owns: how rows become pairs and labels, and the two presets. Refuses: the losses' mathematics (reward_models.py).
Shapes: _T positions that are read, _P pairs, of one microbatch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from temper.objectives.factor import require
from temper.objectives.losses.reward_models import process_reward_loss, reward_model_loss
from temper.objectives.metrics import MetricSums
from temper.objectives.objective import DirectLoss, Loss, loss_on
from temper.objectives.tokens import Tokens

CHOSEN, REJECTED = 1.0, 0.0
"""Rewards of a pair's two rows."""


@loss_on("pairs", needs=["scores"])
def bradley_terry(margin: float = 0.0, centring: float = 0.0) -> Callable[[Tokens], tuple[Tensor, MetricSums]]:
    """-logsig(s_w - s_l - margin - margin of the pair) + centring (s_w + s_l)^2, mean over the batch's pairs.

    A pair's own margin is the advantage of its chosen row, 0 where the data has none.
    """
    require(centring >= 0, f"bradley_terry: centring={centring} must not be negative, e.g. 0.01")

    def run(tokens: Tokens) -> tuple[Tensor, MetricSums]:
        _require_pairs(tokens)
        chosen_P, rejected_P = tokens.policy_logprobs[0::2], tokens.policy_logprobs[1::2]
        return reward_model_loss(
            chosen_P, rejected_P, tokens.weights[0::2], margin=tokens.advantages[0::2] + margin, centring=centring
        )

    return run


@loss_on("steps", needs=["scores"])
def steps(separator: str = "\n\n") -> Callable[[Tokens], tuple[Tensor, MetricSums]]:
    """Binary cross-entropy at the end of every labelled step, mean over the batch's; advantages hold the labels.

    `separator`: what ends a step, and where rows are therefore read.
    """
    require(bool(separator), "steps: separator is empty. Use what stands between steps, e.g. a blank line")

    def run(tokens: Tokens) -> tuple[Tensor, MetricSums]:
        return process_reward_loss(tokens.policy_logprobs, tokens.advantages, tokens.weights)

    return run


def _require_pairs(tokens: Tokens) -> None:
    """One read position per row, chosen and rejected in turn. Otherwise answers to different prompts are compared."""
    assert tokens.rewards is not None, "rows of a pair carry their reward"
    owners = torch.arange(len(tokens), device=tokens.trajectory_ids.device)
    assert torch.equal(tokens.trajectory_ids, owners), "a row of a pair is read at one position"
    turns = tokens.rewards.new_tensor([CHOSEN, REJECTED]).repeat(len(tokens) // 2)
    assert torch.equal(tokens.rewards, turns), (
        'a microbatch holds whole pairs, chosen before rejected: pack with together="group"'
    )


SCORE_LOSSES: dict[str, Callable[..., Loss]] = {"bradley_terry": bradley_terry, "steps": steps}

REWARD_MODEL = DirectLoss(
    name="reward_model",
    loss=bradley_terry(),
    formula="mean over pairs of -log sigmoid(s(chosen) - s(rejected) - margin) + c (s(chosen) + s(rejected))^2",
    source="Bradley and Terry 1952; TRL reward_trainer, OpenRLHF",
    note="Trains a scalar head on preference pairs. Scores are free up to a constant: centring = 0.01 fixes it. The "
    "checkpoint holds the scale that puts scores on mean 0 and deviation 1.",
)

PROCESS_REWARD_MODEL = DirectLoss(
    name="process_reward_model",
    loss=steps(),
    formula="mean over labelled steps of -log sigmoid(+-s at the end of the step's separator)",
    source="arXiv 2305.20050; TRL prm_trainer (layout)",
    note="Trains a scalar head at the end of each step. Labels may come from Monte-Carlo continuations.",
)

PRESETS = (REWARD_MODEL, PROCESS_REWARD_MODEL)
