"""Draws follow the distribution they report, for every combination of sampling parameters."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from temper.engine.local import sampling
from temper.engine.local.sampling import Draws, Table, draw, most_likely, uniforms
from temper.models.softmax import Softmax

GRID = list(itertools.product((0.0, 0.6, 1.0, 1.7), (0, 1, 5), (1.0, 0.8, 0.3), (0.0, 0.1)))
"""Temperature, top_k, top_p, min_p."""


def draws_of(
    count: int, temperature: Any = 1.0, top_k: Any = 0, top_p: Any = 1.0, min_p: Any = 0.0, **more: Any
) -> Draws:
    """Parameters may be numbers for all rows or one for each; row i has key i."""
    return Draws(
        temperature_R=np.broadcast_to(np.float32(temperature), count).copy(),
        random_key_R=np.arange(count, dtype=np.uint64),
        position_R=np.full(count, 7),
        top_k_R=np.broadcast_to(np.int64(top_k), count).copy(),
        top_p_R=np.broadcast_to(np.float32(top_p), count).copy(),
        min_p_R=np.broadcast_to(np.float32(min_p), count).copy(),
        **more,
    )


def draw_at(monkeypatch: pytest.MonkeyPatch, logits: torch.Tensor, uniform: list[float], **params: Any) -> Table:
    monkeypatch.setattr(sampling, "uniforms", lambda *_: np.asarray(uniform, dtype=np.float32))
    return draw(logits.expand(len(uniform), -1), draws_of(len(uniform), **params))


def declared(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> list[float]:
    """The distribution by its definition, one token after the other, in float64: independent of the code."""
    probabilities = (logits.double() / (temperature or 1.0)).softmax(-1).tolist()
    by_rank = sorted(range(len(probabilities)), key=lambda token: (-probabilities[token], token))
    kept, mass = [], 0.0
    for rank, token in enumerate(by_rank):
        is_likely = probabilities[token] >= np.float32(min_p) * probabilities[by_rank[0]]
        if (top_k == 0 or rank < top_k) and mass < np.float32(top_p) and is_likely:
            kept.append(token)
        mass += probabilities[token]
    total = sum(probabilities[token] for token in kept)
    return [p / total if token in kept else 0.0 for token, p in enumerate(probabilities)]


def random_logits(rows: int, vocabulary: int, scale: float = 3.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * scale


def test_logprobs_are_after_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    # Logits (2, 1, 0) at temperature 0.7.
    table = draw_at(monkeypatch, torch.tensor([[2.0, 1.0, 0.0]]), [0.1, 0.85, 0.99], temperature=0.7)
    assert table.tokens_RS.tolist() == [[0], [1], [2]]
    torch.testing.assert_close(table.logprobs_RS[:, 0], torch.tensor([-0.260118, -1.688690, -3.117261]))
    assert table.kept_RV is None
    assert table.entropy_R is None
    assert table.top_ids_RK is None


def test_temperature_zero_takes_the_largest_and_reports_temperature_one() -> None:
    table = draw(torch.tensor([[0.0, 2.0, 1.0], [1.0, 3.0, 3.0]]), draws_of(2, temperature=[0.0, 0.0]))
    assert table.tokens_RS.tolist() == [[1], [1]]
    torch.testing.assert_close(table.logprobs_RS[0], torch.tensor([-0.407606]))


@pytest.mark.parametrize("vocabulary", [5, 400])
def test_a_token_without_probability_is_never_drawn(monkeypatch: pytest.MonkeyPatch, vocabulary: int) -> None:
    """Also not where a whole block, or the beginning or the end of one, has none."""
    logits = torch.full((1, vocabulary), -torch.inf)
    allowed = {1, 3} if vocabulary == 5 else {2, 3, 130, 254, 385}
    logits[0, list(allowed)] = 0.0
    table = draw_at(monkeypatch, logits, np.linspace(0, 1 - 2.0**-24, 1001).tolist())
    assert set(table.tokens_RS[:, 0].tolist()) == allowed
    assert torch.isfinite(table.logprobs_RS).all()


def test_a_target_beyond_everything_takes_the_last_token_that_can_be_drawn() -> None:
    weights = torch.tensor([[0.5, 0.0, 0.25, 0.0, 0.0]], dtype=torch.float64)
    for target, place in ((0.0, 0), (0.4999, 0), (0.5, 2), (0.75, 2), (1.5, 2)):
        found, _ = sampling._crossing(weights, torch.tensor([[target]], dtype=torch.float64))
        assert found.item() == place


@pytest.mark.parametrize("vocabulary", [7, 128, 1000])
def test_the_drawn_token_is_that_of_the_plain_inverse_cdf(vocabulary: int) -> None:
    count = 3000
    logits = random_logits(1, vocabulary).expand(count, -1)
    cumulative = logits[0].double().softmax(-1).cumsum(-1)
    target = torch.from_numpy(uniforms(np.arange(count, dtype=np.uint64), np.full(count, 7))).double()
    expected = torch.searchsorted(cumulative, target, right=True)
    is_clear = (cumulative[:, None] - target).abs().amin(0) > 1e-6  # elsewhere rounding decides
    tokens = draw(logits, draws_of(count)).tokens_RS[:, 0]
    assert torch.equal(tokens[is_clear], expected[is_clear])
    assert is_clear.float().mean() > 0.98


@pytest.mark.parametrize("params", GRID, ids=str)
def test_draws_follow_the_declared_distribution(params: tuple[float, int, float, float]) -> None:
    count = 20_000
    # Two equal logits at the places where top_k=5 and others cut.
    logits = torch.tensor([[1.0, 0.6, 0.2, -1.0, 0.6, -3.0, 0.1, 0.1, 0.1, -0.5]])
    table = draw(logits.expand(count, -1), draws_of(count, *params))
    expected = torch.tensor(declared(logits[0], *params), dtype=torch.float64)
    if params[0] == 0:  # greedy: the log-probabilities are of temperature 1
        assert table.tokens_RS.unique().tolist() == [0]
        assert table.logprobs_RS[0].item() == pytest.approx(expected[0].log().item(), abs=1e-6)
        return
    frequency = torch.bincount(table.tokens_RS[:, 0], minlength=10).double() / count
    assert (frequency[expected == 0] == 0).all()
    degrees = max(1, int((expected > 0).sum()) - 1)
    chi_square = count * ((frequency - expected) ** 2 / expected)[expected > 0].sum()
    # Mean `degrees`, variance twice that; six standard deviations. Another temperature or kept mass is far outside.
    assert chi_square < degrees + 6 * (2 * degrees) ** 0.5
    torch.testing.assert_close(
        table.logprobs_RS[:, 0].double(), expected.log()[table.tokens_RS[:, 0]], atol=1e-5, rtol=0
    )


def test_a_draw_that_forgot_to_renormalise_or_took_another_cut_is_not_the_declared_distribution() -> None:
    """What the test above must be able to see."""
    logits = torch.tensor([1.0, 0.6, 0.2, -1.0, 0.6, -3.0, 0.1, 0.1, 0.1, -0.5])
    right = torch.tensor(declared(logits, 1.0, 5, 0.8, 0.0))
    for wrong in ((1.0, 0, 1.0, 0.0), (1.0, 4, 0.8, 0.0), (1.0, 5, 0.6, 0.0), (0.8, 5, 0.8, 0.0)):
        other = torch.tensor(declared(logits, *wrong))
        assert 20_000 * ((other - right) ** 2 / right.clamp(min=1e-9)).sum() > 100, wrong


@pytest.mark.parametrize("params", [p for p in GRID if p[1:] != (0, 1.0, 0.0)], ids=str)
@pytest.mark.parametrize("is_tied", [False, True])
def test_the_keep_set_is_the_declared_one(params: tuple[float, int, float, float], is_tied: bool) -> None:
    logits = random_logits(20, 300, 2.0)
    if is_tied:  # few distinct values, so that ties reach over every cut
        logits = (logits / 2).round()
    table = draw(logits, draws_of(20, *params, entropy=True, num_top=3))
    assert table.kept_RV is not None
    assert table.entropy_R is not None
    for row, kept, token, logprob, entropy in zip(
        logits, table.kept_RV, table.tokens_RS, table.logprobs_RS, table.entropy_R, strict=True
    ):
        expected = torch.tensor(declared(row, *params), dtype=torch.float64)
        assert torch.equal(kept, expected > 0)
        assert kept[token]
        assert logprob.item() == pytest.approx(expected.log()[token].item(), abs=1e-5)
        assert entropy.item() == pytest.approx(-torch.special.xlogy(expected, expected).sum().item(), abs=1e-5)
    # The most likely tokens are named before truncation.
    whole = (logits / (params[0] or 1.0)).log_softmax(-1)
    assert table.top_ids_RK is not None
    assert torch.equal(table.top_ids_RK, whole.sort(dim=-1, descending=True, stable=True).indices[:, :3])
    torch.testing.assert_close(table.top_logprobs_RK, whole.gather(1, table.top_ids_RK))


def test_keep_sets_larger_than_the_first_try_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits(6, 3000, 0.5)
    params = draws_of(6, top_k=[0, 0, 200, 0, 2000, 10**9], top_p=[0.9, 0.01, 0.95, 0.999, 1.0, 0.5])
    kept = draw(logits, params).kept_RV
    assert kept is not None
    assert kept.sum(-1).max() > 1500
    monkeypatch.setattr(sampling._first_tokens, "__defaults__", (3000,))
    assert torch.equal(kept, draw(logits, params).kept_RV)


@pytest.mark.parametrize("vocabulary", [97, 1003, 5003])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_does_not_depend_on_the_others_nor_on_their_number(threads: int, vocabulary: int) -> None:
    """To the bit, with every kind of row side by side, a vocabulary that ends inside a block, and ties."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        grid = np.asarray(GRID)
        logits = random_logits(len(GRID), vocabulary)
        logits[::7] = logits[::7].round()
        together = draw(logits, draws_of(len(GRID), *grid.T, num_top=4, entropy=True))
        assert together.kept_RV is not None
        for start, stop in [(0, 1), (1, 2), (5, 8), (30, 31), (41, 72), (71, 72), (3, 70)]:
            here = draws_of(len(GRID), *grid.T)
            part = Draws(
                **{name: getattr(here, name)[start:stop] for name in Draws.__slots__ if name.endswith("_R")},
                num_top=4,
                entropy=True,
            )
            alone = draw(logits[start:stop].clone(), part)
            for name in ("tokens_RS", "logprobs_RS", "entropy_R", "top_ids_RK", "top_logprobs_RK"):
                assert torch.equal(getattr(alone, name), getattr(together, name)[start:stop]), name
            if alone.kept_RV is None:
                assert not together.kept_RV[start:stop].any()
            else:
                assert torch.equal(alone.kept_RV, together.kept_RV[start:stop])
    finally:
        torch.set_num_threads(before)


