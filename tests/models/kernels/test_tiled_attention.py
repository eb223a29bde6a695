"""Attention kernels against float64, and to the bit against themselves under other batchings, chunkings and layouts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from temper.models.kernels import tiled_attention
from temper.models.kernels.tiled_attention import choose_splits, decode_attention, packed_attention, paged_attention
from tests.fakes.selection import mostly_heavy

BLOCK_SIZE = 16
TOLERANCE = {torch.float32: 8e-6, torch.bfloat16: 3e-2}


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Packed queries, keys and values of whole rows."""

    query: Tensor
    key: Tensor
    value: Tensor
    lengths: tuple[int, ...]

    @property
    def starts(self) -> list[int]:
        return [sum(self.lengths[:n]) for n in range(len(self.lengths) + 1)]

    @property
    def scaling(self) -> float:
        return self.query.shape[-1] ** -0.5


def make_rows(
    lengths: Sequence[int], device: torch.device, *, heads: tuple[int, int] = (6, 2), size: int = 32,
    dtype: torch.dtype = torch.float32, seed: int = 0,
) -> Rows:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn(sum(lengths), count, size, generator=generator).to(device, dtype)
        for count in (heads[0], heads[1], heads[1])
    )
    return Rows(query=query * 2, key=key, value=value, lengths=tuple(lengths))


def expected(rows: Rows, window: int | None = None) -> Tensor:
    """Plain attention in float64, row by row, with an explicit mask."""
    group = rows.query.shape[1] // rows.key.shape[1]
    outputs = []
    for first, stop in zip(rows.starts, rows.starts[1:], strict=False):
        query = rows.query[first:stop].double()
        key, value = (t[first:stop].double().repeat_interleave(group, 1) for t in (rows.key, rows.value))
        scores = torch.einsum("qhd,khd->hqk", query, key) * rows.scaling
        place = torch.arange(stop - first, device=query.device)
        behind = place[:, None] - place[None, :]
        seen = (behind >= 0) & (behind < (window or math.inf))
        outputs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -math.inf).softmax(-1), value))
    return torch.cat(outputs)


def store(rows: Rows, *, spare_columns: int = 3, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Caches and block table. Blocks are scattered; whatever no row owns is NaN, so that reading it shows."""
    device = rows.key.device
    counts = [math.ceil(length / BLOCK_SIZE) for length in rows.lengths]
    order = (torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed)) + 1).tolist()
    shape = (sum(counts) + 1, BLOCK_SIZE, *rows.key.shape[1:])
    caches = torch.full((2, *shape), math.nan, dtype=rows.key.dtype, device=device)
    table = torch.zeros(len(counts), max(counts) + spare_columns, dtype=torch.int32)
    for n, count in enumerate(counts):
        table[n, :count] = torch.tensor(order[sum(counts[:n]) : sum(counts[: n + 1])])
        place = torch.arange(rows.lengths[n])
        block, slot = table[n, place // BLOCK_SIZE].long().to(device), (place % BLOCK_SIZE).to(device)
        first, stop = rows.starts[n : n + 2]
        caches[0, block, slot], caches[1, block, slot] = rows.key[first:stop], rows.value[first:stop]
    return caches[0], caches[1], table.to(device)


def attend_chunks(
    rows: Rows, chunks: Sequence[tuple[int, int, int]], *, window: int | None = None, spare_columns: int = 3
) -> list[Tensor]:
    """One launch; each chunk is (row, first position, stop), in any order. The outputs, chunk by chunk."""
    device = rows.query.device
    keys, values, table = store(rows, spare_columns=spare_columns)
    query = torch.cat([rows.query[rows.starts[n] + first : rows.starts[n] + stop] for n, first, stop in chunks])
    sizes = [stop - first for _, first, stop in chunks]
    starts = torch.tensor([sum(sizes[:i]) for i in range(len(sizes) + 1)], dtype=torch.int32, device=device)
    positions = torch.tensor([first for _, first, _ in chunks], dtype=torch.int32, device=device)
    picked = table[[n for n, _, _ in chunks]]
    output = paged_attention(
        query, keys, values, picked, starts, positions,
        scaling=rows.scaling, sliding_window=window, longest_query=max(sizes),
    )  # fmt: skip
    return list(output.split(sizes))


def attend_whole(rows: Rows, window: int | None = None) -> Tensor:
    return torch.cat(attend_chunks(rows, [(n, 0, length) for n, length in enumerate(rows.lengths)], window=window))


def attend_packed(rows: Rows, window: int | None = None) -> Tensor:
    starts = torch.tensor(rows.starts, device=rows.query.device)
    return packed_attention(
        rows.query, rows.key, rows.value, starts,
        scaling=rows.scaling, sliding_window=window, longest=max(rows.lengths),
    )  # fmt: skip


def decode_last(rows: Rows, *, splits: int, window: int | None = None, spare_columns: int = 3) -> Tensor:
    device = rows.query.device
    keys, values, table = store(rows, spare_columns=spare_columns)
    last = torch.tensor(rows.starts[1:], device=device) - 1
    lengths = torch.tensor(rows.lengths, device=device)
    return decode_attention(
        rows.query[last], keys, values, table, lengths, scaling=rows.scaling, sliding_window=window, splits=splits
    )


def assert_close(found: Tensor, wanted: Tensor) -> None:
    assert found.shape == wanted.shape
    assert (found.double() - wanted).abs().max() < TOLERANCE[found.dtype]


SHAPES = [((2, 2), 32), ((3, 1), 64), ((7, 1), 64), ((6, 2), 80), ((4, 2), 128), ((16, 1), 32)]
"""(query heads, key heads), head size."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", mostly_heavy(SHAPES, keep=SHAPES[1:4:2]))
def test_attention_equals_float64_for_every_head_shape(
    shape: tuple[tuple[int, int], int], dtype: torch.dtype, device: torch.device
) -> None:
    heads, size = shape
    rows = make_rows((66, 1), device, heads=heads, size=size, dtype=dtype)
    wanted = expected(rows)
    assert_close(attend_whole(rows), wanted)
    assert_close(attend_packed(rows), wanted)
    last = torch.tensor(rows.starts[1:], device=device) - 1
    for splits in (1, 2):
        assert_close(decode_last(rows, splits=splits), wanted[last])


