"""Chunked log-probabilities and entropy equal log_softmax, in value and gradient, and never hold all logits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from temper.errors import UserError
from temper.models.states import Head
from temper.trainer.passes import logprobs as logprobs_module
from temper.trainer.passes.logprobs import KeepSets, chunk_bytes_of, drawn_logprobs, top_tokens

NUM_TOKENS, WIDTH, VOCABULARY = 23, 6, 31


def make_inputs(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in ((NUM_TOKENS, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,))
    )
    return hidden, weight, bias, torch.randint(VOCABULARY, (NUM_TOKENS,), generator=generator)


def make_top_ids(drawn: torch.Tensor) -> torch.Tensor:
    """Four distinct ids per row; in every other row the drawn token is among them."""
    offsets = torch.tensor([[0, 3, 7, 20], [1, 3, 7, 20]])[torch.arange(len(drawn)) % 2]
    return (drawn[:, None] + offsets) % VOCABULARY


def plain(head: Head, hidden: torch.Tensor, ids: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs = torch.log_softmax(head.logits(hidden) / temperature, -1)
    return logprobs.gather(1, ids[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


def plain_top(head: Head, hidden: torch.Tensor, top_ids: torch.Tensor, temperature: float) -> torch.Tensor:
    return torch.log_softmax(head.logits(hidden) / temperature, -1).gather(1, top_ids)


@pytest.mark.parametrize("chunk_rows", [1, 5, 23, 100])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("terms", [(1, 0), (0, 1), (1, 1)])
def test_equals_log_softmax_in_value_and_gradient(
    chunk_rows: int, softcap: float | None, temperature: float, terms: tuple[int, int]
) -> None:
    results = []
    for is_plain in (True, False):
        hidden, weight, bias, ids = make_inputs()
        head = Head(weight, bias, softcap)
        if is_plain:
            logprobs, entropy = plain(head, hidden, ids, temperature)
        else:
            chunk_bytes = chunk_rows * VOCABULARY * 8
            logprobs, entropy, top, _ = drawn_logprobs(
                head, hidden, ids, temperature=temperature, chunk_bytes=chunk_bytes
            )
            assert top is None
        scale = torch.linspace(-1, 2, NUM_TOKENS, dtype=torch.float64)
        loss = sum(
            wanted * (scale * part).sum() for wanted, part in zip(terms, (logprobs, entropy), strict=True) if wanted
        )
        results.append((logprobs, entropy, *torch.autograd.grad(loss, (hidden, weight, bias))))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def top_gradients(
    softcap: float | None, temperature: float, terms: tuple[int, int, int], chunk_rows: int | None
) -> list[torch.Tensor]:
    """Values, then gradients by hidden, weight and bias, of a loss of all three. Without chunk_rows: by autograd."""
    hidden, weight, bias, ids = make_inputs()
    top_ids, head = make_top_ids(ids), Head(weight, bias, softcap)
    parts: tuple[torch.Tensor | None, ...]
    if chunk_rows is None:
        parts = (*plain(head, hidden, ids, temperature), plain_top(head, hidden, top_ids, temperature))
    else:
        size = chunk_rows * VOCABULARY * 8
        parts = drawn_logprobs(head, hidden, ids, temperature=temperature, chunk_bytes=size, top_ids_AK=top_ids)[:3]
    scale = torch.linspace(-1, 2, NUM_TOKENS, dtype=torch.float64)
    loss = torch.zeros((), dtype=torch.float64)
    for wanted, part in zip(terms, parts, strict=True):
        assert part is not None
        if wanted:
            columns = part if part.dim() == 2 else part[:, None]
            slopes = torch.arange(1, columns.shape[1] + 1, dtype=torch.float64)
            loss = loss + wanted * (scale[:, None] * slopes * columns).sum()
    return [*(p for p in parts if p is not None), *torch.autograd.grad(loss, (hidden, weight, bias))]


@pytest.mark.parametrize("chunk_rows", [1, 5, 100])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("terms", [(0, 0, 1), (1, 0, 1), (0, 1, 1), (1, 1, 1)])
def test_top_tokens_equal_log_softmax_in_value_and_gradient(
    chunk_rows: int, softcap: float | None, temperature: float, terms: tuple[int, int, int]
) -> None:
    expected = top_gradients(softcap, temperature, terms, None)
    for ours, theirs in zip(top_gradients(softcap, temperature, terms, chunk_rows), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_the_gradient_of_top_tokens_passes_a_numerical_check_and_a_planted_fault_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hidden, weight, bias, ids = make_inputs()
    top_ids = make_top_ids(ids)

    def score(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
        head, size = Head(weight, bias, 3.0), 5 * VOCABULARY * 8
        logprobs, entropy, top, _ = drawn_logprobs(
            head, hidden, ids, temperature=0.7, chunk_bytes=size, top_ids_AK=top_ids
        )
        assert top is not None
        return logprobs, entropy, top

    inputs = (hidden, weight, bias)
    assert torch.autograd.gradcheck(score, inputs, fast_mode=True)
    right = logprobs_module._grad_logits

    def with_the_softmax_of_the_first_only(logits: Any, chosen: Any, *rest: Any) -> torch.Tensor:
        grad = right(logits, [(ids[:, :1], grads[:, :1]) for ids, grads in chosen], *rest)
        for ids_CK, grad_CK in chosen:
            grad.scatter_add_(1, ids_CK[:, 1:], grad_CK[:, 1:])
        return grad

    monkeypatch.setattr(logprobs_module, "_grad_logits", with_the_softmax_of_the_first_only)
    assert not torch.autograd.gradcheck(score, inputs, fast_mode=True, raise_exception=False)


def make_keep(drawn: torch.Tensor) -> KeepSets:
    """One to nine tokens per row, in no order, the drawn one among them."""
    generator = torch.Generator().manual_seed(1)
    sets = []
    for place, token in enumerate(drawn.tolist()):
        others = [other for other in torch.randperm(VOCABULARY, generator=generator).tolist() if other != token]
        sets.append([*others[: place % 5], token, *others[5 : 5 + place % 4]])
    counts = torch.tensor([len(one) for one in sets], dtype=torch.int64)
    ids = torch.tensor([token for one in sets for token in one], dtype=torch.int64)
    return KeepSets.of(ids, counts, torch.device("cpu"))


def plain_kept(
    head: Head, hidden: torch.Tensor, ids: torch.Tensor, keep: KeepSets, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """By autograd: log-probabilities over the kept tokens only, row by row; entropy and both over all tokens."""
    logits = head.logits(hidden) / temperature
    logprobs = []
    for row, token in enumerate(ids.tolist()):
        kept = keep.ids[keep.starts[row] : keep.starts[row + 1]]
        within = logits[row, kept].log_softmax(-1)
        logprobs.append(within[(kept == token).nonzero()[0, 0]])
    whole = logits.log_softmax(-1)
    return torch.stack(logprobs), -(whole.exp() * whole).sum(-1), whole[torch.arange(len(ids)), ids]


def kept_gradients(chunk_rows: int | None, softcap: float | None, terms: tuple[int, ...]) -> list[torch.Tensor]:
    """Values, then gradients by hidden, weight and bias. Without chunk_rows: by autograd."""
    hidden, weight, bias, ids = make_inputs()
    top_ids, keep, head = make_top_ids(ids), make_keep(ids), Head(weight, bias, softcap)
    parts: tuple[torch.Tensor | None, ...]
    if chunk_rows is None:
        logprobs, entropy, whole = plain_kept(head, hidden, ids, keep, 0.7)
        parts = (logprobs, entropy, plain_top(head, hidden, top_ids, 0.7), whole)
    else:
        size = chunk_rows * VOCABULARY * 8
        parts = drawn_logprobs(head, hidden, ids, temperature=0.7, chunk_bytes=size, top_ids_AK=top_ids, keep=keep)
    scale = torch.linspace(-1, 2, NUM_TOKENS, dtype=torch.float64)
    sums = [(scale * part.reshape(NUM_TOKENS, -1).sum(-1)).sum() for part in parts if part is not None]
    loss = sum(wanted * part for wanted, part in zip(terms, sums, strict=True) if wanted)
    return [*(p for p in parts if p is not None), *torch.autograd.grad(loss, (hidden, weight, bias))]


@pytest.mark.parametrize("chunk_rows", [1, 5, 100])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize(
    "terms", [(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (1, 1, 0, 0), (1, 0, 1, 1), (1, 1, 1, 1)]
)
def test_within_keep_sets_only_the_drawn_log_probability_is_that_of_the_kept_tokens(
    chunk_rows: int, softcap: float | None, terms: tuple[int, ...]
) -> None:
    """In value and gradient; entropy, top tokens and the drawn one as a reference sees it are over the vocabulary."""
    expected = kept_gradients(None, softcap, terms)
    for ours, theirs in zip(kept_gradients(chunk_rows, softcap, terms), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.heavy
def test_the_gradient_within_keep_sets_passes_a_numerical_check_and_that_of_the_whole_vocabulary_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hidden, weight, bias, ids = make_inputs()
    top_ids, keep = make_top_ids(ids), make_keep(ids)

    def score(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
        head, size = Head(weight, bias, 3.0), 5 * VOCABULARY * 8
        results = drawn_logprobs(head, hidden, ids, temperature=0.7, chunk_bytes=size, top_ids_AK=top_ids, keep=keep)
        return tuple(result for result in results if result is not None)

    assert torch.autograd.gradcheck(score, (hidden, weight, bias), fast_mode=True)
    right = logprobs_module._grad_kept

    def ignoring_what_was_dropped(logits: Any, drawn: Any, dropped: Any) -> torch.Tensor:
        return right(logits, drawn, torch.zeros_like(dropped))

    monkeypatch.setattr(logprobs_module, "_grad_kept", ignoring_what_was_dropped)
    assert not torch.autograd.gradcheck(score, (hidden, weight, bias), fast_mode=True, raise_exception=False)


def test_a_policy_that_left_the_keep_sets_far_behind_still_gets_finite_gradients() -> None:
    # Token 0, by a thousand the likeliest now, could not be drawn.
    weight = torch.tensor([[1000.0], [1.0], [0.0], [-1000.0]], requires_grad=True)
    hidden, ids = torch.ones(2, 1, requires_grad=True), torch.tensor([1, 3])
    keep = KeepSets.of(torch.tensor([1, 2, 3]), torch.tensor([2, 1]), torch.device("cpu"))
    logprobs, entropy, _, whole = drawn_logprobs(Head(weight, None, None), hidden, ids, temperature=1.0, keep=keep)
    torch.testing.assert_close(logprobs, torch.tensor([-0.313262, 0.0]), atol=1e-6, rtol=0)
    torch.testing.assert_close(entropy, torch.tensor([0.0, 0.0]), atol=1e-6, rtol=0)
    torch.testing.assert_close(whole, torch.tensor([-999.0, -2000.0]), atol=1e-3, rtol=0)
    (by_kept,) = torch.autograd.grad(logprobs.sum(), weight, retain_graph=True)
    assert by_kept[0].item() == 0.0
    (logprobs.sum() + entropy.sum() + whole.sum()).backward()
    assert weight.grad is not None
    assert hidden.grad is not None
    assert torch.isfinite(weight.grad).all()
    assert torch.isfinite(hidden.grad).all()


def test_keep_sets_of_everything_change_nothing() -> None:
    hidden, weight, bias, ids = make_inputs(torch.float32)
    head, everything = Head(weight, bias, None), torch.arange(VOCABULARY).repeat(NUM_TOKENS)
    keep = KeepSets.of(everything, torch.full((NUM_TOKENS,), VOCABULARY), torch.device("cpu"))
    kept, plain_ = (drawn_logprobs(head, hidden, ids, temperature=0.7, keep=k)[:2] for k in (keep, None))
    assert torch.equal(kept[0], plain_[0])
    assert torch.equal(kept[1], plain_[1])


def test_float32_log_probabilities_do_not_depend_on_chunks() -> None:
    """To the bit, given equal logits: of one row at a time and of all together."""
    generator = torch.Generator().manual_seed(0)
    # States that pick one row of the head each: products with one and zero are exact, so logits are equal.
    hidden, weight = torch.eye(40), torch.randn(1003, 40, generator=generator) * 3
    ids, head = torch.randint(1003, (40,), generator=generator), Head(weight, None, None)
    results = [
        drawn_logprobs(head, hidden, ids, temperature=0.7, chunk_bytes=rows * 1003 * 4)[:2] for rows in (1, 7, 40)
    ]
    for logprobs, entropy in results[1:]:
        assert torch.equal(logprobs, results[0][0])
        assert torch.equal(entropy, results[0][1])


@pytest.mark.parametrize("chunk_rows", [1, 5, 100])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_the_most_likely_tokens_come_first_with_the_log_probabilities_that_scoring_gives(
    chunk_rows: int, softcap: float | None
) -> None:
    hidden, weight, bias, ids = make_inputs()
    head, size = Head(weight, bias, softcap), chunk_rows * VOCABULARY * 8
    top_ids, top = top_tokens(head, hidden, 5, temperature=0.7, chunk_bytes=size)
    expected, expected_ids = torch.log_softmax(head.logits(hidden) / 0.7, -1).sort(descending=True)
    torch.testing.assert_close(top, expected[:, :5], rtol=1e-10, atol=1e-10)
    assert torch.equal(top_ids, expected_ids[:, :5])
    assert not top.requires_grad
    scored = drawn_logprobs(head, hidden, ids, temperature=0.7, chunk_bytes=size, top_ids_AK=top_ids)[2]
    assert scored is not None
    assert torch.equal(scored, top), "to the bit: the ratio to an unchanged policy is one"


@pytest.mark.parametrize("k", [0, VOCABULARY + 1])
def test_a_number_of_top_tokens_that_the_vocabulary_does_not_have_is_refused(k: int) -> None:
    hidden, weight, bias, _ = make_inputs()
    with pytest.raises(UserError, match=f"the vocabulary has {VOCABULARY}"):
        top_tokens(Head(weight, bias, None), hidden, k, temperature=1.0)


def test_temperature_divides_inside_the_softmax() -> None:
    # Logits (2, 1, 0) at temperature 0.7.
    head = Head(torch.tensor([[2.0], [1.0], [0.0]]), None, None)
    logprobs, *_ = drawn_logprobs(head, torch.ones(3, 1), torch.arange(3), temperature=0.7)
    torch.testing.assert_close(logprobs, torch.tensor([-0.260118, -1.688690, -3.117261]), atol=1e-6, rtol=0)


def test_entropy_of_equal_logits_is_the_log_of_their_number() -> None:
    _, entropy, *_ = drawn_logprobs(
        Head(torch.zeros(8, 2), None, None), torch.ones(1, 2), torch.tensor([3]), temperature=1.0
    )
    assert entropy.item() == pytest.approx(math.log(8))


def test_bfloat16_states_are_scored_in_float32_and_get_bfloat16_gradients() -> None:
    hidden, weight, _, ids = make_inputs(torch.bfloat16)
    head = Head(weight.float(), None, None)
    logprobs, *_ = drawn_logprobs(head, hidden, ids, temperature=1.0)
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, plain(head, hidden, ids, 1.0)[0], rtol=1e-6, atol=1e-6)
    logprobs.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16


@pytest.mark.skipif(not torch.cuda.is_available(), reason="TF32 exists on CUDA devices only")
def test_tf32_is_as_exact_as_float32_for_bfloat16_states_and_off_for_float32_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 576, generator=generator).bfloat16() for n in (64, 5000))
    ids = torch.randint(5000, (64,), generator=generator)
    exact = plain(Head(weight.double(), None, None), hidden.double(), ids, 1.0)[0]
    for noise in (0.0, 2**-12):  # with it, states have more bits than TF32 holds
        states = (hidden.float() * (1 + noise)).to(torch.float32 if noise else torch.bfloat16).cuda()
        found = drawn_logprobs(Head(weight.float().cuda(), None, None), states, ids.cuda(), temperature=1.0)[0]
        if noise:
            exact = plain(Head(weight.double(), None, None), states.cpu().double(), ids, 1.0)[0]
        # Logits reach 100 here. Float32 itself is off by 8e-5; factors cut to TF32 would be by more than 1e-3.
        torch.testing.assert_close(found.cpu().double(), exact, rtol=0, atol=5e-4)


def test_no_drawn_tokens_give_empty_results_and_a_zero_gradient() -> None:
    hidden, weight, _, ids = make_inputs()
    logprobs, entropy, top, _ = drawn_logprobs(
        Head(weight, None, None), hidden[:0], ids[:0], temperature=1.0, top_ids_AK=make_top_ids(ids)[:0]
    )
    assert top is not None
    (logprobs.sum() + entropy.sum() + top.sum()).backward()
    assert weight.grad is not None
    assert not weight.grad.any()


class LargestTensor(TorchDispatchMode):
    """Records the largest tensor any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result


