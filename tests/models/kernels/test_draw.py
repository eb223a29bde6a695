"""Drawing kernels: the engine's uniforms to the bit, float64 log-probabilities, and rows that ignore each other."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from temper.engine.local.sampling import uniforms
from temper.models.kernels import draw
from temper.models.kernels.draw import draw_tokens, keep_drawn, log_normalizers, token_logprobs


@triton.jit
def uniform_kernel(random_key, position, output):
    row = tl.program_id(0)
    tl.store(output + row, draw._uniform(tl.load(random_key + row), tl.load(position + row)))


def make_logits(num_rows: int, num_words: int, device: torch.device, *, spread: float = 3.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(num_rows, num_words, generator=generator) * spread).to(device)


def make_keys(num_rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random keys over the whole range of 64 bits, and positions."""
    generator = np.random.default_rng(seed)
    keys = generator.integers(0, 2**64, size=num_rows, dtype=np.uint64)
    return torch.from_numpy(keys.view(np.int64)), torch.from_numpy(generator.integers(0, 2**20, size=num_rows))


def uniforms_of(keys: Tensor, positions: Tensor) -> Tensor:
    return torch.from_numpy(uniforms(keys.numpy().view(np.uint64), positions.numpy()))


def draw_rows(logits: Tensor, temperature: float | Tensor, seed: int = 0) -> tuple[Tensor, Tensor]:
    keys, positions = make_keys(len(logits), seed)
    device = logits.device
    temperatures = torch.as_tensor(temperature, dtype=torch.float32).expand(len(logits)).to(device)
    return draw_tokens(logits, temperatures, keys.to(device), positions.to(device))


