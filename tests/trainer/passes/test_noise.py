"""Noise on embeddings: as large as the paper says, of the row and the step alone, and gone afterwards."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from temper.batching.pack import pack
from temper.trainer.passes.forward import score_drawn
from temper.trainer.passes.noise import noisy_embeddings, row_noise
from temper.types import Microbatch, Sample

CPU = torch.device("cpu")


def packed(rows: list[Sample]) -> Microbatch:
    (microbatch,) = pack(rows, 100_000, torch.float64)
    return microbatch


def test_noise_is_uniform_and_scaled_by_the_rows_own_length(make_rows: Callable[..., list[Sample]]) -> None:
    microbatch = packed(make_rows())
    noise = row_noise(microbatch, 512, 5.0, 1, CPU)
    for row in torch.split(noise, list(microbatch.lengths)):
        bound = 5.0 / math.sqrt(row.numel())
        assert row.abs().max() <= bound
        assert abs(float(row.std()) / (bound / math.sqrt(3)) - 1) < 0.05
        assert abs(float(row.mean())) < 0.1 * bound


def test_a_row_has_the_same_noise_whatever_is_packed_beside_it(make_rows: Callable[..., list[Sample]]) -> None:
    rows = make_rows()
    together = packed(rows)
    pieces = torch.split(row_noise(together, 8, 5.0, 1, CPU), list(together.lengths))
    ids = torch.split(together.token_ids, list(together.lengths))
    alone = {tuple(row.token_ids): row_noise(packed([row]), 8, 5.0, 1, CPU) for row in rows}
    assert all(torch.equal(piece, alone[tuple(row.tolist())]) for piece, row in zip(pieces, ids, strict=True))


def test_other_steps_and_other_rows_have_other_noise(make_rows: Callable[..., list[Sample]]) -> None:
    first = make_rows()[0]
    other = replace(first, token_ids=[first.token_ids[0] ^ 1, *first.token_ids[1:]])
    noise = row_noise(packed([first]), 8, 5.0, 1, CPU)
    assert not torch.equal(noise, row_noise(packed([first]), 8, 5.0, 2, CPU))
    assert not torch.equal(noise, row_noise(packed([other]), 8, 5.0, 1, CPU))
    assert torch.equal(noise, row_noise(packed([first]), 8, 5.0, 1, CPU))


def test_noise_moves_what_the_model_says_and_nothing_stays_behind(
    family: str, make_model: Callable[..., Any], make_rows: Callable[..., list[Sample]]
) -> None:
    model, microbatch = make_model(family), packed(make_rows())
    before = score_drawn(model, microbatch, 1.0).logprobs
    with noisy_embeddings(model, microbatch, 5.0, seed=3):
        noisy = score_drawn(model, microbatch, 1.0).logprobs
    with noisy_embeddings(model, microbatch, 5.0, seed=3):
        again = score_drawn(model, microbatch, 1.0).logprobs
    assert not torch.allclose(before, noisy)
    assert torch.equal(noisy, again)
    assert torch.equal(before, score_drawn(model, microbatch, 1.0).logprobs)
