"""Batches of what the policy draws, or was recorded to draw: groups, and the credit that an objective gives them.

Owns: how a source of groups is wired for a stage. Refuses: rolling (rollout/), credit (batching/), and what one kind of
stage alone does with its groups (its own file).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from temper.batching.samples import CreditRules, make_batch
from temper.config import RunConfig
from temper.objectives import Objective, PolicyObjective
from temper.protocols import BatchSource
from temper.rollout.buffer import Buffer, StepGroups
from temper.rollout.controls.control import Setting
from temper.rollout.controls.registry import read_controls
from temper.rollout.group import Extras
from temper.rollout.source import RolloutSettings, RolloutSource
from temper.rollout.steps import StepSplit
from temper.stages.parts import Parts
from temper.stages.reading.choosing import make_memory
from temper.stages.reading.data import StageData
from temper.stages.recorded import RecordedGroups, RecordedSettings
from temper.tasks.choice.stream import ChosenStream
from temper.types import Batch

Credit = Callable[[StepGroups], Batch]


def group_source(parts: Parts, credit: Credit, *, compares: bool = True) -> BatchSource:
    """Groups of attempts that are played, or recorded ones where the stage reads such."""
    if not parts.data.recorded:
        return rollout_source(parts, credit, compares=compares)
    rollout = parts.config.rollout
    settings = RecordedSettings(
        groups_per_step=rollout.groups_per_step,
        min_members=parts.objective.min_group if compares else 1,
        drop_degenerate=compares and _drops_degenerate(parts),
        max_rounds=rollout.max_rounds,
    )
    return RecordedGroups(parts.data.stream, parts.data.recorded, settings, credit)


def _drops_degenerate(parts: Parts) -> bool:
    drop = parts.config.rollout.drop_degenerate
    return "dynamic_sampling" in parts.objective.wants if drop is None else drop


def rollout_source(parts: Parts, credit: Credit, *, compares: bool = True, is_judged: bool = True) -> RolloutSource:
    """`compares`: members of a group are compared, so that groups without a difference may be replaced. `is_judged`: a
    reward scores them, so that prompts have histories."""
    rollout, objective, stream = parts.config.rollout, parts.objective, parts.data.stream
    buffer = Buffer(
        groups_per_step=rollout.groups_per_step,
        max_staleness=rollout.max_staleness,
        max_rounds=rollout.max_rounds,
        version=parts.trainer.version,
        order=rollout.order,
        tell=parts.warn,
    )
    settings = RolloutSettings(
        group_size=rollout.group_size,
        min_members=objective.min_group if compares else 1,
        drop_degenerate=compares and _drops_degenerate(parts),
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
    memory = make_memory(parts.config, stream.sources) if is_judged else None
    chosen = ChosenStream(stream, memory) if memory is not None and memory.choosers else stream
    setting = replace(setting_of(parts.config), decode=parts.setup.renderer.decode, pressure=parts.pressure)
    controls = read_controls(rollout.controls, setting)
    return RolloutSource(parts.setup, chosen, buffer, settings, credit, memory=memory, controls=controls)


def setting_of(config: RunConfig) -> Setting:
    """What the controls of a stage are told about it before there is a tokenizer and a sampler."""
    rollout = config.rollout
    return Setting(groups_per_step=rollout.groups_per_step, max_staleness=rollout.max_staleness, order=rollout.order)


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
        epochs=config.trainer.epochs,
        train_truncated="overlong_filter" not in objective.wants if trains is None else trains,
        part_weights=data.rubric.weights,
        seed=config.seed,
    )


def _step_split(objective: Objective) -> StepSplit:
    assert isinstance(objective, PolicyObjective), "a direct loss has no values of steps"
    settings: dict[str, Any] = dict(objective.advantage.arguments)
    return StepSplit(**settings)
