"""Proof, on the very model that will be trained, that rows of a pack cannot see each other.

Owns: the start-up check. Refuses: to guess; a model that leaks is not trained.
Shapes: _T packed tokens, _A drawn tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from temper.errors import BackendError
from temper.models.experts.routing import has_experts
from temper.trainer.passes.forward import score_drawn
from temper.trainer.passes.scores import read_states
from temper.trainer.passes.states import MakeAttention
from temper.trainer.ranks.parts import is_cut, within
from temper.types import Microbatch

LOGPROB_BUDGET = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}
"""How far kernels that see other shapes may move a log-probability. A leak between rows moves it by about 1."""

ROW_LENGTHS = (11, 7, 12, 3, 9, 8)
"""Two buckets of padded lengths, and a row that is not at the start of either."""
PROMPT_LENGTHS = (1, 1, 1, 1, 5, 5)
"""The last two rows have their prompt in common, and the trainer computes it once."""


def check_isolation(
    model: nn.Module,
    vocab_size: int,
    *,
    temperature: float = 1.0,
    make_attention: MakeAttention | None = None,
) -> float:
    """Changes what one row says at a time, and looks at the others. Then scores rows alone: within the dtype's budget.

    The others keep every bit, or differ by no more than rounding and have a gradient of zero at all tokens that are not
    theirs. Experts need the second: other tokens in one row change how many of them an expert multiplies at once, and
    so the rounding of all. A gradient is zero whatever is rounded, unless one row is computed from another.

    Raises BackendError that names the rows. Returns the largest difference between packed and single rows.
    """
    rows = _random_rows(vocab_size)
    budget = LOGPROB_BUDGET[next(model.parameters()).dtype]

    def read(some: Sequence[_Row]) -> list[Tensor]:
        logprobs_A = within(model, lambda: _read(model, _pack(some), temperature, make_attention))
        return list(torch.split(logprobs_A, [len(row.drawn) for row in some]))

    def score(some: Sequence[_Row]) -> list[Tensor]:
        with torch.no_grad():
            return [logprobs.cpu() for logprobs in read(some)]

    packed, is_rounded = score(rows), False
    for changed in range(len(rows)):
        other = _Row(rows[changed].prompt, (rows[changed].drawn + 1) % vocab_size)
        perturbed = score([other if number == changed else row for number, row in enumerate(rows)])
        for number in range(len(rows)):
            if number == changed or torch.equal(packed[number], perturbed[number]):
                continue
            is_rounded, gap = True, (packed[number] - perturbed[number]).abs().max().item()
            if not gap <= budget:
                raise _leak(
                    model, f"other tokens in row {changed} moved log-probabilities of row {number} by up to {gap:.3g}"
                )
    if has_experts(model) if is_cut(model) else is_rounded:  # ranks with parts all go back through them, or none does
        _check_gradients(model, rows, read)
    return _check_single_rows(model, packed, [score([row])[0] for row in rows])


def _check_gradients(model: Any, rows: Sequence[_Row], read: Callable[[Sequence[_Row]], list[Tensor]]) -> None:
    """No log-probability of a row may depend on the embedded tokens of another."""
    embedded: list[Tensor] = []

    def keep(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1]

    handle = model.get_input_embeddings().register_forward_hook(keep)
    try:
        with torch.enable_grad():
            # Rows without a common prompt: what they share they may both depend on. A pass for each: of a cut model
            # the way back is gone once.
            apart = [_Row(row.prompt[:1], row.drawn) for row in rows]
            gradients = [
                torch.autograd.grad(read(apart)[number].sum(), embedded[number])[0] for number in range(len(rows))
            ]
    finally:
        handle.remove()
    lengths = [1 + len(row.drawn) for row in rows]
    for number, gradient in enumerate(gradients):
        for other, part in enumerate(torch.split(gradient.reshape(-1, gradient.shape[-1]), lengths)):
            if other != number and bool(part.any()):
                raise _leak(model, f"log-probabilities of row {number} have a gradient at the tokens of row {other}")


def _leak(model: nn.Module, what: str) -> BackendError:
    return BackendError(
        f"packed rows leak in {type(model).__name__}: {what}. Its layers mix rows outside of attention or ignore "
        f"Temper's; this model cannot be trained packed"
    )


def _read(model: Any, microbatch: Microbatch, temperature: float, make_attention: MakeAttention | None) -> Tensor:
    """A log-probability at every drawn token. A scorer has no tokens to offer and may say 0 to everything: there the
    entries of the hidden state are taken for logits."""
    if model.get_output_embeddings() is None:
        return read_states(model, microbatch, make_attention).log_softmax(-1)[:, 0]
    return score_drawn(model, microbatch, temperature, make_attention).logprobs


def _check_single_rows(model: nn.Module, packed: Sequence[Tensor], single: Sequence[Tensor]) -> float:
    budget = LOGPROB_BUDGET[next(model.parameters()).dtype]
    gaps = [(together - alone).abs().max().item() for together, alone in zip(packed, single, strict=True)]
    worst = max(range(len(gaps)), key=gaps.__getitem__)
    if not gaps[worst] <= budget:
        raise BackendError(
            f"{type(model).__name__} scores row {worst} differently in a pack and alone: log-probabilities differ by "
            f"up to {gaps[worst]:.3g}, allowed is {budget:g}. Positions or row boundaries are lost in the packed pass"
        )
    return gaps[worst]


class _Row(NamedTuple):
    prompt: Tensor
    drawn: Tensor


def _random_rows(vocab_size: int) -> list[_Row]:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randint(vocab_size, (length,), generator=generator) for length in ROW_LENGTHS]
    rows = [_Row(row[:prompt], row[prompt:]) for row, prompt in zip(drawn, PROMPT_LENGTHS, strict=True)]
    return [*rows[:-1], _Row(rows[-2].prompt, rows[-1].drawn)]


def _pack(rows: Sequence[_Row]) -> Microbatch:
    """Rows end to end."""
    lengths = [len(row.prompt) + len(row.drawn) for row in rows]
    positions = torch.cat([torch.arange(length) for length in lengths])
    row_ids = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(lengths))
    zeros = torch.zeros(len(positions))
    return Microbatch(
        token_ids=torch.cat([part for row in rows for part in row]),
        positions=positions,
        sequence_ids=row_ids,
        trajectory_ids=row_ids,
        loss_mask=(positions >= torch.tensor([len(row.prompt) for row in rows])[row_ids]).long(),
        behavior_logprobs=zeros,
        advantages=zeros,
        weights=zeros,
        versions=torch.zeros_like(positions),
        lengths=tuple(lengths),
    )
