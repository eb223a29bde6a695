"""The module that a local engine draws with, made from the one that is trained.

Owns: what the engine shares with the trainer and what it copies. Refuses: loading weights.
"""

from __future__ import annotations

import copy
from typing import Literal

import torch

from temper.errors import UserError
from temper.models.decoder import FAMILIES, is_dense, lay_end_to_end
from temper.models.float8.layers import float8_copy
from temper.models.lora.wrapping import has_adapter, with_own_factors, with_own_weights, without_adapter
from temper.models.nf4.layers import holds_four_bits

SamplerWeights = Literal["model", "fp8"]


def sampler_model(model: torch.nn.Module, *, weights: SamplerWeights, runs_ahead: bool) -> torch.nn.Module:
    """One copy of the weights when nothing is under way while they change; otherwise the engine has its own. So it has
    for a model with an adapter: it draws from merged weights. Over a base in 4 bits it computes as the trainer does,
    and at most the factors are its own."""
    made = _made(model, weights, runs_ahead)
    lay_end_to_end(made)
    return made


def _made(model: torch.nn.Module, weights: SamplerWeights, runs_ahead: bool) -> torch.nn.Module:
    if holds_four_bits(model):
        return with_own_factors(model) if runs_ahead else model
    if weights == "fp8":
        if not is_dense(model):
            raise UserError(
                f'engine.weights="fp8" is made for the families {", ".join(FAMILIES)}, and this model is a '
                f'{model.config.get_text_config().model_type}. Use engine.weights = "model"'  # type: ignore[operator, union-attr]
            )
        quantized = float8_copy(without_adapter(model) if has_adapter(model) else model)
        return copy.deepcopy(quantized) if runs_ahead else quantized
    if has_adapter(model):
        return with_own_weights(model)
    return copy.deepcopy(model) if runs_ahead else model
