"""From a configuration to the live parts of one stage.

Owns: which parts are made and how they are wired. Refuses: training (loop.py), what differs from kind to
kind (stages/), and what the loop calls back (plan.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from temper.build.agents import make_player
from temper.build.environments import Environments
from temper.build.full import explain_out_of_memory
from temper.build.memory import settle
from temper.build.objective import resolve_objective
from temper.build.sampler import Hosting, make_opponent, make_sampler
from temper.build.thinking import make_thinking
from temper.build.trainer import TrainerOrder, open_everywhere
from temper.cluster.ray import RayPlace
from temper.config import RunConfig
from temper.engine.fleet.kept import KeptFleet
from temper.engine.local.mixture import WithOpponent
from temper.models.nf4.holding import require_family
from temper.objectives import Objective
from temper.protocols import BatchSource, Sampler, Trainer
from temper.rollout.controls.pressure import Pressure
from temper.rollout.episode import EpisodeSetup, Player, Scorer
from temper.stages.distill import NoReward
from temper.stages.kind import StageKind
from temper.stages.kinds import kind_of
from temper.stages.measures import Audit, Measure
from temper.stages.parts import Parts
from temper.stages.reading.choosing import require_drawn
from temper.stages.reading.data import StageData, open_data, require_judge
from temper.stages.reading.fitting import require_rows
from temper.terminal import print_line
from temper.trainer.checkpoint import read_checkpoint
from temper.trainer.ranks.ranked import Together
from temper.types import EvaluationResult, SamplingParams, Scalar


@dataclass(frozen=True, kw_only=True)
class Listeners:
    """Who hears about a stage what the loop does not tell."""

    note: Callable[[str], None] = print_line
    """Where facts about the run go: the store's events."""
    warn: Callable[[str], None] = print_line
    """Where doubts about the run go: the same, more loudly."""
    show: Callable[[object], None] = print_line
    """Where tables go that people should see at once: the display."""
    doing: Callable[[str, str], None] = lambda what, how_far: None
    """Who is told what happens before the first step, and how far it is: the display."""
    audit: Audit | None = None
    """Where held-out transcripts and side effects go; None: nowhere."""


@dataclass(frozen=True, kw_only=True)
class Around:
    """What a run has, whatever its stage."""

    caches: Path | None = None
    """A folder for what is worth keeping between two processes."""
    run: Path | None = None
    """Where the run is written down."""
    earlier: Collection[str] = ()
    """Kinds of the stages before this one."""
    together: Together | None = None
    """All trainer ranks; None: this process is the only one."""
    ray: RayPlace | None = None
    """Where sampler processes are started; None: on this machine."""
    kept: KeptFleet = field(default_factory=KeptFleet)
    """Sampler processes that outlived trainers, and where they are kept."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The live parts of one stage."""

    config: RunConfig
    index: int
    objective: Objective
    data: StageData
    origin: Path
    """Directory of the model that it starts from."""
    model: torch.nn.Module
    trainer: Trainer
    sampler: Sampler
    pressure: Pressure
    """What the sampler counts, step by step."""
    sampler_model: torch.nn.Module | None
    """The sampler's weights: the model, or a copy when it samples while the model is trained. None: elsewhere."""
    source: BatchSource
    setup: EpisodeSetup
    environments: Environments
    measure: Measure
    must_be_ready: bool
    """Whether the policy must be shown to be fit for this stage, because of the kind of stage that made it."""
    listeners: Listeners
    writers: Mapping[str, Callable[[Path], None]]
    """What goes into a checkpoint beside the trainer's state, by name."""

    async def evaluate(self, step: int, metrics: Mapping[str, float] | None = None) -> list[EvaluationResult]:
        """Held-out scores of the weights of now. metrics: of the step they come from."""
        return await self.measure(step, metrics or {}, self.listeners.audit)

    def verdicts(self) -> dict[str, list[dict[str, Scalar]]]:
        """What judges said since the last call, by part of the reward."""
        found = self.data.rubric.records()
        if self.data.verifier is not self.data.rubric:
            found |= {f"heldout/{part}": records for part, records in self.data.verifier.records().items()}
        return found

    async def close(self, kept: KeptFleet | None = None) -> None:
        """kept: where its sampler processes may stay, because the stage begins anew; None: they end."""
        await self.setup.player.close()
        await self.environments.close()
        if kept is None or not await kept.keep(self.sampler):
            await self.sampler.close()
        await self.data.rubric.close()
        if self.data.verifier is not self.data.rubric:
            await self.data.verifier.close()


