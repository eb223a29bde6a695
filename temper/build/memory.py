"""From a recipe to what it holds and computes, and from "auto" to values that fit.

Owns: reading a stage as a Workload, settling its keys on "auto", what is said when nothing fits. Refuses: the sums
(planning/).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Literal

import torch

from temper.build.check import problem_with_four_bits, problem_with_parts
from temper.build.models import pick_device, pick_dtype
from temper.cluster.devices import trainers_here
from temper.config import RunConfig
from temper.config.memory import CPU_CHOICE, KEYS, MemoryChoice, given_choice, settled_choice, with_choice
from temper.errors import UserError
from temper.objectives import DirectLoss, Objective, PolicyObjective
from temper.planning.gpus import GIB, Gpu, this_gpu
from temper.planning.layout import Layout, best_layout, enough_gpus, explain_choice, layouts, plan_layout, remedy_of
from temper.planning.memory import MemoryPlan, plan_memory
from temper.planning.remedy import Remedy
from temper.planning.seconds import TimePlan
from temper.planning.shape import DecoderShape, read_decoder_shape
from temper.planning.workload import AdapterShape, AnswerLengths, Workload, by_gpu, spread
from temper.stages.distill import teacher_folders
from temper.stages.kinds import kind_of
from temper.stages.reading.data import StageData
from temper.stages.reading.examples import RowTooLong
from temper.types import Sample

CUDA_PARTS = ("workspaces", "collectives")
"""Of a plan, what libraries hold on GPUs alone."""
MEASURED_PROMPTS = 64
"""Prompts whose mean length stands for all."""
DOUBT = 0.93
"""A stage is refused when this share of what was planned does not fit: plans are within a tenth of what is seen."""


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """What a stage would hold and take on its GPUs."""

    gpu: Gpu
    layout: Layout
    work: Workload
    chosen: tuple[str, ...]
    """Fields of the choice that were on "auto"."""
    memories: Mapping[str, MemoryPlan]
    """By kind of GPU: a trainer's, and a sampler's where it has one of its own."""
    time: TimePlan
    reason: str
    """Why this layout was chosen; "": there was no choice."""
    remedy: Remedy | None
    """The cheapest change that makes it fit; None: it fits, or nothing does."""
    enough_gpus: int | None
    """On how many it would fit; None: it fits, or the recipe says on how many it runs, or there are never enough."""

    @property
    def memory(self) -> MemoryPlan:
        """Of the kind of GPU that needs most."""
        return max(self.memories.values(), key=lambda memory: memory.needed_bytes)

    @property
    def host_bytes(self) -> float:
        """In the memory of each host."""
        return max(memory.host_bytes for memory in self.memories.values())

    @property
    def fits(self) -> bool:
        return self.memory.needed_bytes <= self.gpu.usable_bytes and self.host_bytes <= self.gpu.host_room


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What a plan is asked for beside the GPU."""

    gpus: int | None = None
    """None: as the recipe is written, on this machine."""
    trainers: int = 0
    """Of them, where it is known; 0: what is fastest."""
    parts: bool | None = None
    """None: what is fastest."""
    lengths: AnswerLengths | None = None
    """None: seconds are those of the longest answers."""


AS_WRITTEN = PlanRequest()


def plan_stage(
    config: RunConfig,
    objective: Objective,
    data: StageData,
    model_folder: Path,
    gpu: Gpu,
    asked: PlanRequest = AS_WRITTEN,
) -> StagePlan:
    """The plan with what the recipe gives, and for the rest with what is chosen for this GPU."""
    given, work = given_choice(config), workload_of(config, objective, data, model_folder)
    if asked.gpus is not None:  # machines that have a GPU for each
        work = replace(work, trainers_per_gpu=1, samplers_per_gpu=1, machine_trainers=gpu.per_machine)
    tried = [plan_layout(work, layout, gpu, given, asked.lengths) for layout in _layouts(config, data, work, asked)]
    best, gpus = best_layout(tried), asked.gpus or 1
    can_grow = not best.fits and gpus > 1 and not _has_table(config)
    return StagePlan(
        gpu=gpu,
        layout=best.layout,
        work=best.work,
        chosen=tuple(field for field in KEYS if field not in given),
        memories={kind: plan_memory(side) for kind, side in by_gpu(best.work).items()},
        time=best.time,
        reason=explain_choice(best, tried) if len(tried) > 1 and best.fits else "",
        remedy=None if best.fits else remedy_of(best, tried, gpu),
        enough_gpus=enough_gpus(work, gpu, gpus, given) if can_grow else None,
    )


