"""AdamW on float32 master weights, learning-rate schedules, clipping.

Owns: gradients summed over microbatches, the order of an update. Refuses: deciding whether a gradient is fit to apply,
and how masters and moments are held (adamw/).
A bfloat16 parameter has 8 significant bits: an update of 1e-6 of its size would vanish, so it is applied to a float32
master that the parameter is rounded from. Parameters in float32 or float64 are their own masters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from temper.errors import UserError
from temper.trainer.adamw.moments import States
from temper.trainer.adamw.state import AdamState, states_of
from temper.trainer.adamw.update import UpdateRule
from temper.trainer.ranks.parts import OwnParts, PartsOf, WholeTensors, is_cut, own_part
from temper.trainer.ranks.sums import norm_over_ranks, sum_over_ranks

LAST_PART = 0.2
"""Share of the steps after warm-up in which "wsd" falls: long enough to lose the noise of the full rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    learning_rate: float
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    warmup_steps: int = 0
    weight_decay: float = 0.0
    """Decay of matrices; norms and biases are never decayed."""
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    states: States = "float32"
    """How the moments are held between updates."""
    offload: bool = False
    """Whether moments and masters live in the memory of the host."""
    noise_seed: int = 0
    """Of the random bits that compact moments are rounded with."""
    kernels: bool = True
    """Whether a kernel updates compact moments where there is one. False is for comparing: the bits are the same."""


_SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "wsd": lambda progress: min(1.0, (1.0 - progress) / LAST_PART),
}


def learning_rate_at(settings: OptimizerSettings, step: int, total_steps: int) -> float:
    """Learning rate of a step, counted from 1. A function of nothing else, so a resumed run cannot get it wrong.

    Rises linearly and is full at step warmup_steps; linear and cosine then fall towards 0, wsd in the last fifth alone.
    They would reach 0 one step after the last: a step at rate 0 would be wasted.
    """
    if step < settings.warmup_steps:
        return settings.learning_rate * step / settings.warmup_steps
    steps_after_warmup = max(1, total_steps - settings.warmup_steps)
    progress = min(1.0, max(0, step - 1 - settings.warmup_steps) / steps_after_warmup)
    return settings.learning_rate * _SHAPES[settings.schedule](progress)