@pytest.mark.parametrize("window", mostly_heavy([None, 1, 5, 64, 100], keep=(None, 64)))
def test_rows_that_end_around_a_tile_border_are_right_with_and_without_a_window(
    window: int | None, device: torch.device
) -> None:
    rows = make_rows((63, 64, 65, 129, 1), device, heads=(2, 1))
    wanted = expected(rows, window)
    assert_close(attend_whole(rows, window), wanted)
    last = torch.tensor(rows.starts[1:], device=device) - 1
    for splits in (1, 4):
        assert_close(decode_last(rows, splits=splits, window=window), wanted[last])


def test_a_window_that_is_off_by_one_would_be_noticed(device: torch.device) -> None:
    rows = make_rows((70,), device)
    with pytest.raises(AssertionError):
        assert_close(attend_whole(rows, window=5), expected(rows, window=6))


def test_more_splits_than_tiles_leave_empty_splits_without_weight(device: torch.device) -> None:
    rows = make_rows((1, 65, 200), device)
    last = torch.tensor(rows.starts[1:], device=device) - 1
    assert_close(decode_last(rows, splits=8), expected(rows)[last])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", mostly_heavy([None, 40], keep=(40,)))
def test_bits_do_not_depend_on_chunks_neighbours_order_or_table_width(
    dtype: torch.dtype, window: int | None, device: torch.device
) -> None:
    rows = make_rows((150, 70, 3), device, heads=(3, 1), dtype=dtype)
    whole = attend_whole(rows, window)
    first, second, third = whole.split(rows.lengths)
    pieces = attend_chunks(
        rows, [(1, 0, 70), (0, 100, 150), (2, 2, 3), (0, 0, 37), (0, 37, 100), (2, 0, 2)],
        window=window, spare_columns=20,
    )  # fmt: skip
    assert torch.equal(torch.cat([pieces[3], pieces[4], pieces[1]]), first)
    assert torch.equal(pieces[0], second)
    assert torch.equal(torch.cat([pieces[5], pieces[2]]), third)
    alone = [(0, place, place + 1) for place in (0, 39, 40, 63, 64, 65, 127, 128, 149)]
    singles = attend_chunks(rows, alone, window=window)
    assert all(torch.equal(one[0], first[place]) for one, (_, place, _) in zip(singles, alone, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 20])
def test_packed_rows_get_the_bits_of_paged_rows(dtype: torch.dtype, window: int | None, device: torch.device) -> None:
    rows = make_rows((66, 1, 130), device, heads=(3, 1), size=64, dtype=dtype)
    assert torch.equal(attend_packed(rows, window), attend_whole(rows, window))


