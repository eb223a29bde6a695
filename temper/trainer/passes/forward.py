"""One microbatch through the model: hidden states of packed rows, log-probabilities of the drawn tokens, the loss.

Owns: which hidden state scores which token, gradient checkpointing. Refuses: the head's arithmetic (logprobs.py), the
loss (objectives/), and any division: the weights of the tokens already hold the denominator of the whole batch.
Shapes: _T packed tokens, _A drawn tokens, _D width, _K top tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from temper.errors import UserError
from temper.models.decoder import can_walk
from temper.models.experts.balance import RouterWatch
from temper.models.experts.routing import has_experts
from temper.models.long_rows.host import CudaMover, HostInputs
from temper.models.states import Head
from temper.objectives import DirectLoss, Loss, MetricSums, Objective, Scored, Tokens, objective_loss
from temper.objectives.policy.ratios import router_deviation
from temper.trainer.passes.divergence import divergence
from temper.trainer.passes.logprobs import KeepSets, drawn_logprobs
from temper.trainer.passes.noise import noisy_embeddings
from temper.trainer.passes.routers import route_logprobs
from temper.trainer.passes.scores import read_scores
from temper.trainer.passes.states import DrawnStates, MakeAttention, drawn_states
from temper.trainer.ranks.parts import within
from temper.trainer.traces import seen_of
from temper.types import Microbatch


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """What every microbatch of one optimiser step is told."""

    num_batch_tokens: int
    """Drawn tokens of the whole step, over all microbatches and ranks."""
    version: int = 0
    """Version of the weights when the batch started."""
    seed: int = 0
    scales: Mapping[str, float] = field(default_factory=dict)
    teachers: Mapping[str, nn.Module] = field(default_factory=dict)
    """By domain; for losses that compare whole distributions."""
    loss_scale: float = 1.0
    """What the loss is multiplied by before the backward pass; its gradient is divided by it afterwards."""

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


def score_drawn(
    model: nn.Module,
    microbatch: Microbatch,
    temperature: float,
    make_attention: MakeAttention | None = None,
    watch: RouterWatch | None = None,
) -> Scored:
    """Log-probability and entropy at every drawn token of a microbatch, in its order, on the model's device.

    The first within the keep-sets of the sampler when the microbatch has them, as it drew; whole_logprobs are then
    those over the whole vocabulary, as the entropy is.
    Also those of the microbatch's top tokens, and how far the router moved, when it carries these columns.
    """
    has_routes = microbatch.router_ids is not None
    states = drawn_states(model, microbatch, routers=has_routes, make_attention=make_attention, watch=watch)
    return _scored(model, states, microbatch, temperature)


def _scored(model: nn.Module, states: DrawnStates, microbatch: Microbatch, temperature: float) -> Scored:
    top_ids = microbatch.top_ids
    said = drawn_logprobs(
        Head.of(model),
        states.hidden_AD,
        states.token_ids_A,
        temperature=temperature,
        top_ids_AK=None if top_ids is None else top_ids.to(states.drawn_A.device)[states.drawn_A].long(),
        keep=keep_sets(microbatch, states.drawn_A.device),
    )
    logprobs_A, entropy_A = states.gather(said[0]), states.gather(said[1])
    top_AK, whole_A = (column if column is None else states.gather(column) for column in said[2:])
    shift_A = None if microbatch.router_ids is None else _router_shift(states, microbatch)
    return Scored(
        logprobs=logprobs_A, entropy=entropy_A, whole_logprobs=whole_A, top_logprobs=top_AK, router_shift=shift_A
    )


def keep_sets(microbatch: Microbatch, device: torch.device) -> KeepSets | None:
    """Keep-sets of the drawn tokens of a microbatch; None when each was drawn among all."""
    if microbatch.keep_ids is None:
        return None
    assert microbatch.keep_counts is not None, "keep-sets without their sizes"
    ids = torch.from_numpy(np.concatenate(microbatch.keep_ids)).to(device).long()
    return KeepSets.of(ids, microbatch.keep_counts[microbatch.loss_mask.bool()], device)


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
    """Adds the microbatch's gradient, times facts.loss_scale, to the parameters; returns its part of loss and metrics.

    Parts of all microbatches and ranks simply add up. To `seen`, if given, it adds what traces are made of.
    """

    watch = _watch(model, facts)

    def compute() -> tuple[Tensor, MetricSums]:
        scored = _said(model, microbatch, objective, temperature, facts, watch)
        if seen is not None:
            seen.append(seen_of(scored.logprobs, scored.entropy))
        if "entropy" not in objective.needs:
            scored = replace(scored, entropy=scored.entropy.detach())  # a metric only
        return objective_loss(objective, facts.tokens(microbatch, scored, measured))

    loss, metrics = within(model, compute)
    (loss * facts.loss_scale).backward()  # type: ignore[no-untyped-call]
    return loss.detach(), metrics.merge(router_sums(watch))


def _watch(model: Any, facts: StepFacts) -> RouterWatch | None:
    """None: the model has no routers that are seen."""
    if not (has_experts(model) and can_walk(model)):
        return None
    return RouterWatch(model, facts.num_batch_tokens, facts.loss_scale)


def moved_share(model: nn.Module, microbatch: Microbatch) -> Tensor:
    """[A] of the recorded experts that each drawn token was drawn by, the share that the routers would not choose."""
    watch = RouterWatch(model, num_batch_tokens=0)
    drawn_states(model, microbatch, watch=watch)
    if not watch.moved:  # not one row of this microbatch has a record
        return torch.zeros(watch.num_drawn)
    return torch.stack([*watch.moved.values()]).double().mean(0) / watch.num_chosen


def router_sums(watch: RouterWatch | None) -> MetricSums:
    """What a pass showed of its routers, over drawn tokens and layers."""
    if watch is None or not watch.loads:
        return MetricSums()
    count = next(iter(watch.loads.values())).new_tensor(watch.num_drawn * len(watch.loads), dtype=torch.float64)
    sums = {"route/entropy": torch.stack([*watch.entropies.values()]).double().sum()}
    counts = {"route/entropy": count}
    if watch.moved:
        sums["route/moved_frac"] = torch.stack([*watch.moved.values()]).double().sum()
        counts["route/moved_frac"] = watch.is_routed_A.double().sum() * len(watch.loads) * watch.num_chosen
    if watch.is_recorded:
        sums["route/recorded_frac"] = watch.is_routed_A.double().sum() * len(watch.loads)
        counts["route/recorded_frac"] = count
    terms = {f"loss/{name}": torch.stack([*by.values()]).double().sum() for name, by in watch.losses.items() if by}
    loads = {str(layer): load.double() for layer, load in watch.loads.items()}
    return MetricSums(totals=terms, sums=sums, counts=counts, loads=loads)


def _said(
    model: nn.Module,
    microbatch: Microbatch,
    objective: Objective,
    temperature: float,
    facts: StepFacts,
    watch: RouterWatch | None = None,
) -> Scored:
    if isinstance(objective, DirectLoss):
        return _scored_for(objective.loss, model, microbatch, temperature, facts, watch)
    return score_drawn(model, microbatch, temperature, watch=watch)


def idle_backward(
    model: nn.Module, microbatch: Microbatch, objective: Objective, *, temperature: float, facts: StepFacts
) -> None:
    """The passes of forward_backward, with a gradient of zero: for a rank that has no microbatch where others have."""

    def compute() -> Tensor:
        return 0.0 * _said(model, microbatch, objective, temperature, facts).logprobs.sum()

    within(model, compute).backward()  # type: ignore[no-untyped-call]


def rehearse_backward(
    model: nn.Module,
    microbatch: Microbatch,
    objective: Objective,
    *,
    temperature: float,
    facts: StepFacts,
    measured: Mapping[str, Tensor] | None = None,
) -> None:
    """The passes of forward_backward over rows that nobody drew. A policy gradient takes its own loss; direct losses
    read rows of their own kind, and in their place stands a sum of what the model says."""
    if not isinstance(objective, DirectLoss):
        forward_backward(model, microbatch, objective, temperature=temperature, facts=facts, measured=measured)
        return

    def compute() -> Tensor:
        scored = _said(model, microbatch, objective, temperature, facts)
        said = (scored.logprobs, scored.uniform, scored.divergence)
        return torch.stack([part.mean() for part in said if part is not None]).sum()

    within(model, compute).backward()  # type: ignore[no-untyped-call]


@torch.no_grad()
def forward_only(
    model: nn.Module,
    microbatch: Microbatch,
    objective: Objective,
    *,
    temperature: float,
    facts: StepFacts,
    measured: Mapping[str, Tensor] | None = None,
    seen: list[Tensor] | None = None,
) -> tuple[Tensor, MetricSums] | None:
    """As forward_backward, for a microbatch whose gradient is zero: no backward pass through the model. None: it is not
    zero.

    Found out, not assumed: whatever the loss is made of, its gradient at what the model says of the tokens decides.
    """
    watch = _watch(model, facts)
    scored = score_drawn(model, microbatch, temperature, watch=watch)
    pulled = ("logprobs", "whole_logprobs", "top_logprobs", *(("entropy",) if "entropy" in objective.needs else ()))
    said = {name: value for name in pulled if (value := getattr(scored, name)) is not None}
    with torch.enable_grad():
        leaves = {name: value.detach().requires_grad_() for name, value in said.items()}
        loss, metrics = objective_loss(objective, facts.tokens(microbatch, replace(scored, **leaves), measured))
        gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    found = [gradient.any() for gradient in gradients if gradient is not None]
    if found and torch.stack(found).any():
        return None
    if seen is not None:
        seen.append(seen_of(scored.logprobs, scored.entropy))
    return loss.detach(), metrics.merge(router_sums(watch))


def _scored_for(
    direct_loss: Loss,
    model: nn.Module,
    microbatch: Microbatch,
    temperature: float,
    facts: StepFacts,
    watch: RouterWatch | None = None,
) -> Scored:
    """What a direct loss reads: beside log-probabilities, or in their place, what it says it needs."""
    if "scores" in direct_loss.needs:
        return read_scores(model, microbatch)
    noise: AbstractContextManager[None] = nullcontext()
    if "noise" in direct_loss.needs:
        noise = noisy_embeddings(model, microbatch, alpha=direct_loss.argument("noise"), seed=facts.seed)
    with noise:
        # Rows with a common prompt have noise of their own on it.
        states = drawn_states(model, microbatch, shares=False if "noise" in direct_loss.needs else None, watch=watch)
    scored = _scored(model, states, microbatch, temperature)
    if "uniform" in direct_loss.needs:
        scored = replace(scored, uniform=_uniform(model, states, scored.logprobs, temperature))
    if "divergence" in direct_loss.needs:
        scored = replace(scored, divergence=divergence(model, facts.teachers, states, microbatch, direct_loss))
    return scored


def _uniform(model: nn.Module, states: DrawnStates, logprobs_A: Tensor, temperature: float) -> Tensor:
    """[A] -mean over the vocabulary of log p. The mean logit is that of the mean of the head's rows, and the normaliser
    follows from one token's logit and log-probability: no second pass over the vocabulary."""
    head = Head.of(model)
    if head.softcap is not None:
        raise UserError("label smoothing is not made for models with a softcap on their logits. Use smoothing = 0")
    hidden_AD, weight = states.hidden_AD.to(logprobs_A.dtype), head.weight.to(logprobs_A.dtype)
    difference_AD = weight[states.token_ids_A] - weight.mean(0)
    gap_A = (hidden_AD * difference_AD).sum(-1)
    if head.bias is not None:
        gap_A = gap_A + head.bias[states.token_ids_A] - head.bias.mean()
    return gap_A / temperature - logprobs_A