def _layouts(config: RunConfig, data: StageData, work: Workload, asked: PlanRequest) -> list[Layout]:
    """Those to choose from: what the [cluster] table says, or what is worth trying where it says nothing."""
    written = written_layouts(config, data)
    if asked.gpus is not None and asked.gpus < work.engine_gpus:
        raise UserError(
            f"--gpus {asked.gpus}: engine.tensor_parallel = {work.engine_gpus} shares every matrix out over as many. "
            f"Plan it for {work.engine_gpus} GPUs at least"
        )
    if asked.gpus is None:
        return [written[max(written) if torch.cuda.device_count() > config.cluster.trainers else min(written)]]
    if not _has_table(config):
        parts = True if config.cluster.parts else asked.parts
        if found := list(layouts(work, asked.gpus, trainers=asked.trainers, parts=parts)):
            return found
        raise UserError(
            f"--gpus {asked.gpus}: among so many GPUs there is no number of trainers that cluster.experts, "
            f"cluster.context and cluster.tensor divide over. Ask for other --gpus, or leave them out"
        )
    if asked.gpus not in written:
        needed = f"trainers = {config.cluster.trainers}, which need {min(written)} GPUs"
        if len(written) > 1:
            needed += f", and samplers = {config.cluster.num_samplers}: {max(written)} GPUs, or {min(written)} in turn"
        raise UserError(
            f"--gpus {asked.gpus}: the recipe's [cluster] table says {needed}. Plan it for so many, or leave trainers "
            "and samplers out of the table: then they are proposed"
        )
    return [written[asked.gpus]]


def _has_table(config: RunConfig) -> bool:
    return config.cluster.trainers > 1 or config.cluster.num_samplers > 1


def written_layouts(config: RunConfig, data: StageData) -> dict[int, Layout]:
    """By how many GPUs they need: what the recipe's [cluster] table may mean. Sampler processes have GPUs of their own
    where there are any, and are on the trainers' otherwise."""
    cluster = config.cluster
    alone = Layout(trainers=cluster.trainers, parts=cluster.parts)
    if config.engine.place == "here" or cluster.sampler_addresses:  # those have other GPUs
        return {alone.gpus: alone}
    each = config.engine.tensor_parallel
    apart = replace(alone, samplers=cluster.num_samplers, is_apart=True, sampler_gpus=each)
    if not data.is_rolling:  # drawn for evaluations alone, in the trainer's process
        return {alone.gpus: alone, apart.gpus: alone}
    return {alone.gpus: replace(apart, is_apart=False), apart.gpus: apart}


def settle(config: RunConfig, objective: Objective, data: StageData, model_folder: Path) -> RunConfig:
    """The stage with a value in place of every "auto": on a CPU always the same, on a GPU by what is free on it now.

    Raises UserError, with the cheapest change, for a stage that cannot fit.
    """
    gpu = this_gpu() if pick_device(config.model.device).type == "cuda" else None
    if gpu is None:
        return with_choice(config, CPU_CHOICE)
    plan = plan_stage(config, objective, data, model_folder, gpu)
    if plan.memory.needed_bytes * DOUBT > gpu.usable_bytes or plan.host_bytes * DOUBT > gpu.host_room:
        raise UserError(explain_misfit(plan))
    return with_choice(config, plan.work.choice)


def plan_on_cpu(config: RunConfig, objective: Objective, data: StageData, model_folder: Path) -> MemoryPlan:
    """What a stage holds in the memory of this machine when all of it is on its CPU, by the sums of a GPU: what is
    rounded to blocks and kept by kernels there may be more or less here. Nothing is recorded or offloaded."""
    work = workload_of(config, objective, data, model_folder)
    choice = replace(work.choice, gradient_checkpointing=bool(work.choice.gradient_checkpointing))
    dtype = pick_dtype(config.model.dtype, torch.device("cpu"))
    here = replace(work, choice=choice, dtype=dtype, has_graphs=False, trainers_per_gpu=work.trainers)
    plan = plan_memory(replace(here, offload=False, offload_frozen=False))
    phases = {
        phase: {name: size for name, size in parts.items() if name not in CUDA_PARTS}
        for phase, parts in plan.phases.items()
    }
    return replace(plan, phases=phases)


def settle_for_cpu(config: RunConfig) -> RunConfig:
    """What can be settled before anything is read: stages that run on a CPU."""
    return with_choice(config, CPU_CHOICE) if pick_device(config.model.device).type == "cpu" else config