def test_logits_of_all_tokens_are_never_held() -> None:
    num_tokens, width, vocabulary, chunk_rows = 256, 4, 1000, 16
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, width, generator=generator, requires_grad=True)
    weight = torch.randn(vocabulary, width, generator=generator, requires_grad=True)
    ids = torch.randint(vocabulary, (num_tokens,), generator=generator)
    head = Head(weight, None, None)
    with LargestTensor() as chunked:
        size = chunk_rows * vocabulary * 4
        top_ids, _ = top_tokens(head, hidden, 3, temperature=0.9, chunk_bytes=size)
        for keep in (None, KeepSets.of(ids, torch.ones_like(ids), ids.device)):
            logprobs, entropy, top, _ = drawn_logprobs(
                head, hidden, ids, temperature=0.9, chunk_bytes=size, top_ids_AK=top_ids, keep=keep
            )
            assert top is not None
            (logprobs.sum() + entropy.sum() + top.sum()).backward()
    assert chunked.numel <= chunk_rows * vocabulary
    with LargestTensor() as whole:  # the measure itself sees what it should
        plain(head, hidden, ids, 0.9)[0].sum().backward()
    assert whole.numel == num_tokens * vocabulary


def test_a_gpu_holds_a_sixteenth_of_its_logits_within_bounds() -> None:
    """4,096, 16,384 and 65,536 tokens of a vocabulary of 151,936: where every chunk costs a pass over the head's
    gradient, few are better, and a small microbatch has no room for large ones."""
    sizes = [tokens * 151936 * 4 for tokens in (100, 4096, 16384, 65536)]
    assert [chunk_bytes_of(size, "cuda") for size in sizes] == [2**28, 2**28, sizes[2] // 16, 2**30]
    assert {chunk_bytes_of(size, "cpu") for size in sizes} == {2**25}
