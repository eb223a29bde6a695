"""One microbatch through the model: hidden states of packed rows, log-probabilities of the drawn tokens, the loss.

Owns: which hidden state scores which token, gradient checkpointing. Refuses: the head's arithmetic (logprobs.py), the
loss (objectives/), and any division: the weights of the tokens already hold the denominator of the whole batch.
Shapes: _T packed tokens, _A drawn tokens, _D width, _K top tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from temper.errors import UserError
from temper.models.attention import Attend
from temper.models.decoder import numerics_of
from temper.models.load import Head, hidden_states
from temper.objectives import MetricSums, Objective, Scored, Tokens, objective_loss
from temper.objectives.ratios import router_deviation
from temper.trainer.attention import ExactPackedAttention, PackedAttention
from temper.trainer.logprobs import KeepSets, drawn_logprobs
from temper.trainer.routers import hidden_and_router_logits, route_logprobs
from temper.trainer.rows import take_rows
from temper.trainer.traces import seen_of
from temper.types import Microbatch

MakeAttention = Callable[[Sequence[int], torch.device], Attend]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """What every microbatch of one optimiser step is told."""

    num_batch_tokens: int
    """Drawn tokens of the whole step, over all microbatches and ranks."""
    version: int = 0
    """Of the weights when the batch started."""
    seed: int = 0
    scales: Mapping[str, float] = field(default_factory=dict)

    def tokens(self, microbatch: Microbatch, scored: Scored, measured: Mapping[str, Tensor] | None = None) -> Tokens:
        return Tokens.of(
            microbatch,
            scored,
            num_batch_tokens=self.num_batch_tokens,
            version=self.version,
            seed=self.seed,
            scales=self.scales,
            measured=measured,
        )


@dataclass(frozen=True, slots=True)
class DrawnStates:
    """What the decoder says where tokens were drawn."""

    hidden_AD: Tensor
    token_ids_A: Tensor
    drawn_A: Tensor
    """Places of the drawn tokens among all of the microbatch."""
    router_logits: tuple[Tensor, ...]
    """[T, experts] by layer; empty unless asked for."""


def attention_of(model: nn.Module) -> MakeAttention:
    return ExactPackedAttention if numerics_of(model) == "exact" else PackedAttention


def drawn_states(
    model: nn.Module, microbatch: Microbatch, *, routers: bool = False, make_attention: MakeAttention | None = None
) -> DrawnStates:
    """The hidden states that score the drawn tokens of a microbatch, on the model's device."""
    device = next(model.parameters()).device
    drawn_A = microbatch.loss_mask.nonzero()[:, 0]
    # The state before a row's first token belongs to another row; scoring it would train on a neighbour's text.
    assert bool((microbatch.positions[drawn_A] > 0).all()), "the first token of a row cannot be a drawn one"
    attend = (make_attention or attention_of(model))(microbatch.lengths, device)
    token_ids_T, positions_T = microbatch.token_ids.to(device), microbatch.positions.to(device)
    drawn_A = drawn_A.to(device)
    logits: tuple[Tensor, ...] = ()
    if routers:
        hidden_TD, logits = hidden_and_router_logits(model, token_ids_T, positions_T, attend)
    else:
        hidden_TD = hidden_states(model, token_ids_T, positions_T, attend)
    return DrawnStates(take_rows(hidden_TD, drawn_A - 1), token_ids_T[drawn_A], drawn_A, logits)


def score_drawn(
    model: nn.Module, microbatch: Microbatch, temperature: float, make_attention: MakeAttention | None = None
) -> Scored:
    """Log-probability and entropy at every drawn token of a microbatch, in its order, on the model's device.

    Within the keep-sets of the sampler when the microbatch has them, whatever the model: policy, reference and teacher
    are then compared as distributions over the same tokens.
    Also those of the microbatch's top tokens, and how far the router moved, when it carries these columns.
    """
    has_routes = microbatch.router_ids is not None
    states = drawn_states(model, microbatch, routers=has_routes, make_attention=make_attention)
    top_ids = microbatch.top_ids
    logprobs_A, entropy_A, top_AK = drawn_logprobs(
        Head.of(model),
        states.hidden_AD,
        states.token_ids_A,
        temperature=temperature,
        top_ids_AK=None if top_ids is None else top_ids.to(states.drawn_A.device)[states.drawn_A],
        keep=keep_sets(microbatch, states.drawn_A.device),
    )
    shift_A = _router_shift(states, microbatch) if has_routes else None
    return Scored(logprobs=logprobs_A, entropy=entropy_A, top_logprobs=top_AK, router_shift=shift_A)


def keep_sets(microbatch: Microbatch, device: torch.device) -> KeepSets | None:
    """Of the drawn tokens of a microbatch; None when each was drawn among all."""
    if microbatch.keep_ids is None:
        return None
    assert microbatch.keep_counts is not None, "keep-sets without their sizes"
    return KeepSets.of(microbatch.keep_ids, microbatch.keep_counts[microbatch.loss_mask.bool()], device)


def forward_backward(
    model: nn.Module,
    microbatch: Microbatch,
    objective: Objective,
    *,
    temperature: float,
    facts: StepFacts,
    measured: Mapping[str, Tensor] | None = None,
    seen: list[Tensor] | None = None,
) -> tuple[Tensor, MetricSums]:
    """Adds the microbatch's gradient to the parameters; returns its part of the loss and of the metrics.

    Parts of all microbatches and ranks simply add up. To `seen`, if given, it adds what traces are made of.
    """
    scored = score_drawn(model, microbatch, temperature)
    if seen is not None:
        seen.append(seen_of(scored.logprobs, scored.entropy))
    if "entropy" not in objective.needs:
        scored = replace(scored, entropy=scored.entropy.detach())  # a metric only
    loss, metrics = objective_loss(objective, facts.tokens(microbatch, scored, measured))
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach(), metrics


def _router_shift(states: DrawnStates, microbatch: Microbatch) -> Tensor:
    """Router deviation [A] from the experts chosen when the batch started; a constant."""
    assert microbatch.router_ids is not None, "routes were not recorded"
    assert microbatch.router_logprobs is not None, "routes were recorded without their log-probabilities"
    device, before_A = states.drawn_A.device, states.drawn_A - 1
    old, ids = (x.to(device)[before_A] for x in (microbatch.router_logprobs, microbatch.router_ids))
    logits = tuple(layer.detach()[before_A] for layer in states.router_logits)
    return router_deviation(old, route_logprobs(logits, ids).to(old.dtype))


def enable_checkpointing(model: Any) -> None:
    """Makes layers able to recompute their activations in the backward pass; `checkpointing` says when they do."""
    if not any(isinstance(module, GradientCheckpointingLayer) for module in model.modules()):
        raise UserError(f"gradient_checkpointing=true: {type(model).__name__} has no layers that support it")
    model.gradient_checkpointing_enable({"use_reentrant": False})


@contextmanager
def checkpointing(model: nn.Module) -> Iterator[None]:
    """Transformers recomputes only in layers that are in training mode. Nothing inside them is put there: a router or
    a dropout of the model in training mode would make trainer and sampler disagree."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False