def test_leaving_tokens_out_before_or_after_the_softmax_gives_the_same_bits() -> None:
    logits = random_logits(8, 1000)
    kept = logits >= logits.topk(37).values[:, -1:]
    after, first = Softmax.of(logits).within(kept), Softmax.of(logits, ~kept)
    assert torch.equal(after.logprobs(logits)[kept], first.logprobs(logits)[kept])
    assert torch.equal(after.entropy(logits), first.entropy(logits))
    plain = logits.double().masked_fill(~kept, -torch.inf).log_softmax(-1)
    torch.testing.assert_close(first.logprobs(logits)[kept].double(), plain[kept], atol=3e-6, rtol=0)


def test_uniforms_depend_on_key_and_position_only_and_stay_below_one() -> None:
    keys = np.arange(1000, dtype=np.uint64)
    positions = np.arange(1000)
    values = uniforms(keys, positions)
    assert (values == np.concatenate([uniforms(keys[i : i + 1], positions[i : i + 1]) for i in range(1000)])).all()
    assert values.min() >= 0.0
    assert values.max() < 1.0
    assert len(np.unique(values)) > 990


def test_the_most_likely_come_first_and_of_equal_ones_the_lower_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 1.0, 3.0, 2.0, 1.0], [0.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
    table = draw(logits, draws_of(2, temperature=[0.5, 0.0], num_top=4))
    assert table.top_ids_RK is not None
    assert table.top_ids_RK.tolist() == [[1, 3, 4, 0], [0, 1, 2, 3]]
    expected = torch.stack((logits[0] / 0.5, logits[1])).log_softmax(-1).gather(1, table.top_ids_RK)
    torch.testing.assert_close(table.top_logprobs_RK, expected)


def test_certain_and_impossible_tokens_are_ordered_too() -> None:
    scores = torch.tensor([[-torch.inf, -0.0, -torch.inf, 0.0, -1e-40, -3.0]])
    ids, values = most_likely(scores, 6)
    assert ids.tolist() == [[1, 3, 4, 5, 0, 2]]
    assert values.tolist()[0][:2] == [0.0, 0.0]


def test_the_order_of_many_is_that_of_a_stable_sort() -> None:
    generator = torch.Generator().manual_seed(0)
    # Few distinct values, so that ties reach over every cut; topk alone fails here.
    tied = -torch.randint(0, 9, (40, 500), generator=generator) / 7.0
    for scores in (tied, random_logits(40, 500)):
        order = scores.sort(dim=-1, descending=True, stable=True).indices
        for count in (1, 17, 100, 500):
            ids, values = most_likely(scores, count)
            assert torch.equal(ids, order[:, :count])
            assert torch.equal(values, scores.gather(1, ids))
    assert not torch.equal(tied.topk(17).indices, tied.sort(dim=-1, descending=True, stable=True).indices[:, :17])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_draws_without_waiting_and_from_the_same_distribution() -> None:
    grid = np.asarray(GRID)
    logits, params = random_logits(len(GRID), 5003), draws_of(len(GRID), *grid.T, num_top=4, entropy=True)
    on_device, expected = logits.cuda(), draw(logits, params)
    draw(on_device, params)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = draw(on_device, params)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found.kept_RV is not None
    assert torch.equal(found.kept_RV.cpu(), expected.kept_RV)
    torch.testing.assert_close(found.entropy_R, expected.entropy_R, check_device=False, atol=1e-5, rtol=0)
    is_same = found.tokens_RS.cpu() == expected.tokens_RS
    assert is_same.float().mean() > 0.95  # elsewhere rounding put the target beyond the next token
    torch.testing.assert_close(found.logprobs_RS.cpu()[is_same], expected.logprobs_RS[is_same], atol=1e-5, rtol=0)
