"""One microbatch through the model: hidden states of packed rows, log-probabilities of the drawn tokens, the loss.

Owns: which hidden state scores which token, gradient checkpointing. Refuses: the head's arithmetic (logprobs.py), the
loss (objectives/), and any division: the weights of the tokens already hold the denominator of the whole batch.
Shapes: _T packed tokens, _A drawn tokens, _D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from temper.errors import UserError
from temper.models.attention import Attend
from temper.models.load import Head, hidden_states
from temper.objectives import MetricSums, Objective, Tokens, objective_loss
from temper.trainer.attention import PackedAttention
from temper.trainer.logprobs import drawn_logprobs
from temper.trainer.rows import take_rows
from temper.types import Microbatch

MakeAttention = Callable[[Sequence[int], torch.device], Attend]


def score_drawn(
    model: nn.Module, microbatch: Microbatch, temperature: float, make_attention: MakeAttention = PackedAttention
) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy [A] at every drawn token of a microbatch, in its order, on the model's device."""
    device = next(model.parameters()).device
    drawn_A = microbatch.loss_mask.nonzero()[:, 0]
    # The state before a row's first token belongs to another row; scoring it would train on a neighbour's text.
    assert bool((microbatch.positions[drawn_A] > 0).all()), "the first token of a row cannot be a drawn one"
    attend = make_attention(microbatch.lengths, device)
    token_ids_T = microbatch.token_ids.to(device)
    drawn_A = drawn_A.to(device)
    hidden_TD = hidden_states(model, token_ids_T, microbatch.positions.to(device), attend)
    return drawn_logprobs(
        Head.of(model), take_rows(hidden_TD, drawn_A - 1), token_ids_T[drawn_A], temperature=temperature
    )


def forward_backward(
    model: nn.Module, microbatch: Microbatch, objective: Objective, *, temperature: float, num_batch_tokens: int
) -> tuple[Tensor, MetricSums]:
    """Adds the microbatch's gradient to the parameters; returns its part of the loss and of the metrics.

    Parts of all microbatches and ranks simply add up. num_batch_tokens counts the drawn tokens of the whole batch.
    """
    logprobs_A, entropy_A = score_drawn(model, microbatch, temperature)
    if "entropy" not in objective.needs:
        entropy_A = entropy_A.detach()  # a metric only
    tokens = Tokens.of(
        microbatch.to(logprobs_A.device), logprobs_A, num_batch_tokens=num_batch_tokens, entropy=entropy_A
    )
    loss, metrics = objective_loss(objective, tokens)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach(), metrics


def spread(values_A: Tensor, microbatch: Microbatch) -> Tensor:
    """Values of the drawn tokens at their places among all tokens [T], 0 elsewhere, on the microbatch's device."""
    values_T = torch.zeros(len(microbatch.token_ids), dtype=values_A.dtype)
    values_T[microbatch.loss_mask.bool()] = values_A.cpu()
    return values_T


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
