"""A prompt that rows have in common is computed once. States and gradients stay, in exact mode to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from temper.batching.pack import pack
from temper.models import ops
from temper.models.decoder import can_walk, set_numerics
from temper.trainer.passes import sharing
from temper.trainer.passes.forward import score_drawn
from temper.trainer.passes.sharing import Sharing, shared_prompts
from temper.trainer.passes.states import drawn_states
from temper.types import Microbatch, Sample

CPU = torch.device("cpu")
PROMPTS = ([3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9])


def make_row(prompt: Sequence[int], drawn: Sequence[int], group: str, index: int) -> Sample:
    mask = [0] * len(prompt) + [1] * len(drawn)
    zeros = [0.0] * len(mask)
    return Sample(
        group_id=group, index=index, token_ids=[*prompt, *drawn], loss_mask=mask, behavior_logprobs=zeros,
        versions=[m - 1 for m in mask], advantages=[float(m) for m in mask], weights=zeros,
    )  # fmt: skip


def make_rows(*sizes: int) -> list[Sample]:
    """Groups of so many rows."""
    return [
        make_row(PROMPTS[group], [(7 * index + place) % 40 for place in range(2 + index % 3)], f"g{group}", index % 4)
        for group, size in enumerate(sizes)
        for index in range(size)
    ]


def make_microbatch(*sizes: int) -> Microbatch:
    (microbatch,) = pack(make_rows(*sizes), 10_000, torch.float64)
    return microbatch


def states_and_gradients(model: Any, microbatch: Microbatch, *, shares: bool) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    hidden_AD = drawn_states(model, microbatch, shares=shares).hidden_AD
    (hidden_AD * torch.sin(torch.arange(hidden_AD.numel(), dtype=hidden_AD.dtype)).view_as(hidden_AD)).sum().backward()
    return hidden_AD.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def furthest(first: Any, second: Any) -> float:
    """Largest difference of states, or of gradients over the largest gradient of their tensor."""
    (states, gradients), (other_states, other_gradients) = first, second
    gaps = [(g - other_gradients[name]).abs().max() / g.abs().max() for name, g in gradients.items()]
    return max((states - other_states).abs().max().item(), *(gap.item() for gap in gaps))


@pytest.fixture
def wide_norms(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Models compute their norms in float32 even when all else is float64: sums would end in their rounding."""

    def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)

    monkeypatch.setattr(ops, "rms_norm", rms_norm)
    ops.ops_of.cache_clear()
    yield
    ops.ops_of.cache_clear()


@pytest.mark.usefixtures("wide_norms")
@pytest.mark.parametrize("sizes", [(4,), (4, 2), (3, 1, 5), (2, 2, 2)])
def test_states_and_gradients_are_those_of_rows_that_repeat_their_prompt(
    make_model: Callable[..., Any], family: str, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, microbatch = make_model(family), make_microbatch(*sizes)
    tolerance = 1e-10 if can_walk(model) else 2e-6  # the modules' own norms
    plain = states_and_gradients(model, microbatch, shares=False)
    assert furthest(plain, states_and_gradients(model, microbatch, shares=True)) < tolerance
    # Planted: gradient reaches a prompt from one of its rows only.
    monkeypatch.setattr(sharing._HandOut, "backward", staticmethod(_of_first_row))
    assert furthest(plain, states_and_gradients(model, microbatch, shares=True)) > 1e-2


def _of_first_row(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
    return grads[0][ctx.sharing.computed_U], None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_prompt_is_computed_once_but_not_in_float64(make_model: Callable[..., Any], dtype: torch.dtype) -> None:
    model, microbatch, seen = make_model(dtype=dtype), make_microbatch(4, 2, 1), []
    model.get_input_embeddings().register_forward_hook(lambda module, given, out: seen.append(given[0].numel()))
    drawn_states(model, microbatch)
    drawn_states(model, microbatch, shares=False)
    saved = 3 * len(PROMPTS[0]) + len(PROMPTS[1]) if dtype == torch.float32 else 0
    assert seen == [len(microbatch.token_ids) - saved, len(microbatch.token_ids)]


@pytest.mark.parametrize("budget", [1, 20, 30])
def test_the_gradient_of_a_batch_does_not_depend_on_who_meets_in_a_microbatch(
    make_model: Callable[..., Any], budget: int
) -> None:
    model, found = make_model(dtype=torch.float32), []
    for size in (budget, 1000):
        model.zero_grad()
        for microbatch in pack(make_rows(4, 2, 3), size):
            scored = score_drawn(model, microbatch, temperature=1.0)
            (scored.logprobs * torch.sin(scored.logprobs.detach())).sum().backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert (found[0] - found[1]).norm() < 1e-5 * found[1].norm()


def test_in_exact_mode_every_bit_is_the_same(make_model: Callable[..., Any]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model, microbatch = make_model(dtype=dtype), make_microbatch(4, 3, 2)
        set_numerics(model, "exact")
        with torch.no_grad():
            once, repeated = (drawn_states(model, microbatch, shares=shares).hidden_AD for shares in (True, False))
        assert torch.equal(once, repeated)


def test_what_is_handed_out_has_the_slope_of_plain_indexing() -> None:
    found = shared_prompts(make_microbatch(3, 2), CPU)
    assert found is not None
    states = torch.randn(len(found.computed_U), 2, dtype=torch.float64, requires_grad=True)
    assert torch.equal(found.hand_out(states), states[found.source_T])
    assert torch.autograd.gradcheck(found.hand_out, states)
    assert torch.autograd.gradgradcheck(lambda x: found.hand_out(x).square(), states)


def test_every_packed_token_has_its_source() -> None:
    microbatch = make_microbatch(4, 2, 1)
    found = shared_prompts(microbatch, CPU)
    assert isinstance(found, Sharing)
    assert torch.equal(microbatch.token_ids[found.computed_U][found.source_T], microbatch.token_ids)
    assert torch.equal(microbatch.positions[found.computed_U][found.source_T], microbatch.positions)
    assert len(found.computed_U.unique()) == len(found.computed_U) == int(found.source_T.max()) + 1


def test_rows_that_have_little_in_common_are_computed_as_they_are() -> None:
    assert shared_prompts(make_microbatch(1, 1, 1), CPU) is None
    long = [make_row([1], list(range(40)), "g", index) for index in range(2)]  # one token of 82 would be saved
    (microbatch,) = pack(long, 1000)
    assert shared_prompts(microbatch, CPU) is None


def test_a_row_without_a_drawn_token_shares_nothing_it_does_not_have() -> None:
    rows = [make_row([1, 2, 3], [4], "g", 0), make_row([1, 2, 3], [], "g", 1), make_row([1, 2, 3, 4], [5], "h", 0)]
    (microbatch,) = pack([replace(row, advantages=[0.0] * len(row.token_ids)) for row in rows], 1000)
    found = shared_prompts(microbatch, CPU)
    assert found is not None
    assert torch.equal(microbatch.token_ids[found.computed_U][found.source_T], microbatch.token_ids)
    assert len(found.computed_U) == len(microbatch.token_ids) - 3
