"""`temper simulate`: how fast a recipe would run, on how many GPUs and with which bound S.

Owns: which stage, whose speeds and lengths, and the stage's own source over simulated episodes. Refuses: simulating
(simulate/), and words (simulate/table.py).
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from temper.build import (
    PlanRequest,
    StagePlan,
    check_stage,
    check_stages,
    explain_misfit,
    first_model,
    plan_stage,
)
from temper.commands.training.preflight import Later, OpenedStage
from temper.config import RunConfig, load_recipe
from temper.errors import UserError
from temper.objectives import Objective
from temper.planning.gpus import find_gpu
from temper.planning.workload import AnswerLengths
from temper.protocols import BatchSource, Trainer
from temper.rollout.episode import EpisodeSetup
from temper.runs.reader import RunReader
from temper.simulate.lengths import Lengths, measured, read_lengths
from temper.simulate.like import MeasuredRun, RunSettings, read_run
from temper.simulate.outcome import SimulatedRun
from temper.simulate.roofline import roofline_speeds
from temper.simulate.run import Credit, Scenario, simulate
from temper.simulate.sampler import SamplerLimits
from temper.simulate.speeds import Speeds, in_parts, with_given
from temper.simulate.split import Split, StepSize, require_samplers, split_gpus
from temper.stages.kinds import kind_of
from temper.stages.parts import Parts
from temper.stages.reading.data import StageData, open_data
from temper.stages.sampling import rollout_source
from temper.types import Task

LOOKED_AT = 512
"""Answers and prompts whose mean length stands for all where a split is chosen."""
LEAST_STEPS, MOST_STEPS, ENOUGH_ANSWERS = 4, 20, 4096
"""Of a simulation that was not told how long it shall be."""
USUAL_SHARE = 4
"""Without a word about lengths, the mean answer has one of this many parts of sampling.max_new_tokens."""


@dataclass(frozen=True, kw_only=True)
class SimulationRequest:
    """What is asked beside the recipe."""

    gpu: str = ""
    like: Path | None = None
    given: Mapping[str, float]
    """Speeds by name, in place of those of the GPU or the run."""
    gpus: Sequence[int]
    staleness: Sequence[int]
    trainers: int = 0
    """0: as many as fit the samplers."""
    lengths: str = ""
    """Empty: those of the run, or lognormal below the limit."""
    steps: int = 0
    """Steps that are counted; 0: fewer of large batches, so that it takes seconds."""
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class SimulationResult:
    title: str
    runs: Sequence[SimulatedRun]
    speeds: Sequence[Speeds]
    """Of each run."""
    plans: Sequence[StagePlan | None]
    """Of each run whose speeds are those of a GPU."""


@dataclass(frozen=True, kw_only=True)
class _Arrangement:
    """Who does what on so many GPUs, and how fast."""

    split: Split
    speeds: Speeds
    kv_tokens: int
    """Of each sampler; 0: enough."""
    plan: StagePlan | None = None


@dataclass(frozen=True, kw_only=True)
class _Stage:
    """The stage that is simulated, as far as it can be looked at without weights."""

    opened: OpenedStage
    objective: Objective
    data: StageData
    lengths: Lengths
    like: MeasuredRun | None

    @property
    def config(self) -> RunConfig:
        return self.opened.readable


def simulate_recipe(
    recipe: Path,
    asked: SimulationRequest,
    *,
    overrides: Sequence[str] = (),
    tell: Callable[[str], None] = lambda line: None,
) -> SimulationResult:
    """Every number of GPUs with every S; `tell` hears what is simulated next."""
    stages = load_recipe(recipe, overrides)
    check_stages(stages)
    with tempfile.TemporaryDirectory() as folder:
        later = Later(stages, first_model(stages[0], Path(folder), has_weights=False))
        opened = [stage for stage in map(later.open, stages) if _is_simulated(stage.config)]
        if not opened:
            raise UserError(f"{recipe} has no stage that trains on what it draws by its reward: nothing to simulate")
        stage = _open(opened[-1], asked)
        prompt_tokens = _prompt_tokens(stage.data)
        runs, found = [], []
        for gpus in asked.gpus:
            for staleness in asked.staleness:
                tell(f"{gpus} GPU(s), S = {staleness}")
                rollout = stage.config.rollout.model_copy(update={"max_staleness": staleness})
                own = stage.config.model_copy(update={"rollout": rollout})
                found.append(_arrange(stage, own, asked, gpus, prompt_tokens))
                runs.append(_simulate(stage, own, asked, found[-1], prompt_tokens))
    return SimulationResult(
        title=_title(stage, prompt_tokens),
        runs=runs,
        speeds=[each.speeds for each in found],
        plans=[each.plan for each in found],
    )


def _is_simulated(config: RunConfig) -> bool:
    kind = kind_of(config)
    return kind.is_rewarded and kind.trains


def _open(opened: OpenedStage, asked: SimulationRequest) -> _Stage:
    config = opened.readable
    objective = check_stage(opened.config)
    data = open_data(config, objective, kind_of(config).reading, opened.model)
    like = None if asked.like is None else measure_run(asked.like)
    lengths = _lengths(config, asked, like)
    return _Stage(opened=opened, objective=objective, data=data, lengths=lengths, like=like)


def _arrange(
    stage: _Stage, config: RunConfig, asked: SimulationRequest, gpus: int, prompt_tokens: Callable[[Task], int]
) -> _Arrangement:
    """By the planner where a GPU is named; by speeds alone where they are given or measured."""
    staleness, trainers = config.rollout.max_staleness, asked.trainers if gpus > 1 else 0
    require_samplers(trainers, gpus)
    if asked.gpu:
        return _planned(stage, config, asked, gpus, trainers if staleness else 0)
    speeds = with_given(None if stage.like is None else stage.like.speeds, asked.given)
    split = split_gpus(speeds, _step_size(stage, prompt_tokens), gpus=gpus, max_staleness=staleness, trainers=trainers)
    split = replace(split, parts=config.cluster.parts and split.trainers > 1)
    kv_tokens = config.engine.kv_tokens if isinstance(config.engine.kv_tokens, int) else 0
    return _Arrangement(
        split=split, speeds=in_parts(speeds, split.trainers) if split.parts else speeds, kv_tokens=kv_tokens
    )


def _planned(stage: _Stage, config: RunConfig, asked: SimulationRequest, gpus: int, trainers: int) -> _Arrangement:
    """What `temper plan` would propose for answers of the mean length, and its seconds."""
    looked_at = _answers(stage.lengths, config)
    lengths = AnswerLengths(mean=max(1, round(statistics.fmean(looked_at))), longest=max(looked_at))
    request = PlanRequest(gpus=gpus, trainers=trainers, lengths=lengths)
    plan = plan_stage(config, stage.objective, stage.data, stage.opened.model, find_gpu(asked.gpu), request)
    if not plan.fits:
        raise UserError(explain_misfit(plan))
    speeds = roofline_speeds(plan.work, plan.gpu, lengths=lengths)
    split = Split(
        samplers=plan.work.drawing_gpus,
        trainers=plan.layout.trainers,
        is_shared=not plan.layout.is_apart,
        parts=plan.layout.parts,
    )
    return _Arrangement(
        split=split, speeds=with_given(speeds, asked.given), kv_tokens=plan.work.choice.kv_tokens, plan=plan
    )


def measure_run(folder: Path) -> MeasuredRun:
    """Speeds and lengths of the last stage of a run that trained on what it drew."""
    with RunReader(folder) as reader:
        numbered = [(number, config) for number, config in enumerate(load_recipe(folder / "config.toml", ()))]
        known = [(number, config) for number, config in numbered if _is_simulated(config)]
        if not known:
            raise UserError(f"{folder} has no stage that trained on what it drew by its reward: nothing to measure")
        number, config = known[-1]
        return read_run(
            reader,
            RunSettings(
                stage=number,
                groups_per_step=config.rollout.groups_per_step,
                max_staleness=config.rollout.max_staleness,
                max_running=config.engine.max_running,
                updates=config.trainer.updates_per_batch,
            ),
        )


def _lengths(config: RunConfig, asked: SimulationRequest, like: MeasuredRun | None) -> Lengths:
    if asked.lengths:
        return read_lengths(asked.lengths, asked.seed)
    if like is not None:
        return measured(like.groups, asked.seed)
    return read_lengths(f"lognormal:{max(1, config.sampling.max_new_tokens // USUAL_SHARE)}:0.6", asked.seed)


def _answers(lengths: Lengths, config: RunConfig) -> list[int]:
    """Tokens of a few."""
    longest, size = config.sampling.max_new_tokens * config.rollout.max_turns, config.rollout.group_size
    return [min(longest, lengths(f"looked at/{i // size}", i % size)) for i in range(LOOKED_AT)]


def _prompt_tokens(data: StageData) -> Callable[[Task], int]:
    @cache
    def tokens(task_id: str) -> int:
        task = by_id[task_id]
        return len(data.renderer.prompt_ids(data.renderer.prompt_messages(task)))

    by_id: dict[str, Task] = {}

    def tokens_of(task: Task) -> int:
        by_id[task.id] = task
        return tokens(task.id)

    return tokens_of


def _simulate(
    stage: _Stage,
    config: RunConfig,
    asked: SimulationRequest,
    arranged: _Arrangement,
    prompt_tokens: Callable[[Task], int],
) -> SimulatedRun:
    return simulate(
        Scenario(
            make_source=_make_source(stage, config),
            speeds=arranged.speeds,
            lengths=stage.lengths,
            prompt_tokens=prompt_tokens,
            limits=_limits(stage, arranged),
            split=arranged.split,
            max_staleness=config.rollout.max_staleness,
            group_size=config.rollout.group_size,
            steps=asked.steps or _enough_steps(config),
            updates=config.trainer.updates_per_batch,
            max_new_tokens=config.sampling.max_new_tokens * config.rollout.max_turns,
            degenerate=0.0 if stage.like is None else stage.like.degenerate,
            episode_seconds=config.rollout.episode_seconds,
            seed=asked.seed,
        )
    )


def _enough_steps(config: RunConfig) -> int:
    rows = config.rollout.groups_per_step * config.rollout.group_size
    return max(LEAST_STEPS, min(MOST_STEPS, ENOUGH_ANSWERS // rows))


def _limits(stage: _Stage, arranged: _Arrangement) -> SamplerLimits:
    return SamplerLimits(
        replicas=arranged.split.samplers,
        max_running=stage.config.engine.max_running,
        kv_tokens=arranged.kv_tokens,
        longest=stage.data.shape.max_context,
    )


def _step_size(stage: _Stage, prompt_tokens: Callable[[Task], int]) -> StepSize:
    config = stage.config
    return StepSize(
        rows=config.rollout.groups_per_step * config.rollout.group_size,
        prompt_tokens=statistics.fmean(map(prompt_tokens, stage.data.probe)),
        answer_tokens=statistics.fmean(_answers(stage.lengths, config)),
        max_running=config.engine.max_running,
        updates=config.trainer.updates_per_batch,
    )


def _make_source(stage: _Stage, config: RunConfig) -> Callable[[EpisodeSetup, Trainer, Credit], BatchSource]:
    """The source as the stage itself wires it, with its order, its controls and its tasks."""
    beginning = stage.data.stream.state()

    def make_source(setup: EpisodeSetup, trainer: Trainer, credit: Credit) -> BatchSource:
        stage.data.stream.load_state(beginning)
        parts = Parts(
            config=config,
            index=0,
            objective=stage.objective,
            data=stage.data,
            trainer=trainer,
            setup=replace(setup, max_episode_tokens=config.rollout.max_episode_tokens, seed=config.seed),
            folder=None,
            origin=stage.opened.model,
        )
        return rollout_source(parts, credit)

    return make_source


def _title(stage: _Stage, prompt_tokens: Callable[[Task], int]) -> str:
    config, size = stage.config, _step_size(stage, prompt_tokens)
    return (
        f"stage {stage.opened.number}: {config.stage}, {config.rollout.groups_per_step} groups of "
        f"{config.rollout.group_size} a step, prompts of {size.prompt_tokens:.0f} and answers of "
        f"{size.answer_tokens:.0f} tokens in the mean"
    )