def _router_shift(states: DrawnStates, microbatch: Microbatch) -> Tensor:
    """Router deviation [A] from the experts chosen when the batch started; a constant."""
    assert microbatch.router_ids is not None, "routes were not recorded"
    assert microbatch.router_logprobs is not None, "routes were recorded without their log-probabilities"
    device, before_A = states.drawn_A.device, states.drawn_A - 1
    old, ids = (x.to(device)[before_A] for x in (microbatch.router_logprobs, microbatch.router_ids))
    logits = tuple(layer.detach()[before_A] for layer in states.router_logits)
    return router_deviation(old, route_logprobs(logits, ids).to(old.dtype))


Checkpointing = bool | Literal["offload"]
"""Whether layers recompute their activations; offload: from inputs that, on a GPU, wait in the memory of the host."""


def enable_checkpointing(model: Any, kind: Checkpointing = True) -> None:
    """Makes layers able to recompute their activations in the backward pass; `checkpointing` says when they do."""
    if not any(isinstance(module, GradientCheckpointingLayer) for module in model.modules()):
        raise UserError(f"gradient_checkpointing=true: {type(model).__name__} has no layers that support it")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    device = next(model.parameters()).device
    if kind == "offload" and device.type == "cuda":
        set_recompute(model, HostInputs(CudaMover(device)).recompute)


def set_recompute(model: nn.Module, recompute: Callable[..., Any]) -> None:
    """How layers of this model that recompute do so, in place of torch's way."""
    for module in model.modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            module._gradient_checkpointing_func = recompute  # type: ignore[assignment]


@contextmanager
def checkpointing(model: nn.Module) -> Iterator[None]:
    """Puts layers into training mode, for only there transformers recomputes. Modules inside them stay as they are: a
    router or a dropout in training mode would make trainer and sampler disagree."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False