def build_stage(
    config: RunConfig,
    index: int,
    model_folder: Path,
    checkpoint: Path | None = None,
    *,
    around: Around = Around(),
    listeners: Listeners = Listeners(),
) -> Stage:
    """Loads the model and wires trainer, sampler, data and reward of one stage. `checkpoint` is where it goes on."""
    resumed = read_checkpoint(checkpoint) if checkpoint is not None else None  # first: it verifies every part
    kind, objective = kind_of(config), resolve_objective(config)
    data = open_data(config, objective, kind.reading, model_folder)
    check_data(config, kind, objective, data)
    config = settle(config, objective, data, model_folder)
    with explain_out_of_memory(config, objective, data, model_folder, phase="loading"):
        order = TrainerOrder(config=config, folder=model_folder, checkpoint=checkpoint, is_rolling=data.has_groups)
        trainer, models = open_everywhere(order, data.tokenizer, around.together)
        hosting = Hosting(note=listeners.warn, ray=around.ray, kept=around.kept)
        sampler, sampler_model = make_sampler(config, objective, data, models.policy, model_folder, hosting)
        opponent = make_opponent(config, objective, data, models.others.reference, sampler_model)
    environments = Environments(config.env, max_cost=config.rollout.max_episode_cost)
    player = make_player(config, data, around.run)
    setup = episode_setup(config, objective, data, sampler, environments, player)
    everybody = sampler if opponent is None else WithOpponent(sampler, opponent)
    pressure = Pressure(everybody.stats)
    parts = Parts(
        config=config,
        index=index,
        objective=objective,
        data=data,
        trainer=trainer,
        setup=setup,
        opponent=opponent,
        pressure=pressure.latest,
        folder=around.caches,
        origin=model_folder,
        warn=listeners.warn,
    )
    source = kind.make_source(parts)
    _resume(source, data, resumed, checkpoint)
    return Stage(
        config=config,
        index=index,
        objective=objective,
        data=data,
        origin=model_folder,
        model=models.policy,
        trainer=trainer,
        sampler=everybody,
        pressure=pressure,
        sampler_model=sampler_model,
        source=source,
        setup=setup,
        environments=environments,
        measure=kind.make_measure(parts),
        must_be_ready=data.is_rolling and bool(kind.ready_after.intersection(around.earlier)),
        listeners=listeners,
        writers={"reward": data.rubric.save, **kind.writers(parts, source)},
    )


def _resume(source: BatchSource, data: StageData, resumed: Mapping[str, Any] | None, checkpoint: Path | None) -> None:
    """Where the stage stopped; nothing for one that begins."""
    if resumed is None or checkpoint is None:
        return
    source.load_state(resumed["source"])
    data.rubric.load_state(resumed["rubric"])
    data.rubric.load(checkpoint)
    data.verifier.load_state(resumed["verifier"])


def check_data(config: RunConfig, kind: StageKind, objective: Objective, data: StageData) -> None:
    """Raises UserError for data that a stage cannot train on, or be judged on."""
    require_judge(config, data)
    require_drawn(config, is_rolling=data.is_rolling)
    if config.model.lora is not None and config.model.lora.base == "4bit":
        require_family(data.shape.family)
    kind.check_data(config, objective, data)
    make_thinking(config, objective, data.renderer)
    if (make_rows := kind.row_maker(objective, data)) is not None:
        require_rows(config, make_rows, data)


def episode_setup(
    config: RunConfig,
    objective: Objective,
    data: StageData,
    sampler: Sampler,
    environments: Environments,
    player: Player,
) -> EpisodeSetup:
    """What every episode of a stage shares, as the recipe says it."""
    scorer: Scorer = data.rubric if config.reward else NoReward()
    return EpisodeSetup(
        sampler=sampler,
        renderer=data.renderer,
        scorer=scorer,
        make_env=environments,
        params=SamplingParams(
            temperature=config.sampling.temperature,
            max_new_tokens=config.sampling.max_new_tokens,
            stop_ids=data.renderer.stop_ids,
            top_k=config.sampling.top_k,
            top_p=config.sampling.top_p,
            min_p=config.sampling.min_p,
            stop=tuple(config.sampling.stop),
            top_logprobs=objective.top_k("sampler_top_k"),
        ),
        max_turns=config.rollout.max_turns,
        episode_seconds=config.rollout.episode_seconds,
        max_episode_tokens=config.rollout.max_episode_tokens,
        thinking=make_thinking(config, objective, data.renderer),
        seed=config.seed,
        player=player,
    )
