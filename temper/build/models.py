"""The models of a stage: the policy, and those beside it.

Owns: devices, precision, and which directory each model comes from. Refuses: training them (trainer/).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from temper.config import RunConfig
from temper.config.memory import settled_choice
from temper.errors import UserError
from temper.folders.integrity import verify, write_manifest
from temper.models.load import find_checkpoint, load_model
from temper.models.lora.materialize import whole
from temper.models.lora.switch import AdapterOff
from temper.models.lora.wrapping import (
    AdapterSettings,
    LoadModel,
    add_adapter,
    has_adapter,
    load_base,
    with_own_weights,
    without_adapter,
)
from temper.models.scorer import HEAD, ScorerKind, load_scorer
from temper.models.tiny import make_tiny_model
from temper.objectives import DirectLoss, Objective, PolicyObjective
from temper.parity.isolation import check_isolation
from temper.stages.distill import teacher_folders
from temper.trainer.critic import Critic
from temper.trainer.local import AuxiliaryModels
from temper.trainer.offload import offload
from temper.trainer.optim import OptimizerSettings
from temper.trainer.ranks.layout import TrainerLayout, require_layout
from temper.trainer.ranks.parts import cut, is_cut
from temper.trainer.ranks.reading import load_cut
from temper.trainer.ranks.sums import rank_and_world
from temper.trainer.weights import ModelFiles

Load = Callable[[Path], torch.nn.Module]


def pick_device(name: str) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise UserError('model.device="cuda", but torch sees no GPU. Use model.device="auto" or "cpu"')
    return torch.device("cuda" if has_cuda and name != "cpu" else "cpu")


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, name)  # type: ignore[no-any-return]


def first_model(config: RunConfig, run_folder: Path, *, has_weights: bool = True) -> Path:
    """The directory a run starts from; a new model is made inside the run. has_weights: whether they are needed."""
    if config.model.new is None:
        return find_checkpoint(config.model.path, has_weights=has_weights)
    folder, unfinished = run_folder / "model", run_folder / ".tmp-model"
    if not folder.is_dir():  # made aside: a run killed here must not go on from half a model
        shutil.rmtree(unfinished, ignore_errors=True)
        make_tiny_model(unfinished, seed=config.seed, **config.model.new.model_dump())
        write_manifest(unfinished)
        unfinished.rename(folder)
    verify(folder)
    return folder


def optimizer_settings(config: RunConfig, learning_rate: float) -> OptimizerSettings:
    given = config.optim.model_dump(exclude={"learning_rate", "critic_learning_rate"})
    return OptimizerSettings(learning_rate=learning_rate, noise_seed=config.seed, **given)


def adapter_settings(config: RunConfig) -> AdapterSettings:
    """Of the adapter that the recipe asks for."""
    assert config.model.lora is not None, "without model.lora there is no adapter"
    given = config.model.lora.model_dump(exclude={"base"})
    return AdapterSettings(**{**given, "targets": tuple(given["targets"])}, seed=config.seed)


@dataclass(frozen=True, kw_only=True)
class Models:
    """What a stage trains, and how its checkpoints hold it."""

    policy: torch.nn.Module
    others: AuxiliaryModels
    files: ModelFiles


def layout_of(config: RunConfig, trainers: int) -> TrainerLayout:
    """trainers: as many as there are."""
    cluster = config.cluster
    return TrainerLayout(
        trainers=trainers,
        parts=cluster.parts,
        experts=cluster.experts,
        context=cluster.context,
        tensor=cluster.tensor,
    )


def load_models(config: RunConfig, objective: Objective, folder: Path) -> Models:
    """The policy of `folder`, with an adapter if the recipe asks for one, and what the objective compares it with."""
    require_layout(folder, layout_of(config, rank_and_world()[1]))
    device = pick_device(config.model.device)
    dtype = pick_dtype(config.model.dtype, device)
    is_scorer = "scores" in objective.needs
    lora = config.model.lora
    if is_scorer:
        scorer_kind: ScorerKind = "steps" if _reads_steps(objective) else "conversation"
        load_any: LoadModel = partial(load_scorer, kind=scorer_kind)
        folder = whole(folder)  # a head is put on weights, not on an adapter
    else:
        load_any = partial(load_model, numerics=config.engine.numerics)
    parts, host = config.cluster.parts, torch.device("cpu")
    read = partial(load_model, numerics=config.engine.numerics)
    read_cut = partial(
        load_cut, numerics=config.engine.numerics, experts=config.cluster.experts, tensor=config.cluster.tensor
    )

    def adapt(model: torch.nn.Module) -> torch.nn.Module:
        if lora is None:
            return model
        return add_adapter(model, adapter_settings(config), folder, whole=(HEAD,) if is_scorer else ())

    if parts and is_scorer:
        policy = adapt(load_any(folder, dtype, host))
        cut(policy, device=device, experts=config.cluster.experts)
    elif parts:
        policy = read_cut(folder, dtype, device, adapt=adapt)
    else:
        policy = adapt(load_base(folder, dtype, device, load=load_any, base="full" if lora is None else lora.base))

    def load(other: Path) -> torch.nn.Module:
        """One that reads the policy's rows packed as the policy does: they must not see each other in it either."""
        model = (read_cut if parts else read)(other, dtype, device)
        _check_isolation(model)
        return model

    if parts:  # of a whole policy the gate proves it
        _check_isolation(policy)
    critic = None
    if isinstance(objective, PolicyObjective) and objective.critic is not None:
        whole_model = load_model(folder, dtype, host, config.engine.numerics) if parts else load(folder)
        critic = _critic(config, whole_model, device)
    others = _other_models(config, objective, folder, policy, load)
    return Models(policy=policy, others=replace(others, critic=critic), files=ModelFiles(load=load_any))