def explain_misfit(plan: StagePlan) -> str:
    """What does not fit, and what to change."""
    needed, free = plan.memory.needed_bytes, plan.gpu.usable_bytes
    what = describe_peak(plan.memory)
    if needed <= free:  # so the host is what has no room
        needed, free = plan.host_bytes, plan.gpu.host_room
        what = "in the memory of the host: what optim.offload, model.offload or gradient_checkpointing leave there"
    change = (
        f"The cheapest change that makes it fit: {plan.remedy}"
        if plan.remedy is not None
        else "No setting of the trainer or the engine makes it fit: use a smaller model, shorter rows or a larger GPU"
    )
    more = f"; or {plan.enough_gpus} GPUs" if plan.enough_gpus else ""
    where = f" on each of {plan.layout.gpus} GPUs ({plan.layout})" if plan.layout.gpus > 1 else ""
    return f"this needs {needed / GIB:.1f} GiB{where}, and {free / GIB:.1f} are free ({what}). {change}{more}"


def describe_peak(memory: MemoryPlan, count: int = 4) -> str:
    """The largest parts of the worst phase, in words."""
    parts = memory.phases[memory.peak_phase]
    largest = sorted(parts.items(), key=lambda item: -item[1])[:count]
    named = ", ".join(f"{name} {size / GIB:.1f}" for name, size in largest)
    return f"most in {memory.peak_phase}: {named} GiB"


