"""Rows of thousands of tokens: each way to save memory gives the same gradient, and attention pads little."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Olmo2Config, Olmo2ForCausalLM

from temper.batching.pack import pack
from temper.models.load import prepare
from temper.models.long_rows import feed_forward, host
from temper.models.long_rows.host import HostInputs
from temper.objectives import PRESETS
from temper.trainer.passes import long_rows, varlen
from temper.trainer.passes.forward import (
    StepFacts,
    checkpointing,
    enable_checkpointing,
    forward_backward,
    set_recompute,
)
from temper.trainer.passes.packed_attention import PackedAttention
from temper.types import Microbatch, Sample
from tests.fakes.movers import FakeMover

CPU = torch.device("cpu")
LENGTHS = (1500, 40, 900)
SHAPE: dict[str, Any] = {
    "vocab_size": 20, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 2048, "initializer_range": 0.3,
}  # fmt: skip


def make_model(family: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    made = LlamaForCausalLM(LlamaConfig(**SHAPE)) if family == "llama" else Olmo2ForCausalLM(Olmo2Config(**SHAPE))
    return prepare(made.to(dtype))


def microbatch(dtype: torch.dtype) -> Microbatch:
    rows = []
    for number, length in enumerate(LENGTHS):
        ids = torch.randint(20, (length,), generator=torch.Generator().manual_seed(number)).tolist()
        mask = [0] + [1] * (length - 1)
        rows.append(
            Sample(
                group_id="g",
                index=number,
                token_ids=ids,
                loss_mask=mask,
                behavior_logprobs=[-3.0 * m for m in mask],
                versions=[m - 1 for m in mask],
                advantages=[(number - 0.5) * m for m in mask],
                weights=[m / sum(LENGTHS) for m in mask],
            )
        )
    (made,) = pack(rows, 4096, dtype)
    return made


def gradients(model: Any, dtype: torch.dtype, *, checkpoints: bool = True) -> dict[str, Tensor]:
    model.zero_grad()
    facts = StepFacts(num_batch_tokens=sum(LENGTHS))
    run = partial(forward_backward, model, microbatch(dtype), PRESETS["reinforce"], temperature=1.0, facts=facts)
    if checkpoints:
        with checkpointing(model):
            run()
    else:
        run()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("family", ["llama", "olmo2"])  # walked layer by layer, and by its own pass
def test_inputs_on_the_host_change_no_bit(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "LEAST_BYTES", 1024)
    model = make_model(family, torch.float32)
    enable_checkpointing(model)
    expected = gradients(model, torch.float32)
    mover = FakeMover()
    set_recompute(model, HostInputs(mover).recompute)
    found = gradients(model, torch.float32)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert sum(event.startswith("use") for event in mover.events) >= 3  # every layer's
    set_recompute(model, HostInputs(FakeMover(lambda tensor: tensor + 0.01)).recompute)
    spoiled = gradients(model, torch.float32)
    assert not all(torch.allclose(spoiled[name], expected[name]) for name in expected)


def test_feed_forward_in_chunks_changes_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama", torch.float64)
    expected = gradients(model, torch.float64, checkpoints=False)
    enable_checkpointing(model)
    kept = gradients(model, torch.float64)
    largest: list[int] = []
    plain = feed_forward._computed
    monkeypatch.setattr(feed_forward, "_computed", lambda f, x: (largest.append(len(x)), plain(f, x))[1])
    assert not largest, "rows of today's lengths are computed at once"
    monkeypatch.setattr(feed_forward, "CHUNK_TOKENS", 100)
    chunked = gradients(model, torch.float64)
    assert largest == [sum(LENGTHS)] * 3, "once a layer: what is recomputed stops before"
    for name, gradient in expected.items():
        # Norms are computed in float32 whatever the model's precision.
        torch.testing.assert_close(kept[name], gradient, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(chunked[name], gradient, rtol=1e-6, atol=1e-9)


def by_rows(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, **options: Any) -> Tensor:
    """What the kernel for rows of any lengths does, row by row."""
    assert starts.dtype == torch.int32
    parts = []
    for start, stop in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        assert stop - start <= options["longest"]
        attend = PackedAttention([stop - start], CPU)
        cut = (tensor[start:stop] for tensor in (query, key, value))
        parts.append(attend(0, *cut, scaling=options["scaling"], sliding_window=options["window"]))
    return torch.cat(parts)


@pytest.mark.parametrize("window", [None, 7])
def test_rows_go_to_the_kernel_as_they_lie(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = (torch.randn(sum(LENGTHS), heads, 8) for heads in (2, 1, 1))
    attend = PackedAttention(LENGTHS, CPU)
    expected = attend(0, query, key, value, scaling=0.3, sliding_window=window)
    assert 1.1 * sum(LENGTHS) < attend.computed_tokens(query) <= 2 * sum(LENGTHS), "the bound where rows are padded"
    # The row-wise reference calls attention of single rows, which must not come back here.
    monkeypatch.setattr(varlen, "has_kernel", lambda query: len(query) == sum(LENGTHS))
    monkeypatch.setattr(varlen, "varlen_attention", by_rows)
    found = attend(0, query, key, value, scaling=0.3, sliding_window=window)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert attend.computed_tokens(query) <= 1.1 * sum(LENGTHS)
    # A kernel that saw other rows' tokens would be seen.
    monkeypatch.setattr(
        varlen, "varlen_attention", lambda q, k, v, starts, **o: by_rows(q, k.roll(1, 0), v, starts, **o)
    )
    assert not torch.allclose(attend(0, query, key, value, scaling=0.3, sliding_window=window), expected, atol=1e-2)


def test_this_torch_has_the_kernel_as_it_is_called() -> None:
    query, key, value = (torch.empty(30, heads, 64, dtype=torch.bfloat16, device="meta") for heads in (4, 2, 2))
    starts = torch.empty(3, dtype=torch.int32, device="meta")
    for window in (None, 8):
        output = varlen.varlen_attention(query, key, value, starts, longest=20, scaling=0.1, window=window)
        assert output.shape == query.shape
    assert not varlen.has_kernel(torch.empty(3, 2, 64, dtype=torch.bfloat16)), "there is none for a CPU"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("window", [None, 100])
def test_on_a_gpu_the_kernel_is_padded_attention(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    made = [torch.randn(sum(LENGTHS), heads, 64, device=device).bfloat16() for heads in (4, 2, 2)]
    cotangent = torch.randn_like(made[0])
    results = []
    for is_padded in (False, True):
        leaves = [tensor.clone().requires_grad_() for tensor in made]
        attend = PackedAttention(LENGTHS, device, is_ordered=True)
        with monkeypatch.context() as patch:
            if is_padded:
                patch.setattr(varlen, "has_kernel", lambda query: False)
            output = attend(0, *leaves, scaling=0.125, sliding_window=window)
        results.append([output, *torch.autograd.grad(output, leaves, cotangent)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=3e-2, atol=4e-2)  # both round to bfloat16


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_inputs_on_the_host_change_no_bit() -> None:
    found = []
    for kind in (True, "offload"):
        model = make_model("llama", torch.float32).cuda()
        enable_checkpointing(model, kind)  # type: ignore[arg-type]
        found.append(gradients(model, torch.float32))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_every_row_is_in_one_segment_and_long_ones_are_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_rows, "LONG", 10)
    for lengths in ([3, 4, 12, 10, 9, 1, 30], [12], [9, 9], [30, 2]):
        segments = long_rows.cut_at_long_rows(lengths, is_ordered=False)
        assert [length for segment in segments for length in segment.lengths] == lengths
        assert all(segment.is_long == (max(segment.lengths) >= 10) for segment in segments)
        assert all(len(segment.lengths) == 1 for segment in segments if segment.is_long)
        assert all(a.is_long or b.is_long for a, b in pairwise(segments)), "short neighbours are together"
    assert not long_rows.cut_at_long_rows([long_rows.LONG_ORDERED - 1], is_ordered=True)[0].is_long


def test_kernels_are_planned_for_few_lengths_that_waste_little() -> None:
    lengths = range(long_rows.LONG, 32769)
    planned = [long_rows.planned_length(length) for length in lengths]
    assert all(length <= plan <= length * 17 / 16 for length, plan in zip(lengths, planned, strict=True))
    assert len(set(planned)) == 65
    assert all(long_rows.planned_length(plan) == plan for plan in set(planned))


@pytest.mark.parametrize("is_ordered", [False, True])
def test_long_rows_attend_as_they_would_among_others(is_ordered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [5, 41, 9, 7, 100, 64]
    made = [torch.randn(sum(lengths), heads, 8, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2)]
    cotangent = torch.randn_like(made[0])

    def run() -> list[Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in made]
        output = PackedAttention(lengths, CPU, is_ordered=is_ordered)(0, *leaves, scaling=0.3, sliding_window=None)
        return [output, *torch.autograd.grad(output, leaves, cotangent)]

    expected = run()
    for name in ("LONG", "LONG_ORDERED"):
        monkeypatch.setattr(long_rows, name, 40)
    # Single rows of the reference must not come back here.
    monkeypatch.setattr(varlen, "has_kernel", lambda query: len(query) == sum(lengths))
    monkeypatch.setattr(varlen, "varlen_attention", by_rows)
    monkeypatch.setattr(long_rows, "_has_cudnn", lambda *_: True)
    seen: list[int] = []
    plain = long_rows.attend_row
    monkeypatch.setattr(long_rows, "attend_row", lambda q, *a, **o: (seen.append(len(q)), plain(q, *a, **o))[1])
    for ours, theirs in zip(run(), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert seen == [41, 100, 64]
    if not is_ordered:  # padding on the other side is seen
        monkeypatch.setattr(long_rows, "pad", lambda x, sides: torch.nn.functional.pad(x, (*sides[:4], sides[5], 0)))
        assert not torch.allclose(run()[0], expected[0], atol=1e-2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_long_rows_are_what_they_are_among_others_and_ordered_ones_have_their_bits() -> None:
    device, lengths = torch.device("cuda"), [100, 4100, 3000, 2050, 4097]
    made = [torch.randn(sum(lengths), heads, 128, device=device).bfloat16() for heads in (6, 2, 2)]
    cotangent = torch.randn_like(made[0])

    def run(is_ordered: bool, is_long: bool = True) -> list[Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in made]
        attend = PackedAttention(lengths, device, is_ordered=is_ordered)
        attend._has_long &= is_long
        output = attend(0, *leaves, scaling=0.09, sliding_window=None)
        return [output, *torch.autograd.grad(output, leaves, cotangent)]

    expected = run(is_ordered=False, is_long=False)
    first, again = run(is_ordered=True), run(is_ordered=True)
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    for found in (first, run(is_ordered=False)):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours.float(), theirs.float(), rtol=3e-2, atol=4e-2)  # both round to bfloat16
