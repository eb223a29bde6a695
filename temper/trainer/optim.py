"""AdamW on float32 master weights, learning-rate schedules, clipping.

Owns: gradients summed over microbatches, master weights, moments. Refuses: deciding whether a gradient is fit to apply.
A bfloat16 parameter has 8 significant bits: an update of 1e-6 of its size would vanish, so it is applied to a float32
master that the parameter is rounded from. Parameters in float32 or float64 are their own masters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from temper.errors import UserError

_MOMENTS = ("exp_avg", "exp_avg_sq")

BATCH_ELEMENTS = 1 << 25
"""Weights that are looked at together: enough to launch seldom, few enough to need little memory for it."""


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
    """The optimiser of one model. After each backward pass collect(), after the last one step()."""

    def __init__(self, model: nn.Module, settings: OptimizerSettings) -> None:
        self._settings = settings
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._masters = {name: _master_of(parameter) for name, parameter in self._parameters.items()}
        masters = list(self._masters.values())
        self._adamw = torch.optim.AdamW(
            [
                {"params": [p for p in masters if p.ndim >= 2], "weight_decay": settings.weight_decay},
                {"params": [p for p in masters if p.ndim < 2], "weight_decay": 0.0},
            ],
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.epsilon,
            fused=True,
        )

    def collect(self) -> None:
        """Adds the microbatch's gradients to the sum: in bfloat16, small ones would be rounded away."""
        for name, master in self._masters.items():
            parameter = self._parameters[name]
            if master is parameter or parameter.grad is None:
                continue  # float32: autograd itself adds them up
            if master.grad is None:
                master.grad = parameter.grad.float()
            else:
                master.grad.add_(parameter.grad)
            parameter.grad = None

    def gradients(self) -> dict[str, Tensor]:
        """By parameter name, in the master's precision. Zeros where nothing arrived: all ranks have them all."""
        gradients = {}
        for name, master in self._masters.items():
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            gradients[name] = master.grad
        return gradients

    def discard_gradients(self) -> None:
        for owner in (*self._masters.values(), *self._parameters.values()):
            owner.grad = None

    def step(self, learning_rate: float, grad_norm: Tensor) -> Tensor:
        """Clips by the given norm, updates the masters, rounds the parameters from them, drops the gradients.

        Returns [2]: the gradient's norm after clipping, and the norm of the update over that of the weights before it.
        """
        masters = list(self._masters.values())
        nn.utils.clip_grads_with_norm_(masters, self._settings.max_grad_norm, grad_norm)
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()
        self._round_parameters()
        self.discard_gradients()
        clipped = grad_norm * (self._settings.max_grad_norm / (grad_norm + 1e-6)).clamp(max=1.0)
        return torch.stack([clipped, self._update_norm_ratio(learning_rate).to(clipped)])

    @torch.no_grad()
    def _update_norm_ratio(self, learning_rate: float) -> Tensor:
        """Norm of the masters' change over their norm before it, found from the moments: keeping a copy of the weights
        to compare with would cost 4 bytes per parameter.

        With push p = m / (sqrt(v) + epsilon), bias corrected, decay d and weights w after the step, those before were
        (w + rate p) / (1 - rate d) and the change was rate (p + d w) / (1 - rate d).
        """
        changes, befores = [], []
        for group in self._adamw.param_groups:
            decay = group["weight_decay"]
            kept = 1 - learning_rate * decay
            for masters in _batches([p for p in group["params"] if p in self._adamw.state]):
                pushes = self._pushes(masters)
                pulled = torch._foreach_add(pushes, masters, alpha=decay)
                moved = torch._foreach_add(masters, pushes, alpha=learning_rate)
                changes.append(torch.stack(torch._foreach_norm(pulled)) * (learning_rate / kept))
                befores.append(torch.stack(torch._foreach_norm(moved)) / kept)
        if not changes:
            return torch.zeros(())
        return torch.cat(changes).norm() / torch.cat(befores).norm().clamp(min=1e-30)

    def _pushes(self, masters: list[Tensor]) -> tuple[Tensor, ...]:
        """What the optimiser moved each of them by, per unit of learning rate and without decay."""
        states = [self._adamw.state[master] for master in masters]
        # All took the same steps, as gradients() leaves none out; one look at the count saves thousands of launches.
        steps = states[0]["step"].double()
        first, second = (
            (1 - beta**steps).to(masters[0].dtype) for beta in (self._settings.beta1, self._settings.beta2)
        )
        sizes = torch._foreach_sqrt([state["exp_avg_sq"] for state in states])
        torch._foreach_div_(sizes, second.sqrt())
        torch._foreach_add_(sizes, self._settings.epsilon)
        pushes = torch._foreach_div([state["exp_avg"] for state in states], sizes)
        torch._foreach_div_(pushes, first)
        return pushes

    def reset(self) -> None:
        """Forgets the moments, as if training began here."""
        self._adamw.state.clear()

    def tensors(self) -> dict[str, Tensor]:
        """Moments, and masters where they differ from the parameters. Empty before the first step, but for masters."""
        own = {f"master.{name}": m.detach() for name, m in self._masters.items() if m is not self._parameters[name]}
        for name, master in self._masters.items():
            state = self._adamw.state.get(master, {})
            own |= {f"{moment}.{name}": state[moment] for moment in _MOMENTS if moment in state}
        return own

    @property
    def num_steps(self) -> int:
        return max((int(state["step"]) for state in self._adamw.state.values()), default=0)

    def load_tensors(self, tensors: Mapping[str, Tensor], num_steps: int) -> None:
        """Takes over what tensors() gave. Raises UserError, before anything changes, when a tensor is missing."""
        expected = {f"{moment}.{name}": p for name, p in self._masters.items() for moment in _MOMENTS if num_steps}
        expected |= {f"master.{n}": m for n, m in self._masters.items() if m is not self._parameters[n]}
        require_same_tensors(expected, tensors, "the optimiser state")
        with torch.no_grad():
            for name, master in self._masters.items():
                if master is not self._parameters[name]:
                    master.copy_(tensors[f"master.{name}"])
                if num_steps:
                    moments = {moment: tensors[f"{moment}.{name}"].to(master.device).clone() for moment in _MOMENTS}
                    step = torch.tensor(float(num_steps), device=master.device)
                    self._adamw.state[master] = {"step": step, **moments}
        if not num_steps:
            self._adamw.state.clear()
        self._round_parameters()
        self.discard_gradients()

    def _round_parameters(self) -> None:
        with torch.no_grad():
            wide = {name: master for name, master in self._masters.items() if master is not self._parameters[name]}
            if wide:
                torch._foreach_copy_([self._parameters[name] for name in wide], list(wide.values()))


def _batches(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    batch: list[Tensor] = []
    elements = 0
    for tensor in tensors:
        if batch and elements + tensor.numel() > BATCH_ELEMENTS:
            yield batch
            batch, elements = [], 0
        batch.append(tensor)
        elements += tensor.numel()
    if batch:
        yield batch


def require_same_tensors(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], what: str) -> None:
    """Raises UserError that names the first tensor whose presence or shape differs."""
    for name in sorted({*expected, *found}):
        wanted, given = (tuple(tensors[name].shape) if name in tensors else "absent" for tensors in (expected, found))
        if wanted != given:
            raise UserError(
                f'{what} is of another model: tensor "{name}" is {given} there and {wanted} in the model '
                f"being trained. Use a checkpoint of this run, or start a new run from that model with model.path"
            )


def _master_of(parameter: nn.Parameter) -> nn.Parameter:
    if parameter.dtype in (torch.float32, torch.float64):
        return parameter
    return nn.Parameter(parameter.detach().float())
