"""Who draws the tokens of a stage.

Owns: choosing the engine and its size. Refuses: combinations that an engine cannot honour.
"""

from __future__ import annotations

import copy
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from temper.build.memory import enough_kv_tokens
from temper.build.policy import size_engine
from temper.config import RunConfig
from temper.config.memory import settled_choice
from temper.engine.local.engine import EngineSettings, LocalEngine
from temper.engine.local.mixture import Opponent
from temper.engine.none import NoSampler
from temper.errors import UserError
from temper.models.decoder import FAMILIES, can_walk, lay_end_to_end
from temper.models.float8.layers import float8_copy
from temper.models.lora.materialize import whole
from temper.models.lora.wrapping import has_adapter, with_own_factors, with_own_weights, without_adapter
from temper.models.nf4.layers import holds_four_bits
from temper.objectives import DirectLoss, Objective
from temper.protocols import Sampler
from temper.stages.reading.data import StageData


def make_sampler(
    config: RunConfig, objective: Objective, data: StageData, model: Any, model_folder: Path
) -> tuple[Sampler, torch.nn.Module | None]:
    """The sampler, and the module whose weights it holds, when that is in this process."""
    if "scores" in objective.needs:
        return NoSampler(), None
    kind = config.engine.kind
    if kind != "local" and config.engine.numerics == "exact":
        raise UserError(f'engine.numerics="exact" needs engine.kind="local", not "{config.engine.kind}"')
    if kind == "sglang":
        from temper.engine.sglang.engine import SglangEngine, SglangSettings

        settings = SglangSettings(
            address=config.engine.address,
            checkpoint=whole(model_folder),
            weights_folder=Path(tempfile.gettempdir()) / "temper-published",
            seed=config.seed,
        )
        return SglangEngine(settings), None
    if kind == "vllm":
        return _vllm(config, data, model, model_folder), None
    sampler_model = _sampler_model(config, model, is_rolling=data.is_rolling)
    lay_end_to_end(sampler_model)
    decode = data.renderer.decode if config.sampling.stop else None
    return LocalEngine(sampler_model, _engine_settings(config, data), decode=decode), sampler_model


def make_opponent(
    config: RunConfig, objective: Objective, data: StageData, reference: torch.nn.Module | None, sampler_model: Any
) -> Opponent | None:
    """Whom a stage that samples compares its policy with; None: nobody. sampler_model: what its sampler draws with."""
    share = objective.loss.opponent_share if isinstance(objective, DirectLoss) else None
    if share is None or not data.is_rolling:
        return None
    assert reference is not None, "an objective with opponents needs a reference"
    if config.engine.weights == "fp8":
        raise UserError(
            'engine.weights="fp8" cannot draw for an objective with opponents. Use engine.weights = "model"'
        )
    # Used while the trainer uses it, or on the CPU between passes: then the opponent needs one of its own.
    is_shared = config.rollout.max_staleness == 0 and not config.model.offload
    own = reference
    if not is_shared:
        own = copy.deepcopy(reference).to(next(sampler_model.parameters()).device)
        lay_end_to_end(own)
    return Opponent(
        sampler_model,
        own,
        _engine_settings(config, data),
        share=share,
        decode=data.renderer.decode if config.sampling.stop else None,
        follows=None if is_shared or objective.reference is None else reference,
    )


def _sampler_model(config: RunConfig, model: torch.nn.Module, *, is_rolling: bool) -> torch.nn.Module:
    """One copy of the weights when nothing is under way while they change; otherwise the engine has its own. So it has
    for a model with an adapter: it draws from merged weights. Over a base in 4 bits it computes as the trainer does,
    and at most the factors are its own."""
    runs_ahead = config.rollout.max_staleness > 0 and is_rolling
    if holds_four_bits(model):
        return with_own_factors(model) if runs_ahead else model
    if config.engine.weights == "fp8" and is_rolling:
        if not can_walk(model):
            raise UserError(
                f'engine.weights="fp8" is made for the families {", ".join(FAMILIES)}, and this model is a '
                f'{model.config.get_text_config().model_type}. Use engine.weights = "model"'  # type: ignore[operator, union-attr]
            )
        quantized = float8_copy(without_adapter(model) if has_adapter(model) else model)
        return copy.deepcopy(quantized) if runs_ahead else quantized
    if has_adapter(model):
        return with_own_weights(model)
    return copy.deepcopy(model) if runs_ahead else model


def _vllm(config: RunConfig, data: StageData, model: Any, model_folder: Path) -> Sampler:
    from temper.engine.vllm.engine import VllmEngine, VllmSettings

    parameter, size = next(model.parameters()), _engine_settings(config, data)
    return VllmEngine(
        VllmSettings(
            folder=whole(model_folder),
            seed=config.seed,
            dtype=str(parameter.dtype).removeprefix("torch."),
            device="cuda" if parameter.device.type == "cuda" else "cpu",
            max_running=size.max_running,
            tokens_per_step=size.tokens_per_step,
            max_length=size.max_length,
            kv_tokens=size.num_blocks * size.block_size,
            kv_after_load=config.engine.kv_after_load,
            cuda_graphs=size.cuda_graphs,
        )
    )


def _engine_settings(config: RunConfig, data: StageData) -> EngineSettings:
    engine = config.engine
    settings = size_engine(
        seed=config.seed,
        max_running=engine.max_running,
        max_length=data.shape.max_context,
        kv_tokens=settled_choice(config).kv_tokens or enough_kv_tokens(config, data),
        tokens_per_step=engine.tokens_per_step,
    )
    return replace(
        settings,
        steps_per_sync=engine.steps_per_sync if engine.graphs else 1,
        cuda_graphs=engine.graphs,
        kv_after_load=engine.kv_after_load,
    )