def test_another_tile_of_keys_would_change_bits(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bit tests can fail: the order in which keys are added matters."""
    rows = make_rows((70,), device, heads=(1, 1))
    whole = attend_whole(rows)
    monkeypatch.setattr(tiled_attention, "TILE_KEYS", 32)
    assert not torch.equal(attend_whole(rows), whole)


def test_visiting_tiles_that_a_query_cannot_see_changes_no_bit(device: torch.device) -> None:
    """A short window skips leading tiles for a late query alone, but not when an early one shares its tile of lines."""
    rows = make_rows((140,), device, heads=(1, 1))
    [alone] = attend_chunks(rows, [(0, 139, 140)], window=4)
    [together] = attend_chunks(rows, [(0, 0, 140)], window=4)
    assert torch.equal(alone[0], together[139])
    # Without a window the early queries meet tiles ahead of them.
    [early] = attend_chunks(rows, [(0, 0, 60)])
    [late] = attend_chunks(rows, [(0, 0, 140)])
    assert torch.equal(early, late[:60])


def test_rows_without_queries_and_padded_rows_disturb_nobody(device: torch.device) -> None:
    rows = make_rows((40, 9), device)
    plain = attend_chunks(rows, [(0, 0, 40), (1, 0, 9)])
    padded = attend_chunks(rows, [(1, 4, 4), (0, 0, 40), (0, 7, 7), (1, 0, 9), (1, 0, 0)])
    assert torch.equal(plain[0], padded[1])
    assert torch.equal(plain[1], padded[3])
    keys, values, table = store(rows)
    table = torch.cat([table, torch.zeros_like(table[:1])])
    query = rows.query[[39, 48, 0]]
    found = decode_attention(
        query, keys, values, table, torch.tensor([40, 9, 1], device=device),
        scaling=rows.scaling, sliding_window=None, splits=2,
    )  # fmt: skip
    assert torch.equal(found[:2], decode_last(rows, splits=2))


def test_decode_of_a_row_does_not_depend_on_other_rows_or_table_width(device: torch.device) -> None:
    together = decode_last(make_rows((130, 70), device), splits=2)
    rows = make_rows((130, 70), device)
    one = Rows(query=rows.query[:130], key=rows.key[:130], value=rows.value[:130], lengths=(130,))
    assert torch.equal(decode_last(one, splits=2, spare_columns=30)[0], together[0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="an interpreter has no pipeline")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("size", "window"), [(64, None), (64, 50), (128, None)])
@pytest.mark.parametrize("splits", [1, 4])
def test_bits_of_decode_do_not_depend_on_the_stages_that_many_programs_take(
    splits: int, size: int, window: int | None, dtype: torch.dtype, device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """How many there are is up to the other rows of a step."""
    rows = make_rows((1300, 517, 64, 1), device, heads=(6, 2), size=size, dtype=dtype)
    found, stages = [], set()
    for many in (1, 2**30):
        monkeypatch.setattr(tiled_attention, "MANY_PROGRAMS", many)
        stages.add(tiled_attention._decode_shape(8 * splits, size, rows.key)["num_stages"])
        found.append(decode_last(rows, splits=splits, window=window))
    assert torch.equal(*found)
    is_narrow = 2 * tiled_attention.TILE_KEYS * size * dtype.itemsize <= 2**15
    assert len(stages) == (2 if is_narrow else 1), "else nothing was compared"


def test_queries_and_keys_may_be_strided_views(device: torch.device) -> None:
    rows = make_rows((20, 5), device)
    query, key, value = (t.transpose(0, 1).contiguous().transpose(0, 1) for t in (rows.query, rows.key, rows.value))
    views = Rows(query=query, key=key, value=value, lengths=rows.lengths)
    assert torch.equal(attend_packed(views), attend_packed(rows))
    assert torch.equal(attend_whole(views), attend_whole(rows))


def test_the_gradient_is_that_of_the_recomputed_attention(device: torch.device) -> None:
    rows = make_rows((33, 7), device)
    inputs = [t.clone().requires_grad_() for t in (rows.query, rows.key, rows.value)]
    starts = torch.tensor(rows.starts, device=device)

    def recompute(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return expected(Rows(query=query, key=key, value=value, lengths=rows.lengths)).float()

    weights = torch.randn(rows.query.shape, generator=torch.Generator().manual_seed(3)).to(device)
    output = packed_attention(
        *inputs, starts, scaling=rows.scaling, sliding_window=None, longest=33, recompute=recompute
    )
    assert torch.equal(output, attend_packed(rows))
    found = torch.autograd.grad((output * weights).sum(), inputs)
    wanted = torch.autograd.grad((recompute(*inputs) * weights).sum(), inputs)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_a_gradient_without_a_way_to_compute_it_is_refused(device: torch.device) -> None:
    rows = make_rows((5,), device)
    rows.query.requires_grad_()
    with pytest.raises(AssertionError, match="recompute"):
        attend_packed(rows)
    with torch.no_grad():
        attend_packed(rows)


def test_splits_fill_the_device_and_never_cut_short_rows() -> None:
    assert choose_splits(1024, 3, 32_768, 132) == 1
    assert choose_splits(64, 3, 192, 132) == 1
    assert choose_splits(8, 2, 32_768, 132) == 32
    assert choose_splits(1, 1, 32_768, 132) == 64
    assert choose_splits(1, 8, 1_024, 132) == 4
    assert all(
        choose_splits(n, k, 4096, 132) & (choose_splits(n, k, 4096, 132) - 1) == 0 for n in (1, 5) for k in (1, 3)
    )