def enough_kv_tokens(config: RunConfig, data: StageData) -> int:
    """Room for every running sequence at its longest. A quarter more than the probed prompts need: a longer one than
    those is preempted, never refused."""
    longest = data.longest_prompt + config.longest_completion
    return max(config.engine.max_running * longest * 5 // 4, data.shape.max_context)


def workload_of(config: RunConfig, objective: Objective, data: StageData, model_folder: Path) -> Workload:
    """Keys on "auto" count as on a CPU, but that the cache has its whole size in tokens."""
    shape, lora = read_decoder_shape(model_folder), config.model.lora
    choice: MemoryChoice = settled_choice(with_choice(config, CPU_CHOICE))
    is_scorer = "scores" in objective.needs
    prompt, completion, rows = _rows(config, objective, data)
    work = Workload(
        shape=shape,
        choice=replace(choice, kv_tokens=choice.kv_tokens or enough_kv_tokens(config, data)),
        dtype=pick_dtype(config.model.dtype, torch.device("cuda")),
        adapter=None if lora is None else AdapterShape(rank=lora.rank, targets=tuple(lora.targets)),
        has_four_bit_base=_has_four_bit_base(config),
        has_float8_sampler=config.engine.weights == "fp8" and data.is_rolling,
        offload=config.optim.offload,
        frozen=_frozen(config, objective, shape, model_folder),
        has_own_reference="reference" in objective.needs and objective.reference is None and lora is None,
        offload_frozen=config.model.offload,
        has_critic=isinstance(objective, PolicyObjective) and objective.critic is not None,
        has_own_head=is_scorer,
        trains=kind_of(config).trains,
        trainers=config.cluster.trainers,
        parts=config.cluster.parts,
        may_be_cut=_may_be_cut(config, objective),
        may_have_adapter=_may_have_adapter(config, is_scorer=is_scorer),
        may_have_four_bits=problem_with_four_bits(config, objective) is None,
        draws_here=_draws_here(config),
        experts=config.cluster.experts,
        context=config.cluster.together,
        tensor=config.cluster.tensor,
        engine=_engine_weights(config, data),
        num_samplers=config.cluster.num_samplers if data.is_rolling else 1,
        engine_gpus=config.engine.tensor_parallel,
        ahead=config.rollout.max_staleness if data.is_rolling else 0,
        has_processes=_has_processes(config, objective),
        samples=not is_scorer,
        rolls=data.is_rolling,
        prompt_tokens=prompt,
        completion_tokens=completion,
        group_size=config.rollout.group_size if data.is_rolling else 1,
        rows_per_update=max(1, rows // config.trainer.updates_per_batch),
        updates=config.trainer.updates_per_batch,
        epochs=config.trainer.epochs,
        max_running=config.engine.max_running,
        tokens_per_step=config.engine.tokens_per_step,
        has_graphs=config.engine.graphs,
    )
    gpus = torch.cuda.device_count()
    here = trainers_here(config.cluster.trainers, gpus, os.environ, is_on_ray=config.cluster.is_on_ray)
    return spread(work, here, gpus)


def _has_processes(config: RunConfig, objective: Objective) -> bool:
    """A layout that is proposed has one GPU for each sampler; engines over several stay as the recipe has them."""
    return config.engine.kind != "sglang" and config.engine.tensor_parallel == 1 and not _has_opponents(objective)


def _draws_here(config: RunConfig) -> bool:
    return config.engine.kind == "local" and config.engine.place == "here"


def _may_be_cut(config: RunConfig, objective: Objective) -> bool:
    """An engine in this process may move to one of its own, but for objectives with opponents, who share weights."""
    apart = config.model_copy(update={"engine": config.engine.model_copy(update={"place": "process"})})
    can_move = not (_draws_here(config) and _has_opponents(objective))
    return can_move and problem_with_parts(apart, objective) is None


def _may_have_adapter(config: RunConfig, *, is_scorer: bool) -> bool:
    """As checks of recipes and models say (check.py, trainer.py)."""
    cluster = config.cluster
    return not (is_scorer or cluster.experts or cluster.tensor > 1 or config.model.routers is not None)


def _engine_weights(config: RunConfig, data: StageData) -> Literal["shared", "copied", "apart", "elsewhere"]:
    """As build/sampler.py decides. Sampler processes have GPUs of their own where trainers leave any."""
    is_far = bool(config.cluster.sampler_addresses) and (data.is_rolling or config.cluster.parts)
    if config.engine.kind == "sglang" or is_far:
        return "elsewhere"
    if config.engine.place == "process" and data.is_rolling:
        left = torch.cuda.device_count() - config.cluster.trainers
        return "apart" if left >= config.engine.tensor_parallel else "copied"
    if config.cluster.parts and config.cluster.trainers > 1:
        return "copied"
    if _has_four_bit_base(config):
        return "shared"
    runs_ahead = config.rollout.max_staleness > 0 and data.is_rolling
    return "copied" if config.model.lora is not None or config.engine.kind == "vllm" or runs_ahead else "shared"


def _has_opponents(objective: Objective) -> bool:
    return isinstance(objective, DirectLoss) and objective.loss.opponent_share is not None


def _has_four_bit_base(config: RunConfig) -> bool:
    return config.model.lora is not None and config.model.lora.base == "4bit"


def _frozen(config: RunConfig, objective: Objective, shape: DecoderShape, folder: Path) -> tuple[DecoderShape, ...]:
    """References that share the policy's weights below an adapter cost nothing."""
    found: list[DecoderShape] = []
    if "reference" in objective.needs and (config.model.lora is None or objective.reference is not None):
        found.append(shape)
    if objective.needs & {"teacher", "teacher_top_k", "divergence"}:
        found += [read_decoder_shape(path) for path in teacher_folders(folder, config.model.taught_by).values()]
    return tuple(found)


def _rows(config: RunConfig, objective: Objective, data: StageData) -> tuple[int, int, int]:
    """(tokens before the first trained one, tokens behind, rows of a step)."""
    if data.recorded:
        return _recorded_rows(config, data)
    given = _given_rows(config, objective, data)
    if given and not data.is_rolling:
        longest = max(given, key=lambda row: len(row.token_ids))
        rows = config.trainer.examples_per_step * max(1, round(len(given) / len(data.probe)))
        return len(longest.token_ids) - longest.num_actions, max(1, longest.num_actions), rows
    sampled = [
        len(data.renderer.prompt_ids(data.renderer.prompt_messages(task)))
        for task in data.asked[:MEASURED_PROMPTS]
        if task.messages
    ]
    prompt = round(fmean(sampled)) if sampled else data.longest_prompt
    drawn = config.sampling.max_new_tokens * config.rollout.max_turns
    room = max(1, data.shape.max_context - prompt)
    return prompt, min(drawn, room), config.rollout.groups_per_step * config.rollout.group_size


def _recorded_rows(config: RunConfig, data: StageData) -> tuple[int, int, int]:
    """The same of recorded episodes, as if each were as long as the longest."""
    drawn = [turn.completion for own in data.recorded.values() for member in own for turn in member.turns]
    longest = max(drawn, key=lambda one: len(one.prompt_ids) + len(one.token_ids))
    members = fmean(len(own) for own in data.recorded.values())
    return len(longest.prompt_ids), len(longest.token_ids), round(config.rollout.groups_per_step * members)


def _given_rows(config: RunConfig, objective: Objective, data: StageData) -> Sequence[Sample]:
    """Rows of the first tasks, in stages that read rows."""
    make_rows = kind_of(config).row_maker(objective, data)
    found: list[Sample] = []
    if make_rows is None:
        return found
    for task in data.probe:
        try:
            found += make_rows(task)
        except RowTooLong:  # left out of training, or refused elsewhere
            continue
    return found
