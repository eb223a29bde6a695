"""How far the student's distribution is from its teacher's at every drawn token, without logits of all of them.

Logits of both exist for one chunk of positions at a time and are computed again in the backward pass. The gradient
reaches the student alone: its hidden states and its head.
Owns: which teacher reads which rows, chunks, the way back through the head. Refuses: the divergence (objectives/).
Shapes: _T packed tokens, _A drawn tokens, _C those of one chunk, _D width (each model its own), _V common vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from temper.errors import UserError
from temper.models.states import Head
from temper.objectives import Loss
from temper.objectives.losses.divergences import DivergenceLoss
from temper.trainer.offload import on_device
from temper.trainer.passes.gathering import place_rows, take_rows
from temper.trainer.passes.logprobs import add_product, chunk_bytes_of
from temper.trainer.passes.states import DrawnStates, drawn_states
from temper.trainer.ranks.parts import is_cut, within
from temper.types import Microbatch

EVERYONE = ""
"""Name of a teacher for rows of all domains."""
COPIES = 8
"""Tensors of a chunk's size that a divergence and its gradient hold at once."""

Divergence = Callable[[Tensor, Tensor], Tensor]


class Class(NamedTuple):
    """The rows of a microbatch that one teacher reads."""

    teacher: nn.Module
    microbatch: Microbatch
    places_A: Tensor
    """Places of their drawn tokens among those of the whole microbatch; on the CPU."""


def classes(teachers: Mapping[str, nn.Module], microbatch: Microbatch) -> Iterator[Class]:
    """Each row with its own teacher, or all with the one for everyone. UserError for a domain that nobody teaches."""
    if not teachers:
        raise UserError("the objective needs a teacher model and the trainer was given none. Set model.teacher")
    names = microbatch.teachers or (EVERYONE,) * len(microbatch.lengths)
    chosen = [name if name in teachers else EVERYONE for name in names]
    if unknown := sorted({name for name, one in zip(names, chosen, strict=True) if one not in teachers}):
        raise UserError(
            f'rows of domain "{unknown[0]}" have no teacher; there are teachers for {", ".join(sorted(teachers))}. '
            f'Add it to model.teachers, e.g. {{{unknown[0]} = "DIRECTORY"}}, or name the domain in the task\'s field '
            f'"domain"'
        )
    if len(set(chosen)) == 1:
        yield Class(teachers[chosen[0]], microbatch, torch.arange(int(microbatch.loss_mask.sum())))
        return
    row_of_T = torch.arange(len(names)).repeat_interleave(torch.tensor(microbatch.lengths))
    row_of_A = row_of_T[microbatch.loss_mask.bool().cpu()]
    for name in sorted(set(chosen)):
        rows = torch.tensor([row for row, one in enumerate(chosen) if one == name])
        part = _rows(microbatch, rows, torch.isin(row_of_T, rows))
        yield Class(teachers[name], part, torch.isin(row_of_A, rows).nonzero()[:, 0])


