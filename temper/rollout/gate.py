"""The gate before step 1 and the watch after it: sampler and trainer must agree on log-probabilities.

Owns: the budgets, the comparison and the diagnosis. Refuses: training when they differ: a run that is silently
off-policy does not start.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from temper.batching.rows import rows_of
from temper.errors import BackendError
from temper.rollout.episode import EpisodeSetup, run_episode
from temper.types import Sample, Task

Recompute = Callable[[Sequence[Sample], Literal["policy"]], list[list[float]]]
"""Trainer.score."""

BUDGETS = {"float32": 1e-4, "float64": 1e-8, "bfloat16": 0.03}
"""Largest mean |sampled - recomputed| log-probability by dtype of the weights, a few times what was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How far recomputed log-probabilities are from sampled ones."""

    num_tokens: int
    mean_gap: float
    max_gap: float
    first_token_gap: float
    """Mean over the first drawn token of each row: large alone when the prompts differ, e.g. by an extra BOS."""
    slope: float
    """Recomputed over sampled, by least squares through the origin: 1 when equal; a temperature mismatch scales it."""


def measure(samples: Sequence[Sample], recomputed: Sequence[Sequence[float]]) -> Agreement:
    """Compares behavior log-probabilities with the trainer's, over drawn tokens."""
    pairs = [
        (sampled, again)
        for sample, row in zip(samples, recomputed, strict=True)
        for is_drawn, sampled, again in zip(sample.loss_mask, sample.behavior_logprobs, row, strict=True)
        if is_drawn
    ]
    firsts = []
    for sample, row in zip(samples, recomputed, strict=True):
        if sample.num_actions:
            place = sample.loss_mask.index(1)
            firsts.append(abs(sample.behavior_logprobs[place] - row[place]))
    gaps = [abs(sampled - again) for sampled, again in pairs]
    if not gaps:
        raise BackendError("the gate has no drawn tokens to compare")
    squares = sum(sampled * sampled for sampled, _ in pairs)
    return Agreement(
        num_tokens=len(pairs),
        # NaN must fail the gate, and max() would hide it.
        mean_gap=sum(gaps) / len(gaps),
        max_gap=math.nan if any(math.isnan(gap) for gap in gaps) else max(gaps),
        first_token_gap=sum(firsts) / len(firsts),
        slope=sum(sampled * again for sampled, again in pairs) / squares if squares else 1.0,
    )


def require_agreement(agreement: Agreement, *, budget: float, when: str) -> None:
    """Raises BackendError with the numbers and the likely cause when the mean gap is above the budget."""
    if agreement.mean_gap <= budget:
        return
    raise BackendError(
        f"{when}: sampler and trainer disagree on {agreement.num_tokens} tokens by {agreement.mean_gap:.3g} on average "
        f"(largest {agreement.max_gap:.3g}), more than the budget {budget:.3g}. {diagnose(agreement)}. Training "
        f"on this would be silently off-policy. If the gap is expected, set engine.max_logprob_gap"
    )


def diagnose(agreement: Agreement) -> str:
    """The likeliest cause, from the shape of the gap."""
    if math.isnan(agreement.mean_gap):
        return "Some log-probabilities are not numbers: look for an overflow in the weights"
    if agreement.first_token_gap > 5 * agreement.mean_gap:
        return "The first drawn token differs most: the prompt ids of sampler and trainer differ, e.g. by an extra BOS"
    if abs(agreement.slope - 1) > 0.1:
        return (
            f"Recomputed values are {agreement.slope:.2f} times the sampled ones: look at the temperature on both sides"
        )
    return (
        "No single scale explains it: look for stale or missing weights in the sampler, or for mixed dtypes of the head"
    )


async def check_before_training(
    setup: EpisodeSetup, tasks: Sequence[Task], recompute: Recompute, *, budget: float, name: str
) -> Agreement:
    """Samples a few completions and compares them with the trainer's log-probabilities. Raises when they differ."""
    episodes = (
        run_episode(setup, task, group_id=f"{name}/{place}", index=0, request_id=f"{name}/{place}")
        for place, task in enumerate(tasks)
    )
    trajectories = await asyncio.gather(*episodes)
    rows = [row for trajectory in trajectories if trajectory.num_tokens for row in rows_of(trajectory)]
    agreement = measure(rows, await asyncio.to_thread(recompute, rows, "policy"))
    require_agreement(agreement, budget=budget, when="before the first step")
    return agreement
