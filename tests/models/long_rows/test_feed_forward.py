"""Chunks of tokens: the same result and the same gradient, while the inside exists for one chunk alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from temper.models.long_rows import feed_forward
from temper.models.long_rows.feed_forward import in_chunks


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_forward, "CHUNK_TOKENS", 64)


def layers(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 32), nn.SiLU(), nn.Linear(32, 4)).to(dtype)


def states(dtype: torch.dtype = torch.float64, count: int = 1000) -> Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()


def slopes(function: Callable[[Tensor], Tensor], hidden: Tensor, module: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(function(hidden).sin().sum(), [hidden, *module.parameters()]))


def chunked(module: Any) -> Callable[[Tensor], Tensor]:
    return lambda hidden: in_chunks(module, hidden, list(module.parameters()))


@pytest.mark.parametrize("is_recomputed", [False, True])
def test_results_and_gradients_are_those_of_all_tokens_at_once(is_recomputed: bool) -> None:
    module, hidden = layers(), states()
    torch.testing.assert_close(chunked(module)(hidden), module(hidden), rtol=0, atol=1e-12)
    compute = chunked(module)
    if is_recomputed:
        compute = lambda hidden: checkpoint(chunked(module), hidden, use_reentrant=False)  # noqa: E731
    for ours, theirs in zip(slopes(compute, hidden, module), slopes(module, hidden, module), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_frozen_parameters_and_frozen_states_need_no_gradient() -> None:
    module, hidden = layers(), states()
    module.requires_grad_(False)
    (ours,) = torch.autograd.grad(chunked(module)(hidden).sum(), hidden)
    (theirs,) = torch.autograd.grad(module(hidden).sum(), hidden)
    torch.testing.assert_close(ours, theirs)
    assert not chunked(module)(hidden.detach()).requires_grad


def test_a_chunk_that_is_forgotten_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation: sums that keep the last chunk alone."""
    module, hidden = layers(), states()
    wanted = slopes(module, hidden, module)
    monkeypatch.setattr(Tensor, "add_", lambda total, one: one)
    found = slopes(chunked(module), hidden, module)
    assert torch.allclose(found[0], wanted[0])
    assert not torch.allclose(found[1], wanted[1])


def test_gradients_of_bfloat16_parameters_are_summed_more_finely() -> None:
    """Sums over 160 chunks in bfloat16 would stand still long before the end."""
    module, hidden = layers(torch.bfloat16), states(torch.bfloat16, 64 * 160)
    wide = layers(torch.bfloat16).double()
    wanted = slopes(wide, hidden.detach().double().requires_grad_(), wide)
    found = slopes(chunked(module), hidden, module)
    rough = slopes(lambda all: torch.cat([module(part) for part in all.split(64)]), hidden, module)
    for ours, coarse, theirs in zip(found[1:], rough[1:], wanted[1:], strict=True):
        assert (ours.double() - theirs).norm() < 0.02 * theirs.norm()
        assert (ours.double() - theirs).norm() < (coarse.double() - theirs).norm() / 2


def test_the_inside_exists_for_one_chunk_and_is_computed_twice() -> None:
    module, sizes = layers(), []

    def counted(hidden: Tensor) -> Tensor:
        sizes.append(len(hidden))
        return module(hidden)

    def whole(hidden: Tensor) -> Tensor:
        return in_chunks(counted, hidden, list(module.parameters()))

    checkpoint(whole, states(), use_reentrant=False).sum().backward()
    assert max(sizes) == 64
    assert sum(sizes) == 2 * 1000, "forward, and once more for the gradient; the recomputed layer stops before it"
