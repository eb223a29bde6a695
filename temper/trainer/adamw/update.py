"""AdamW's equations on a few tensors at a time.

Owns: the update and how far it went. Refuses: how its tensors are held, and which rate a step has (optim.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from temper.trainer.adamw.roots import rounded_root


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRule:
    learning_rate: float
    weight_decay: float
    beta1: float
    beta2: float
    epsilon: float
    num_steps: int
    """Steps of these moments, this one included."""

    @property
    def factors(self) -> UpdateFactors:
        return UpdateFactors(
            mean_kept=self.beta1,
            mean_added=1 - self.beta1,
            square_kept=self.beta2,
            square_added=1 - self.beta2,
            root=1 / math.sqrt(1 - self.beta2**self.num_steps),
            epsilon=self.epsilon,
            rate=self.learning_rate / (1 - self.beta1**self.num_steps),
            decay=self.learning_rate * self.weight_decay,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateFactors:
    """What the values of one update are multiplied by, and epsilon. Each is rounded to the masters' precision when it
    is used, and not before."""

    mean_kept: float
    mean_added: float
    square_kept: float
    square_added: float
    root: float
    """Of the second moment, corrects its bias."""
    epsilon: float
    rate: float
    """Corrects the bias of the first moment, too."""
    decay: float


def apply_update(
    rule: UpdateRule,
    masters: list[Tensor],
    gradients: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
) -> None:
    """Changes masters and moments in place: the kernel of torch.optim.AdamW(fused=True), which is the specification."""
    steps = torch.full((), float(rule.num_steps), device=masters[0].device)
    torch._fused_adamw_(
        masters,
        gradients,
        means,
        squares,
        [],
        [steps] * len(masters),
        lr=rule.learning_rate,
        beta1=rule.beta1,
        beta2=rule.beta2,
        weight_decay=rule.weight_decay,
        eps=rule.epsilon,
        amsgrad=False,
        maximize=False,
    )


def apply_in_order(
    rule: UpdateRule,
    masters: list[Tensor],
    gradients: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
) -> None:
    """The same equations in operations that round once each, in this order: one result on every device, and that of the
    kernel (kernels.py). torch's own kernel fuses some of them: others on a CPU than on a GPU, others in other versions.
    """
    factors = rule.factors
    torch._foreach_mul_(means, factors.mean_kept)
    torch._foreach_add_(means, torch._foreach_mul(gradients, factors.mean_added))
    squared = torch._foreach_mul(gradients, gradients)
    torch._foreach_mul_(squared, factors.square_added)
    torch._foreach_mul_(squares, factors.square_kept)
    torch._foreach_add_(squares, squared)
    del squared
    sizes = [rounded_root(square) for square in squares]
    torch._foreach_mul_(sizes, factors.root)
    torch._foreach_add_(sizes, factors.epsilon)
    pushes = torch._foreach_div(means, sizes)
    del sizes
    torch._foreach_mul_(pushes, factors.rate)
    torch._foreach_sub_(masters, torch._foreach_mul(masters, factors.decay))
    torch._foreach_sub_(masters, pushes)


def measure_update(
    rule: UpdateRule, masters: list[Tensor], means: list[Tensor], squares: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Norm of each master's change, and norm of each master before it, from what the update left: a copy of the weights
    to compare with would cost memory, and in float32 the difference of two near numbers has few right digits.

    With push p = m / (sqrt(v) + epsilon), bias corrected, decay d and weights w after the step, those before were
    (w + rate p) / (1 - rate d) and the change was rate (p + d w) / (1 - rate d).
    """
    rate, decay = rule.learning_rate, rule.weight_decay
    kept = 1 - rate * decay
    pushes = _pushes(rule, means, squares)
    pulled = torch._foreach_add(pushes, masters, alpha=decay)
    changes = torch.stack(torch._foreach_norm(pulled)) * (rate / kept)
    del pulled
    moved = torch._foreach_add(masters, pushes, alpha=rate)
    return changes, torch.stack(torch._foreach_norm(moved)) / kept


def _pushes(rule: UpdateRule, means: list[Tensor], squares: list[Tensor]) -> tuple[Tensor, ...]:
    """What the optimiser moved each of them by, per unit of learning rate and without decay."""
    steps = torch.full((), float(rule.num_steps), device=means[0].device, dtype=torch.float64)
    first, second = ((1 - beta**steps).to(means[0].dtype) for beta in (rule.beta1, rule.beta2))
    sizes = torch._foreach_sqrt(squares)
    torch._foreach_div_(sizes, second.sqrt())
    torch._foreach_add_(sizes, rule.epsilon)
    pushes = torch._foreach_div(means, sizes)
    torch._foreach_div_(pushes, first)
    return pushes