def _check_isolation(model: Any) -> None:
    check_isolation(model, model.config.get_text_config().vocab_size)


def _reads_steps(objective: Objective) -> bool:
    return isinstance(objective, DirectLoss) and objective.loss.reads == "steps"


def _other_models(
    config: RunConfig, objective: Objective, folder: Path, policy: torch.nn.Module, load: Load
) -> AuxiliaryModels:
    """A reference starts where the stage starts; teachers are given."""
    device = next(policy.parameters()).device

    def frozen(model: torch.nn.Module) -> torch.nn.Module:
        model.requires_grad_(False)
        return offload(model, device) if config.model.offload else model

    teachers = {}
    if objective.needs & {"teacher", "teacher_top_k", "divergence"}:
        teachers = {name: frozen(load(path)) for name, path in teacher_folders(folder, config.model.taught_by).items()}
    return AuxiliaryModels(reference=_reference(objective, folder, policy, load, frozen), teachers=teachers)


def _critic(config: RunConfig, model: torch.nn.Module, device: torch.device) -> Critic:
    """It starts where the stage starts."""
    rate = config.optim.critic_learning_rate
    return Critic(
        model,
        optimizer_settings(config, 10 * config.optim.learning_rate if rate is None else rate),
        total_steps=config.steps,
        gradient_checkpointing=settled_choice(config).gradient_checkpointing,
        parts_on=device if config.cluster.parts else None,
    )


def _reference(
    objective: Objective,
    folder: Path,
    policy: torch.nn.Module,
    load: Load,
    frozen: Callable[[torch.nn.Module], torch.nn.Module],
) -> torch.nn.Module | None:
    if "reference" not in objective.needs:
        return None
    if not has_adapter(policy):
        return frozen(load(folder))
    # The policy without its adapter is where it started, and costs nothing; one that moves needs weights of its own.
    # Neither is sent away between passes: what they share with the policy would go with them.
    if is_cut(policy):
        return AdapterOff(policy) if objective.reference is None else frozen(load(folder))
    return without_adapter(policy) if objective.reference is None else with_own_weights(policy)