class MasterAdamW:
    """The optimiser of one model. Backward passes under collecting(), after the last one step()."""

    def __init__(self, model: nn.Module, settings: OptimizerSettings) -> None:
        self._settings = settings
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._is_cut = is_cut(model)
        """Whether this is the optimiser of a part: norms are then of all ranks' parts together."""
        self._state = AdamState(
            OwnParts(self._parameters) if self._is_cut else self._parameters,
            settings.states,
            offload=settings.offload,
            seed=settings.noise_seed,
            kernels=settings.kernels,
            shapes={name: parameter.shape for name, parameter in self._parameters.items()},
        )
        self._sums: dict[str, Tensor] = {}
        """Gradients of parameters with masters, in float32. Others have theirs in .grad, where autograd adds them."""
        self._num_steps = 0

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Backward passes in here add to the sum of gradients in float32: in bfloat16, small ones would be rounded
        away. Each is added and dropped as it arrives, so that the model's gradients never exist in bfloat16, too."""
        hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._collect, name))  # type: ignore[no-untyped-call]
            for name, parameter in self._parameters.items()
            if self._state.has_master(name)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _collect(self, name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None, "called when a gradient has arrived"
        gradient = own_part(parameter.grad)
        if name in self._sums:
            self._sums[name].add_(gradient)
        else:
            self._sums[name] = gradient.float()
        parameter.grad = None

    def gradients(self) -> dict[str, Tensor]:
        """By parameter name, in the master's precision. Zeros where nothing arrived: all ranks have them all."""
        gradients = {}
        for name, parameter in self._parameters.items():
            if self._state.has_master(name):
                if name not in self._sums:
                    self._sums[name] = torch.zeros_like(own_part(parameter), dtype=torch.float32)
                gradients[name] = self._sums[name]
            else:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                gradients[name] = own_part(parameter.grad)
        return gradients

    def sum_gradients(self) -> Tensor:
        """Adds gradients up over ranks, where torch has not done so layer by layer; returns the norm of the sum."""
        gradients = list(self.gradients().values())
        if not self._is_cut:
            sum_over_ranks(gradients)
        return self._norm(nn.utils.get_total_norm(gradients))

    def _norm(self, own: Tensor) -> Tensor:
        return norm_over_ranks(own) if self._is_cut else own

    def reserve(self) -> None:
        """Takes the memory that moments and masters will have from the first step on."""
        self._state.reserve()

    def discard_gradients(self) -> None:
        self._sums.clear()
        for parameter in self._parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def step(self, learning_rate: float, grad_norm: Tensor) -> Tensor:
        """Clips by the given norm, updates the masters, rounds the parameters from them, drops the gradients.

        Returns [2]: the gradient's norm after clipping, and the norm of the update over that of the weights before it.
        """
        shrink = (self._settings.max_grad_norm / (grad_norm + 1e-6)).clamp(max=1.0)
        gradients = {name: gradient.reshape(-1) for name, gradient in self.gradients().items()}
        self._num_steps += 1
        changes, befores = [], []
        for bucket in self._state.visit(self._num_steps):
            parts = [gradients[piece.name][piece.start : piece.stop] for piece in bucket.slices]
            change, before = bucket.update(self._rule(learning_rate, bucket.is_decayed), parts, shrink)
            changes.append(change)
            befores.append(before)
        self.discard_gradients()
        clipped = grad_norm * shrink
        if not changes:
            return torch.stack([clipped, torch.zeros_like(clipped)])
        change, before = self._norm(torch.cat(changes).norm()), self._norm(torch.cat(befores).norm())
        ratio = change / before.clamp(min=1e-30)
        return torch.stack([clipped, ratio.to(clipped)])

    def _rule(self, learning_rate: float, is_decayed: bool) -> UpdateRule:
        return UpdateRule(
            learning_rate=learning_rate,
            weight_decay=self._settings.weight_decay if is_decayed else 0.0,
            beta1=self._settings.beta1,
            beta2=self._settings.beta2,
            epsilon=self._settings.epsilon,
            num_steps=self._num_steps,
        )

    def reset(self) -> None:
        """Forgets the moments, as if training began here."""
        self._num_steps = 0
        self._state.forget_moments()

    @property
    def num_steps(self) -> int:
        return self._num_steps

    def tensors(self) -> Mapping[str, Tensor]:
        """Moments as they are held, and masters where they differ from the parameters, each made on the CPU when it is
        asked for. Empty before the first step, but for masters. Of a cut model whole, made by all ranks together."""
        tensors = self._state.tensors(moments=self._num_steps > 0)
        return WholeTensors(tensors, self._likes(tensors)) if self._is_cut else tensors

    def load_tensors(self, tensors: Mapping[str, Tensor], num_steps: int) -> None:
        """Takes over what tensors() gave. Raises UserError, before anything changes, when a tensor is missing."""
        if self._is_cut:
            tensors = PartsOf(tensors, self._likes(tensors))
        expected = self._state.outlines(moments=num_steps > 0)
        if (stored := states_of(tensors)) != (own := states_of(expected)):
            raise UserError(
                f"the moments of the checkpoint are held in {stored} and those of this run in {own}. Set optim.states "
                f'= "{stored}", or start a new run from the checkpoint with model.path'
            )
        require_same_tensors(expected, tensors, "the optimiser state")
        self._state.load(tensors)
        self._num_steps = num_steps
        self.discard_gradients()

    def _likes(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """By name of a master or moment, the parameter that it belongs to and is cut like."""
        return {name: self._parameters[name.partition(".")[2]] for name in tensors}


def require_same_tensors(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], what: str) -> None:
    """Raises UserError that names the first tensor whose presence or shape differs."""
    for name in sorted({*expected, *found}):
        wanted, given = (tuple(tensors[name].shape) if name in tensors else "absent" for tensors in (expected, found))
        if wanted != given:
            raise UserError(
                f'{what} is of another model: tensor "{name}" is {given} there and {wanted} in the model '
                f"being trained. Use a checkpoint of this run, or start a new run from that model with model.path"
            )
