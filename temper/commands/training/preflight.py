"""`temper train --dry-run`: everything that can be known in seconds, without weights.

Owns: the table of what a run would do, and what stands in for outputs of stages that have not run. Refuses: trying
environments and rewards (trials.py), and agents (agent_trial.py).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from temper import calls
from temper.build import (
    StagePlan,
    check_data,
    check_first_model,
    check_stage,
    check_stages,
    describe_peak,
    doubts_about,
    explain_misfit,
    first_model,
    pick_device,
    plan_on_cpu,
    plan_stage,
)
from temper.build.models import layout_of
from temper.cluster.ranks import find_place
from temper.commands.training.agent_trial import try_agent
from temper.commands.training.ranks import check_ranks
from temper.commands.training.train import starts_elsewhere
from temper.commands.training.trials import IN_DOUBT, try_environment, try_reward
from temper.config import FIRST, RewardConfig, RunConfig, SourceConfig, load_recipe, refer
from temper.config.memory import CPU_CHOICE, settled_choice, with_choice
from temper.envs.agents.agent import NAME as AGENT
from temper.errors import UserError
from temper.evals import contamination
from temper.models.load import find_checkpoint
from temper.objectives import Objective
from temper.planning.gpus import GIB, this_gpu
from temper.planning.table import memory_text, settings_line
from temper.stages.distill import teacher_folders
from temper.stages.kind import StageKind
from temper.stages.kinds import kind_of
from temper.stages.reading.choosing import doubt_choosers
from temper.stages.reading.data import StageData, open_data
from temper.stages.trial import try_rows
from temper.tasks.choice.registry import read_choosers
from temper.trainer.ranks.layout import require_layout

REFERENCE = "stage:"
WARNING = "warning:"


def dry_run(recipe: Path, *, overrides: Sequence[str] = ()) -> str:
    """Checks configuration, data, template, reward and batch arithmetic of every stage; returns a table to print."""
    stages = load_recipe(recipe, overrides)
    check_stages(stages)
    check_ranks(stages, _count_trainers(stages[0]))
    with tempfile.TemporaryDirectory() as folder:
        first = first_model(stages[0], Path(folder))
        check_first_model(stages, first)
        later = Later(stages, first)
        return "\n\n".join(_describe_or_say_where(later.open(config), len(stages)) for config in stages)


def _count_trainers(config: RunConfig) -> int:
    """Of a launcher, if one started this process, or of the recipe."""
    return max(find_place(os.environ).world, config.cluster.trainers)


@dataclass(frozen=True, kw_only=True)
class OpenedStage:
    """A stage as far as it can be looked at."""

    number: int
    config: RunConfig
    """As the recipe says."""
    readable: RunConfig
    """Without what earlier stages have yet to write."""
    model: Path
    """Its own, or one with the same tokenizer and shape."""
    awaited: Mapping[str, str]
    """What will be read from earlier stages, in words, by where it stands."""


@dataclass
class Later:
    """What stages leave to later ones, as long as none has run: a model of the same shape, the prompts of kept rows."""

    stages: Sequence[RunConfig]
    first: Path
    _number: int = 0
    _names: dict[str, str] = field(default_factory=dict)
    _models: dict[str, Path] = field(default_factory=dict)
    _rows: Sequence[SourceConfig] = ()
    """Training tasks of the last rejection stage."""

    def __post_init__(self) -> None:
        self._models[FIRST] = self._policy = self.first
        self._names[FIRST] = "the run's first model"
        self._policy_name = "a new model" if self.stages[0].model.new else str(self.first)

    def open(self, config: RunConfig) -> OpenedStage:
        """The next stage."""
        self._number += 1
        awaited: dict[str, str] = {"starts from": self._policy_name}
        readable = refer(self._without_outputs(config, awaited), self._models)
        model = self._policy
        if starts_elsewhere(config, self.stages):
            model = find_checkpoint(readable.model.path)
            awaited["starts from"] = self._in_words(config.model.path)
        for domain, path in config.model.taught_by.items():
            awaited[f"teacher of {domain}" if domain else "teacher"] = self._in_words(path)
        self._leave(config, readable, model)
        return OpenedStage(number=self._number, config=config, readable=readable, model=model, awaited=awaited)

    def _leave(self, config: RunConfig, readable: RunConfig, model: Path) -> None:
        name = f"what stage {self._number} ({config.stage}) leaves"
        kind = kind_of(config)
        self._models[kind.name], self._names[kind.name] = model, name
        if kind.leaves == "rows":
            self._rows = readable.train
        if kind.leaves == "policy":
            self._policy, self._policy_name = model, name

    def _without_outputs(self, config: RunConfig, awaited: dict[str, str]) -> RunConfig:
        """Prompts of kept rows stand in for these; a reward that has yet to be trained is left out."""
        train: list[SourceConfig] = []
        for source in config.train:
            if source.path.startswith(REFERENCE):
                awaited["rows"] = self._in_words(source.path)
            train += self._rows if source.path.startswith(REFERENCE) else [source]
        for source in config.heldout:
            if source.path.startswith(REFERENCE):
                awaited["held-out rows"] = self._in_words(source.path)
        heldout = [source for source in config.heldout if not source.path.startswith(REFERENCE)]
        judges = self._tried(config.evaluation.reward, "held-out verifier", awaited)
        return config.model_copy(
            update={
                "train": train,
                "heldout": heldout,
                "reward": self._tried(config.reward, "reward", awaited),
                "evaluation": config.evaluation.model_copy(update={"reward": judges}),
            }
        )

    def _tried(self, parts: Sequence[RewardConfig], name: str, awaited: dict[str, str]) -> list[RewardConfig]:
        known = [part for part in parts if not str(part.options.get("path", "")).startswith(REFERENCE)]
        for part in parts:
            if part not in known:
                awaited[f"{name} {part.kind}"] = (
                    f"{self._in_words(str(part.options['path']))}; tried when that is there"
                )
        return known

    def _in_words(self, path: str) -> str:
        for kind, name in self._names.items():
            path = path.replace(f"{REFERENCE}{kind}", name)
        return path


def _describe_or_say_where(stage: OpenedStage, num_stages: int) -> str:
    try:
        return _describe(stage)
    except UserError as error:
        if num_stages == 1:
            raise
        raise UserError(f"stage {stage.number} ({stage.config.stage}): {error}") from error


def _describe(stage: OpenedStage) -> str:
    config, kind = stage.config, kind_of(stage.config)
    objective = check_stage(config)
    require_layout(stage.model, layout_of(config, _count_trainers(config)))
    data = open_data(stage.readable, objective, kind.reading, stage.model)
    if "rows" not in stage.awaited:
        check_data(config, kind, objective, data)
    teacher_folders(stage.model, stage.readable.model.taught_by)
    shape, first = data.shape, data.probe[0]
    prompt = data.prompt_ids(first)
    rows = {
        "model": f"{shape.family}, {shape.num_layers} layers, context {shape.max_context}, {config.model.dtype}",
        **stage.awaited,
        "tasks": f"{f'{len(data.rows):,} to train on, ' if data.rows else ''}drawn first: {first.id}; "
        f"held out: {len(data.heldout)} (removed from training where equal)",
        "prompt": f"{data.tokenizer.decode(prompt)!r} = {len(prompt)} tokens"
        + (f"; longest seen {data.longest_prompt}" if data.longest_prompt else ""),
        **({"left out": _left_out(data.left_out)} if data.left_out else {}),
        "stop tokens": ", ".join(str(stop) for stop in data.renderer.stop_ids),
        **({"objective": objective.name} if kind.trains else {}),
        **_batch_rows(stage, kind, objective, data),
    }
    rows["memory"], table = _planned_memory(stage, objective, data)
    if config.model.lora is not None:
        rows["adapter"] = ", ".join(f"{name} {value}" for name, value in config.model.lora.model_dump().items())
    plays = config.env.name == AGENT
    rows |= calls.run(try_agent(config, objective, data) if plays else try_environment(config, data))
    readable = stage.readable
    if readable.reward and kind.leaves != "scorer":
        rows |= calls.run(try_reward(config, data, data.rubric, readable.reward, "reward"))
    if data.verifier is not data.rubric:
        rows |= calls.run(try_reward(config, data, data.verifier, readable.evaluation.reward, "held-out verifier"))
    width = max(map(len, rows))
    body = "\n".join(f"  {name:<{width}}  {text}" for name, text in rows.items())
    unchosen = doubt_choosers(config, data.stream.sources)
    warnings = (*doubts_about(config, objective), unchosen, contamination.check(data.known, data.heldout))
    body = "\n".join([body, table, *(f"{WARNING} {doubt}" for doubt in warnings if doubt)])
    return f"stage {stage.number}: {config.stage}, {config.steps} steps\n{body}"


def count_doubts(found: str) -> int:
    """How many lines of a dry run say that something may be wrong."""
    lines = [line.strip() for line in found.splitlines()]
    return sum(line.startswith(WARNING) or f" {IN_DOUBT}  " in line for line in lines)


def _planned_memory(stage: OpenedStage, objective: Objective, data: StageData) -> tuple[str, str]:
    """In a line, and as a table of parts and phases: of this machine's GPU, or of its memory where it has none."""
    planned = (stage.readable, objective, data, stage.model)
    gpu = this_gpu() if pick_device(stage.config.model.device).type == "cuda" else None
    if gpu is None:
        memory = plan_on_cpu(*planned)
        line = f"about {memory.peak_bytes / GIB:.2f} GiB on this machine's CPU, most in {memory.peak_phase}"
        beside = "The program itself comes on top. For a GPU: temper plan RECIPE --gpu NAME"
        return f"{line}. {beside}", memory_text({"trainer": memory})
    plan = plan_stage(*planned, gpu)
    return _memory_row(plan), memory_text(plan.memories)


