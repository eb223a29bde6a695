"""Where the batches of a stage come from, by kind of stage.

Owns: which source is made and how it is wired. Refuses: the sources themselves (stages/, rollout/).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from temper.batching.samples import CreditRules, make_batch
from temper.build.sampler import require_opponent
from temper.config import RunConfig
from temper.data import StageData
from temper.errors import UserError
from temper.evals.suites import ANSWERS
from temper.objectives import Objective
from temper.objectives.losses.pairs import opponent_share
from temper.protocols import BatchSource, Sampler, Trainer
from temper.rollout.buffer import Buffer, StepGroups
from temper.rollout.episode import EpisodeSetup
from temper.rollout.group import Extras
from temper.rollout.selection import Selection, read_selection
from temper.rollout.source import RolloutSettings, RolloutSource
from temper.rollout.steps import StepSplit
from temper.stages.distill import NoReward, distill_source, share_of_samples, unrewarded
from temper.stages.preference import Choose, offline_source, pairs_of, wins_of
from temper.stages.preference_rows import RowRules
from temper.stages.reference_cache import References
from temper.stages.rejection import KeepRules, Ledger, Rejection, keep_of
from temper.stages.reward_model import PairRows, RowMaker, ScoredExamples, StepRows
from temper.stages.sft import Examples
from temper.types import Batch

Credit = Callable[[StepGroups], Batch]


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a source is made of."""

    config: RunConfig
    index: int
    """Of the stage."""
    objective: Objective
    data: StageData
    trainer: Trainer
    setup: EpisodeSetup
    opponent: Sampler | None = None
    """Who plays one half of every group; None: the policy plays all."""
    folder: Path | None
    """Where caches that outlive a process are kept; None: nowhere."""
    origin: Path
    """The model that the stage starts from."""


def make_source(parts: Parts) -> BatchSource:
    return _MAKERS[parts.config.stage](parts)


def is_rolling(config: RunConfig, objective: Objective, data: StageData) -> bool:
    """Whether a stage samples what it trains on. Preferences are sampled when the data brings none."""
    if config.stage == "preference":
        return not data.has_preferences
    if config.stage == "distill":
        return share_of_samples(objective) > 0
    return config.stage in ("rl", "rejection")


def row_maker(config: RunConfig, objective: Objective, data: StageData) -> RowMaker:
    """Rows that a scalar head is read on."""
    longest = max_length(config, data)
    assert objective.loss is not None, "a reward model trains a direct loss"
    if objective.loss.name == "steps":
        return StepRows(data.tokenizer, separator=objective.loss.argument("separator"), max_length=longest)
    return PairRows(data.tokenizer, max_length=longest)


def reference_cache(parts: Parts, name: str = "references.bin") -> References:
    path = None if parts.folder is None else parts.folder / name
    return References(parts.trainer.score, path, identity=str(parts.origin.resolve()))


def examples_of(config: RunConfig, objective: Objective, data: StageData) -> BatchSource:
    """Rows that need no model: texts to imitate, or rows that a scalar head is read on."""
    size, drops_long = config.trainer.examples_per_step, config.trainer.max_length > 0
    if config.stage == "reward_model":
        return ScoredExamples(data.stream, row_maker(config, objective, data), batch_size=size, drops_long=drops_long)
    return Examples(
        data.stream,
        data.renderer,
        objective,
        batch_size=size,
        max_length=max_length(config, data),
        drops_long=drops_long,
    )


def _examples(parts: Parts) -> BatchSource:
    return examples_of(parts.config, parts.objective, parts.data)


def _rolled(parts: Parts) -> RolloutSource:
    rules = _credit_rules(parts.config, parts.objective, parts.data)
    return _roller(parts, lambda taken: _credited(parts, rules, taken))


def _credited(parts: Parts, rules: CreditRules, taken: StepGroups) -> Batch:
    trainer = parts.trainer
    batch = make_batch(
        taken.groups, rules, score=trainer.score, version=trainer.version, dropped=taken.dropped, scales=trainer.scales
    )
    trainer.prepack(batch.updates)
    return batch