def exact_logprobs(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    return (logits.double() / temperature).log_softmax(-1).gather(1, tokens[:, None])[:, 0]


def test_uniforms_have_the_bits_of_the_numpy_reference(device: torch.device) -> None:
    keys, positions = make_keys(40)
    keys[:3] = torch.tensor([0, -1, 2**63 - 1])
    positions[:2] = 0
    found = torch.empty(40, device=device)
    uniform_kernel[(40,)](keys.to(device), positions.to(device), found)
    assert torch.equal(found.cpu(), uniforms_of(keys, positions))
    assert not torch.equal(found.cpu(), uniforms_of(keys, positions + 1))


@pytest.mark.parametrize("num_words", [1, 7, 2048, 2049, 10_000])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_tokens_are_those_of_the_reference_and_logprobs_those_of_float64(
    num_words: int, temperature: float, device: torch.device
) -> None:
    logits = make_logits(8, num_words, device)
    keys, positions = make_keys(8)
    tokens, logprobs = draw_rows(logits, temperature)
    cumulative = (logits.cpu().double() / temperature).softmax(-1).cumsum(-1)
    target = uniforms_of(keys, positions).double()[:, None] * cumulative[:, -1:]
    wanted = torch.searchsorted(cumulative, target, right=True)[:, 0]
    assert tokens.dtype == torch.int64
    # A target within rounding of a border may fall on either side of it.
    assert (tokens.cpu() != wanted).sum() <= 1
    assert (logprobs.double() - exact_logprobs(logits, tokens, temperature)).abs().max() < 1e-5


def test_draws_follow_the_distribution(device: torch.device) -> None:
    """Chi-square with 5 degrees of freedom, fixed keys: 20.5 is passed once in a thousand."""
    num_draws = 200
    logits = torch.tensor([0.0, 1.0, -1.0, 0.5, 2.0, -math.inf, 0.2], device=device)
    tokens, _ = draw_rows(logits.expand(num_draws, -1), 0.8)
    counts = torch.bincount(tokens.cpu(), minlength=7).double()
    wanted = (logits.cpu().double() / 0.8).softmax(-1) * num_draws
    assert counts[5] == 0
    possible = wanted > 0
    assert ((counts - wanted)[possible] ** 2 / wanted[possible]).sum() < 20.5
    flat = torch.full((6,), num_draws / 6)
    assert ((counts[possible] - flat) ** 2 / flat).sum() > 20.5, "the test must see a wrong distribution"


def test_temperature_zero_takes_the_lowest_id_of_the_likeliest_with_its_plain_logprob(device: torch.device) -> None:
    logits = make_logits(3, 5000, device)
    logits[0, 4500] = logits[0, 3] = 40.0
    logits[1, 4999] = 41.0
    logits[2, 2047] = logits[2, 2048] = 39.0
    tokens, logprobs = draw_rows(logits, 0.0)
    assert tokens.tolist() == [3, 4999, 2047]
    assert (logprobs.double() - exact_logprobs(logits, tokens, 1.0)).abs().max() < 1e-5
    assert torch.equal(token_logprobs(logits, tokens, 0.0), logprobs)


@pytest.mark.parametrize("temperature", [1e-3, 1.0, 10.0])
@pytest.mark.parametrize("height", [1e4, -1e4])
def test_extreme_logits_and_temperatures_stay_finite(temperature: float, height: float, device: torch.device) -> None:
    logits = make_logits(6, 3000, device)
    logits[:, ::2] += height
    logits[:, 1::7] = -math.inf
    logits[:3, :2048] = -math.inf  # a whole block of impossible words
    tokens, logprobs = draw_rows(logits, temperature)
    assert torch.isfinite(logits.gather(1, tokens[:, None])).all()
    assert torch.isfinite(logprobs).all()
    assert (logprobs <= 0).all()
    # One unit in the last place of a logit of 1e4 is 1e-3; a cold temperature divides it.
    slack = 1e-5 + 2e-7 * 40 / temperature
    assert (logprobs.double() - exact_logprobs(logits, tokens, temperature)).abs().max() < slack


def test_a_word_of_probability_one_is_always_drawn(device: torch.device) -> None:
    logits = torch.full((8, 5000), -math.inf, device=device)
    places = torch.arange(8, device=device) * 663
    logits.scatter_(1, places[:, None], -3.0)
    tokens, logprobs = draw_rows(logits, 1.0)
    assert torch.equal(tokens, places)
    assert torch.equal(logprobs, torch.zeros_like(logprobs))


def test_a_broken_row_stays_in_range_and_harms_no_other(device: torch.device) -> None:
    logits = make_logits(4, 2500, device)
    clean_tokens, clean_logprobs = draw_rows(logits, 1.0)
    logits[1], logits[2] = math.nan, -math.inf
    tokens, logprobs = draw_rows(logits, 1.0)
    assert ((tokens >= 0) & (tokens < 2500)).all()
    assert logprobs[1:3].isnan().all()
    for row in (0, 3):
        assert tokens[row] == clean_tokens[row]
        assert logprobs[row] == clean_logprobs[row]


def test_a_row_does_not_depend_on_the_others_or_on_its_place(device: torch.device) -> None:
    logits = make_logits(9, 4100, device)
    keys, positions = (t.to(device) for t in make_keys(9))
    temperatures = torch.linspace(0, 1.6, 9, device=device)
    tokens, logprobs = draw_tokens(logits, temperatures, keys, positions)
    order = torch.tensor([4, 0, 8, 2], device=device)
    fewer = draw_tokens(logits[order], temperatures[order], keys[order], positions[order])
    assert torch.equal(fewer[0], tokens[order])
    assert torch.equal(fewer[1], logprobs[order])
    one = draw_tokens(logits[5:6], temperatures[5:6], keys[5:6], positions[5:6])
    assert (one[0][0], one[1][0]) == (tokens[5], logprobs[5])


@pytest.mark.parametrize("num_words", [500, 4101])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_recomputed_logprobs_have_the_bits_of_the_drawn_ones(
    num_words: int, temperature: float, device: torch.device
) -> None:
    logits = make_logits(6, num_words, device)
    tokens, logprobs = draw_rows(logits, temperature)
    assert torch.equal(token_logprobs(logits, tokens, temperature), logprobs)
    # Another alignment, another stride, another number of rows.
    padded = torch.zeros(6, num_words + 5, device=device)
    padded[:, 3 : num_words + 3] = logits
    view = padded[:, 3 : num_words + 3]
    assert torch.equal(token_logprobs(view[3:], tokens[3:], temperature), logprobs[3:])
    assert not torch.equal(token_logprobs(logits, tokens, temperature + 1e-3), logprobs)


def test_normalizers_rebuild_every_logprob(device: torch.device) -> None:
    logits = make_logits(5, 3000, device)
    maximum, logsum = log_normalizers(logits, 0.7)
    assert torch.equal(maximum, logits.amax(-1))
    rebuilt = (logits - maximum[:, None]) / 0.7 - logsum[:, None]
    assert (rebuilt.double() - (logits.double() / 0.7).log_softmax(-1)).abs().max() < 1e-5


def test_no_rows_are_drawn_from_no_rows(device: torch.device) -> None:
    tokens, logprobs = draw_rows(make_logits(0, 100, device), 1.0)
    assert tokens.shape == logprobs.shape == (0,)


def test_what_was_drawn_is_kept_line_by_line_and_is_what_the_next_step_begins_with(device: torch.device) -> None:
    """1,030 rows, more than a block, in tables with room for more; the third step begins the two lines anew."""
    rows, room = 1030, 1100
    integers = torch.zeros((2, room), dtype=torch.int64, device=device)
    tokens, positions = integers[0], integers[1]
    positions[:rows] = torch.arange(rows, device=device)
    drawn_table = torch.full((2, room), -1, dtype=torch.int64, device=device)
    logprobs_table = torch.full((2, room), torch.nan, device=device)
    step = torch.zeros(1, dtype=torch.int64, device=device)
    told = [(torch.arange(rows, device=device) + 10 * i, -torch.rand(rows, device=device)) for i in range(3)]
    for drawn, logprobs in told:
        keep_drawn(drawn, logprobs, drawn_table, logprobs_table, tokens[:rows], positions[:rows], step)
    for line, (drawn, logprobs) in ((1, told[1]), (0, told[2])):
        assert torch.equal(drawn_table[line, :rows], drawn)
        assert torch.equal(logprobs_table[line, :rows], logprobs)
        assert (drawn_table[line, rows:] == -1).all()
    assert torch.equal(tokens[:rows], told[2][0])
    assert torch.equal(positions[:rows], torch.arange(rows, device=device) + 3)
    assert not integers[:, rows:].any()
    assert step.item() == 3
