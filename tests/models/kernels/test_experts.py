"""Experts of few tokens against the same steps one by one, and each row against itself in other company."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from temper.models.experts.products import collect, looped_products, places_of, spread, weighted_sum
from temper.models.kernels import experts as kernels
from temper.models.kernels.experts import choose_experts, mixture, sorted_products

DTYPES = [torch.float32, torch.bfloat16]


def draw(device: torch.device, dtype: torch.dtype, *shape: int, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))).to(device, dtype)


def layer_of(device: torch.device, dtype: torch.dtype, tokens: int) -> dict[str, Tensor]:
    """Width and inner width that no tile divides; more rows for an expert than a tile has; experts without any."""
    chosen = torch.stack([torch.randperm(3, generator=torch.Generator().manual_seed(i))[:2] for i in range(tokens)])
    return {
        "states_TD": draw(device, dtype, tokens, 136),
        "gate_up_EOD": draw(device, dtype, 5, 2 * 72, 136, scale=0.2),
        "down_EDF": draw(device, dtype, 5, 136, 72, scale=0.2),
        "experts_TK": (chosen * 2).to(device),  # experts 0, 2 and 4
        "weights_TK": draw(device, dtype, tokens, 2).abs(),
    }


def one_by_one(given: dict[str, Tensor]) -> Tensor:
    places = places_of(given["experts_TK"], len(given["gate_up_EOD"]))
    linear = torch.nn.functional.linear

    def product(rows: Tensor, weight: Tensor) -> Tensor:
        wide = looped_products(linear, rows.float(), weight.float(), places.ends_E)
        return wide.to(rows.dtype)

    gate, up = product(spread(given["states_TD"], places), given["gate_up_EOD"]).chunk(2, dim=1)
    said = product(torch.nn.functional.silu(gate) * up, given["down_EDF"])
    return weighted_sum(collect(said, places, given["experts_TK"].shape[1]), given["weights_TK"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 40])
def test_the_mixture_is_its_steps_one_by_one(device: torch.device, dtype: torch.dtype, tokens: int) -> None:
    given = layer_of(device, dtype, tokens)
    ours, expected = mixture(**given), one_by_one(given)
    assert ours.dtype == dtype
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 0.1}
    torch.testing.assert_close(ours, expected, **tolerance)


def test_experts_that_are_mixed_up_would_be_noticed(device: torch.device) -> None:
    given = layer_of(device, torch.float32, 40)
    expected = one_by_one(given)
    for name in ("experts_TK", "weights_TK"):
        wrong = mixture(**{**given, name: given[name].flip(1).contiguous()})
        assert not torch.allclose(wrong, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_company(device: torch.device, dtype: torch.dtype) -> None:
    rows, weight = draw(device, dtype, 40, 136), draw(device, dtype, 3, 72, 136)
    together = sorted_products(rows, weight, torch.tensor([0, 33, 40], dtype=torch.int32, device=device))
    for row, expert in ((0, 1), (17, 1), (32, 1), (33, 2), (39, 2)):
        ends = torch.tensor([int(expert <= e) for e in range(3)], dtype=torch.int32, device=device)
        alone = sorted_products(rows[row : row + 1].contiguous(), weight, ends)
        assert torch.equal(alone[0], together[row])


def test_the_choice_is_the_top_of_a_softmax_and_of_equals_the_first(device: torch.device) -> None:
    logits = draw(device, torch.float32, 9, 12)
    for normalizes in (False, True):
        experts, weights = choose_experts(logits, 3, normalizes=normalizes, dtype=torch.float32)
        top = torch.softmax(logits, -1).topk(3)
        expected = top.values / top.values.sum(-1, keepdim=True) if normalizes else top.values
        assert torch.equal(experts, top.indices)
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
    experts, _ = choose_experts(torch.zeros(1, 12, device=device), 3, normalizes=True, dtype=torch.bfloat16)
    assert experts.tolist() == [[0, 1, 2]]


def test_copies_are_sorted_as_a_stable_sort_does(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "COPIES", 16)  # so that there are several blocks of them
    seen: dict[str, Any] = {}
    monkeypatch.setattr(kernels, "_launch", lambda *given, **_: seen.update(order=given[2], ends=given[3]))
    given = layer_of(device, torch.float32, 40)
    mixture(**given)
    places = places_of(given["experts_TK"], 5)
    assert torch.equal(seen["order"].long(), places.order_S)
    assert torch.equal(seen["ends"], places.ends_E)