def require_comparable(config: RunConfig, objective: Objective) -> None:
    """Refuses a preference stage without pairs that has nothing to make them with."""
    if not config.reward:
        raise UserError(
            "a preference stage compares pairs: its training data has none (columns chosen and rejected, or label), "
            "and there is no [[reward]] to compare samples by. Add either"
        )
    direct_loss = objective.loss
    require_opponent(config, objective)
    if config.rollout.group_size < 2:
        raise UserError("rollout.group_size = 1 leaves no two answers to compare. Use 2 or more")
    if direct_loss is not None and direct_loss.name in _NEEDS_DATA:
        raise UserError(
            f"objective {direct_loss.name} reads a data set: {_NEEDS_DATA[direct_loss.name]}. Give data with pairs or "
            f'labels, or use objective.preset = "online_dpo"'
        )


def _preferences(parts: Parts) -> BatchSource:
    config, trainer = parts.config, parts.trainer
    if parts.data.has_preferences:
        rules = RowRules(parts.data.renderer, max_length(config, parts.data))
        return offline_source(
            parts.objective,
            parts.data.stream,
            rules,
            reference_cache(parts),
            trainer.score,
            batch_size=config.trainer.examples_per_step,
            drops_long=config.trainer.max_length > 0,
        )
    require_comparable(config, parts.objective)
    updates, direct_loss = config.trainer.updates_per_batch, parts.objective.loss
    if direct_loss is not None and direct_loss.name == "nash_md":
        return _roller(parts, lambda taken: wins_of(taken, version=trainer.version, updates=updates))
    choose: Choose = "extremes" if opponent_share(direct_loss) is None else "sides"
    return _roller(
        parts,
        lambda taken: pairs_of(taken, version=trainer.version, updates=updates, choose=choose, seed=config.seed),
    )


def keep_rule(config: RunConfig) -> Selection:
    return read_selection(config.rollout.keep, ANSWERS)


def _rejection(parts: Parts) -> BatchSource:
    config = parts.config
    ledger = Ledger(keep_rule(config))
    rules = KeepRules(show=parts.data.renderer.prompt_messages, seed=config.seed)
    roller = _roller(parts, lambda taken: keep_of(taken, rules, ledger, version=parts.trainer.version))
    return Rejection(roller, ledger, steps=config.steps)


def _distill(parts: Parts) -> BatchSource:
    config = parts.config
    rules = _credit_rules(config, parts.objective, parts.data)

    # The recipe's reward judges held-out answers; what it says of a sample must not decide whether that is distilled.
    unjudged = replace(parts, setup=replace(parts.setup, scorer=NoReward()))

    def credit(taken: StepGroups) -> Batch:
        return _credited(parts, rules, taken)

    return distill_source(
        parts.objective,
        seed=config.seed,
        examples=partial(_examples, parts),
        roller=lambda: _roller(unjudged, unrewarded(credit)),
        max_staleness=config.rollout.max_staleness,
    )


def _roller(parts: Parts, credit: Credit) -> RolloutSource:
    rollout, objective = parts.config.rollout, parts.objective
    buffer = Buffer(
        groups_per_step=rollout.groups_per_step,
        max_staleness=rollout.max_staleness,
        max_rounds=rollout.max_rounds,
        version=parts.trainer.version,
    )
    drop = rollout.drop_degenerate
    compares = parts.config.stage not in ("rejection", "distill")
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


def _step_split(objective: Objective) -> StepSplit:
    settings: dict[str, Any] = dict(objective.advantage.arguments)
    return StepSplit(**settings)


def _credit_rules(config: RunConfig, objective: Objective, data: StageData) -> CreditRules:
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


def max_length(config: RunConfig, data: StageData) -> int:
    context = data.shape.max_context
    return min(config.trainer.max_length or context, context)


_NEEDS_DATA = {"kto": "its baseline comes from mismatched completions"}
"""Losses of preferences that samples cannot feed, and why."""

_MAKERS: dict[str, Callable[[Parts], BatchSource]] = {
    "sft": _examples,
    "reward_model": _examples,
    "rejection": _rejection,
    "preference": _preferences,
    "rl": _rolled,
    "distill": _distill,
}
