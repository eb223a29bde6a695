"""Entropy and gradient kernels of the trainer's head against float64, and rows that ignore each other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from temper.models.kernels.head import entropies, logits_gradient

SHAPES = [(1, 7), (3, 4096), (5, 4097), (4, 9000)]


def case(num_rows: int, num_words: int, temperature: float, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, some with words that cannot be drawn, drawn tokens and normalisers."""
    generator = torch.Generator().manual_seed(num_rows * num_words)
    logits = torch.randn(num_rows, num_words, generator=generator) * 3
    logits[0, 1:3] = -torch.inf
    ids = torch.randint(3, num_words, (num_rows,), generator=generator)
    normalizer = (logits / temperature).logsumexp(-1)
    return logits.to(device), ids.to(device), normalizer.to(device)


def dense_entropy(logits: Tensor, temperature: float) -> Tensor:
    logprobs = (logits.double() / temperature).log_softmax(-1)
    return -(logprobs.exp() * logprobs.clamp(min=-1e30)).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("shape", SHAPES)
def test_entropy_is_that_of_float64(shape: tuple[int, int], temperature: float, device: torch.device) -> None:
    logits, _, normalizer = case(*shape, temperature, device)
    expected = dense_entropy(logits, temperature)
    torch.testing.assert_close(entropies(logits, normalizer, temperature).double(), expected, rtol=1e-5, atol=1e-5)
    wrong = entropies(logits, normalizer + 1e-2, temperature).double()
    assert not torch.allclose(wrong, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradient_is_that_of_autograd_in_float64(
    shape: tuple[int, int], temperature: float, with_entropy: bool, device: torch.device
) -> None:
    logits, ids, normalizer = case(*shape, temperature, device)
    given = torch.linspace(-1, 2, len(logits), device=device)
    slope = torch.linspace(0.5, -1, len(logits), device=device) if with_entropy else None
    wide = logits.double().clamp(min=-1e30).requires_grad_()  # autograd has no answer at minus infinity
    logprobs = (wide / temperature).log_softmax(-1)
    loss = (logprobs.gather(1, ids[:, None])[:, 0] * given).sum()
    if slope is not None:
        loss = loss + (-(logprobs.exp() * logprobs).sum(-1) * slope).sum()
    loss.backward()
    entropy = (dense_entropy(logits, temperature).float(), slope)
    found = logits_gradient(logits, ids, normalizer, given, entropy, temperature, torch.float32)
    torch.testing.assert_close(found.double(), wide.grad, rtol=1e-4, atol=1e-6)


def test_a_row_does_not_depend_on_its_neighbours(device: torch.device) -> None:
    logits, ids, normalizer = case(5, 4097, 1.0, device)
    entropy = entropies(logits, normalizer, 1.0)
    assert torch.equal(entropies(logits[2:3], normalizer[2:3], 1.0), entropy[2:3])
    given = torch.ones(5, device=device)
    whole = logits_gradient(logits, ids, normalizer, given, (entropy, None), 1.0, torch.bfloat16)
    alone = logits_gradient(
        logits[2:3], ids[2:3], normalizer[2:3], given[2:3], (entropy[2:3], None), 1.0, torch.bfloat16
    )
    assert torch.equal(alone, whole[2:3])