def divergence(
    model: nn.Module,
    teachers: Mapping[str, nn.Module],
    states: DrawnStates,
    microbatch: Microbatch,
    direct_loss: Loss,
    *,
    chunk_bytes: int | None = None,
) -> Tensor:
    """[A] at the drawn tokens of a microbatch, in its order; `states` are the student's, with gradient.

    Over the tokens that both heads know: vocabularies are padded to different sizes, and the tokenizers are the same.
    """
    assert isinstance(direct_loss.run, DivergenceLoss), f"loss {direct_loss.name} does not compare distributions"
    head, hidden_AD = Head.of(model), states.hidden_AD
    total_A = torch.zeros(len(hidden_AD), dtype=_wide(head), device=hidden_AD.device)
    for part in classes(teachers, microbatch):
        theirs, taught_AD = _taught(part, hidden_AD.device)
        size = min(len(head.weight), len(theirs.weight))
        bytes_held = chunk_bytes or chunk_bytes_of(0, hidden_AD.device.type) // COPIES
        rows = max(1, bytes_held // (size * total_A.element_size()))
        theirs, settings = narrow(theirs, size), (head.softcap, head.is_exact)
        comparison = _Comparison(direct_loss.run.divergence, theirs, taught_AD, *settings, rows)
        places_A = part.places_A.to(hidden_AD.device)
        hidden_own_AD = take_rows(hidden_AD, places_A)
        own_A = _Divergence.apply(hidden_own_AD, head.weight, head.bias, comparison)  # type: ignore[no-untyped-call]
        total_A = total_A + place_rows(own_A, places_A, len(total_A))
    return total_A


def narrow(head: Head, size: int) -> Head:
    """The head of the first `size` tokens."""
    return replace(head, weight=head.weight[:size], bias=None if head.bias is None else head.bias[:size])


@torch.no_grad()
def _taught(part: Class, device: torch.device) -> tuple[Head, Tensor]:
    """A teacher's head and its hidden states at the drawn tokens of its rows."""
    with on_device(part.teacher) as teacher:

        def compute() -> tuple[Head, Tensor]:
            hidden_AD = drawn_states(teacher, part.microbatch).hidden_AD.to(device)
            head = Head.of(teacher)
            # Detached: the backward pass reads these very numbers, wherever the teacher waits by then, and also when
            # what was gathered of it is gone.
            keep = partial(Tensor.to, device=device, copy=is_cut(teacher))
            bias = None if head.bias is None else keep(head.bias.detach())
            return replace(head, weight=keep(head.weight.detach()), bias=bias), hidden_AD

        return within(teacher, compute)


@dataclass(frozen=True, slots=True)
class _Comparison:
    """What the two passes over the chunks share beside the student."""

    divergence: Divergence
    teacher: Head
    """Head of the teacher, narrowed to the common vocabulary."""
    taught_AD: Tensor
    softcap: float | None
    is_exact: bool
    """Whether the student's head computes in exact arithmetic."""
    rows: int
    """Positions of one chunk."""

    def student(self, weight: Tensor, bias: Tensor | None) -> Head:
        return narrow(Head(weight, bias, self.softcap, self.is_exact), len(self.teacher.weight))

    def chunks(self) -> Iterator[slice]:
        return (slice(start, start + self.rows) for start in range(0, len(self.taught_AD), self.rows))


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_AD: Tensor, weight: Tensor, bias: Tensor | None, comparison: _Comparison) -> Tensor:
        ctx.comparison = comparison
        ctx.save_for_backward(hidden_AD, weight, bias)
        head = comparison.student(weight, bias)
        values_A = torch.empty(len(hidden_AD), dtype=_wide(head), device=hidden_AD.device)
        for rows in comparison.chunks():
            teacher_CV = comparison.teacher.logits(comparison.taught_AD[rows])
            values_A[rows] = comparison.divergence(head.logits(hidden_AD[rows]), teacher_CV)
        return values_A

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_AD, weight, bias = ctx.saved_tensors
        comparison: _Comparison = ctx.comparison
        head, size = comparison.student(weight, bias), len(comparison.teacher.weight)
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden_AD) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=_wide(head)) if wants_weight else None
        grad_bias = torch.zeros_like(bias) if wants_bias else None
        for rows in comparison.chunks():
            grad_CV = _grad_logits(comparison, head, hidden_AD[rows], rows, grads[0][rows])
            if grad_bias is not None:
                grad_bias[:size] += grad_CV.sum(0)
            # As in logprobs.py: rounded to the weights' precision, every sum stays wide.
            grad_CV = grad_CV.to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = (grad_CV @ head.weight).to(hidden_AD.dtype)
            if grad_weight is not None:
                add_product(grad_weight[:size], grad_CV.t(), hidden_AD[rows].to(weight.dtype))
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), grad_bias, None


def _grad_logits(comparison: _Comparison, head: Head, hidden_CD: Tensor, rows: slice, grad_C: Tensor) -> Tensor:
    """Gradient of the student's logits before the softcap."""
    logits_CV = head.logits(hidden_CD).requires_grad_()
    teacher_CV = comparison.teacher.logits(comparison.taught_AD[rows])
    with torch.enable_grad():
        values_C = comparison.divergence(logits_CV, teacher_CV)
    (grad_CV,) = torch.autograd.grad(values_C, logits_CV, grad_C)
    return grad_CV if head.softcap is None else grad_CV * (1 - (logits_CV.detach() / head.softcap).square())


def _rows(microbatch: Microbatch, rows: Tensor, is_taken_T: Tensor) -> Microbatch:
    """Some rows of a microbatch, with what a pass without gradient reads."""
    keep_ids = keep_counts = None
    if microbatch.keep_ids is not None and microbatch.keep_counts is not None:
        keep_ids = tuple(microbatch.keep_ids[row] for row in rows.tolist())
        keep_counts = microbatch.keep_counts[is_taken_T]
    required = (
        "token_ids", "positions", "sequence_ids", "trajectory_ids", "loss_mask", "behavior_logprobs", "advantages",
        "weights", "versions",
    )  # fmt: skip
    columns: dict[str, Any] = {name: getattr(microbatch, name)[is_taken_T] for name in required}
    lengths = tuple(microbatch.lengths[row] for row in rows.tolist())
    return Microbatch(**columns, lengths=lengths, keep_ids=keep_ids, keep_counts=keep_counts)


def _wide(head: Head) -> torch.dtype:
    return torch.promote_types(head.weight.dtype, torch.float32)
