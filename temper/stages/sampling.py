"""Batches of what the policy draws: rollouts, and the credit that a policy objective gives them.

Owns: how a rollout source is wired for a stage. Refuses: rolling (rollout/), credit (batching/), and what one kind of
stage alone does with its groups (its own file).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from temper.batching.samples import CreditRules, make_batch
from temper.config import RunConfig
from temper.objectives import Objective, PolicyObjective
from temper.rollout.buffer import Buffer, StepGroups
from temper.rollout.group import Extras
from temper.rollout.source import RolloutSettings, RolloutSource
from temper.rollout.steps import StepSplit
from temper.stages.parts import Parts
from temper.stages.reading.data import StageData
from temper.types import Batch

Credit = Callable[[StepGroups], Batch]


def rollout_source(parts: Parts, credit: Credit, *, compares: bool = True) -> RolloutSource:
    """`compares`: members of a group are compared, so that groups without a difference may be replaced."""
    rollout, objective = parts.config.rollout, parts.objective
    buffer = Buffer(
        groups_per_step=rollout.groups_per_step,
        max_staleness=rollout.max_staleness,
        max_rounds=rollout.max_rounds,
        version=parts.trainer.version,
    )
    drop = rollout.drop_degenerate
    settings = RolloutSettings(
        group_size=rollout.group_size,
        min_members=objective.min_group if compares else 1,
        drop_degenerate=compares and ("dynamic_sampling" in objective.wants if drop is None else drop),
        error_limit=rollout.error_limit,
        step_seconds=rollout.step_seconds,
        prefix=f"stage {parts.index}",
        extras=Extras(
            greedy="greedy" in objective.needs,
            steps=_step_split(objective) if "step_values" in objective.needs else None,
            retries=rollout.retries,
            opponent=None if parts.opponent is None else replace(parts.setup, sampler=parts.opponent),
        ),
    )
    return RolloutSource(parts.setup, parts.data.stream, buffer, settings, credit)


def credit_by_objective(parts: Parts) -> Credit:
    """Credit as the stage's objective gives it, packed while the sampler draws on."""
    trainer, rules = parts.trainer, credit_rules(parts.config, parts.objective, parts.data)

    def credit(taken: StepGroups) -> Batch:
        version, scales = trainer.version, trainer.scales
        batch = make_batch(
            taken.groups, rules, score=trainer.score, version=version, dropped=taken.dropped, scales=scales
        )
        trainer.prepack(batch.updates)
        return batch

    return credit


def credit_rules(config: RunConfig, objective: Objective, data: StageData) -> CreditRules:
    trains = config.objective.train_truncated
    return CreditRules(
        objective=objective,
        max_new_tokens=config.sampling.max_new_tokens,
        max_episode_tokens=config.rollout.max_episode_tokens,
        updates=config.trainer.updates_per_batch,
        train_truncated="overlong_filter" not in objective.wants if trains is None else trains,
        part_weights=data.rubric.weights,
        seed=config.seed,
    )


def _step_split(objective: Objective) -> StepSplit:
    assert isinstance(objective, PolicyObjective), "a direct loss has no values of steps"
    settings: dict[str, Any] = dict(objective.advantage.arguments)
    return StepSplit(**settings)