def _memory_row(plan: StagePlan) -> str:
    """What the stage needs of this machine's GPU. UserError, with the cheapest change, when it cannot fit."""
    if not plan.fits:
        raise UserError(explain_misfit(plan))
    settings = settings_line(plan.work, plan.chosen)
    needed, free = plan.memory.needed_bytes / GIB, plan.gpu.usable_bytes / GIB
    return (
        f"{needed:.1f} of {free:.1f} GiB, {describe_peak(plan.memory)}; about {plan.time.total:.1f} s a step, "
        f"{plan.time.slowest} dominates; {settings}. temper plan shows all of it"
    )


def _left_out(reasons: Sequence[str]) -> str:
    return f"{len(reasons)} tasks: {'; '.join(reasons[:3])}{'; ...' if len(reasons) > 3 else ''}"


def _batch_rows(stage: OpenedStage, kind: StageKind, objective: Objective, data: StageData) -> dict[str, str]:
    """What one step takes: rows that are read, samples that are drawn, or now one and now the other."""
    config, rows = stage.config, dict[str, str]()
    if "rows" in stage.awaited:
        examples = config.trainer.examples_per_step
        rows["examples"] = f"{examples} a step, {examples * config.steps} in all"
    elif (trial := try_rows(config, kind, objective, data)) is not None:
        rows[trial.unit] = (
            f"{trial.count} a step, {trial.count * config.steps} in all; the first step has {trial.num_tokens} tokens, "
            f"{trial.num_trained} of them {'read by the head' if kind.leaves == 'scorer' else 'trained'}"
        )
    if config.is_recorded:
        episodes = sum(map(len, data.recorded.values()))
        rows["records"] = (
            f"{episodes} episodes of {len(data.recorded)} prompts, {config.rollout.groups_per_step} a step"
        )
    if data.is_rolling:
        rows |= _rollout_rows(config, data, trains=kind.trains)
    return {**rows, **kind.describe(config, objective, data)}


def _rollout_rows(config: RunConfig, data: StageData, *, trains: bool) -> dict[str, str]:
    rollout, updates = config.rollout, config.trainer.updates_of_batch
    completions = rollout.groups_per_step * rollout.group_size
    tokens = completions * (data.longest_prompt + config.sampling.max_new_tokens)
    microbatches = -(-tokens // settled_choice(with_choice(config, CPU_CHOICE)).tokens_per_microbatch)
    return {
        "batch": f"{rollout.groups_per_step} tasks x {rollout.group_size} = {completions} completions a step, "
        f"{f'{updates} optimiser step(s)' if trains else 'no training'}",
        "tokens": f"at most {tokens:,} a step, in about {microbatches} microbatches at most",
        **({"chooses": ", ".join(one.name for one in read_choosers(config.data.choose))} if config.data.choose else {}),
        "staleness": f"{rollout.max_staleness} ({'synchronous' if rollout.max_staleness == 0 else 'asynchronous'})",
    }
