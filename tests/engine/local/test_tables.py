"""A look of the host sends the blocks that are new, and the lines on the device are those of a table sent whole."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from temper.engine.local.blocks import SCRATCH_BLOCK
from temper.engine.local.rows import Rows
from temper.engine.local.sequence import Sequence
from temper.engine.local.tables import BlockTables
from temper.types import Request, SamplingParams

BLOCK_SIZE = 4


def ignore(_: Any) -> None:
    """Nobody waits for these completions."""


def enter(rows: Rows, tokens: int, limit: int, blocks: list[int]) -> int:
    request = Request(id="r", prompt_ids=tuple(range(tokens)), params=SamplingParams())
    sequence = Sequence(request=request, random_key=0, deliver=ignore)
    sequence.blocks = np.asarray(blocks, dtype=np.int64)
    return rows.enter(sequence, limit)


def whole(rows: Rows, rows_R: np.ndarray, size: int, width: int) -> np.ndarray:
    """The table as it would be sent from scratch."""
    table = np.full((size, width), SCRATCH_BLOCK, dtype=np.int64)
    for place, row in enumerate(rows_R):
        table[place, : rows.num_blocks[row]] = rows.blocks[row, : rows.num_blocks[row]]
    return table


def test_lines_are_right_whoever_comes_grows_and_goes() -> None:
    draw = random.Random(0)
    rows, width = Rows(8, BLOCK_SIZE), 16
    tables, block = BlockTables(8, width, torch.device("cpu")), 1
    for _ in range(400):
        active = np.flatnonzero(rows.is_active)
        act = draw.random()
        if act < 0.3 and rows.num_free:
            enter(rows, 3, 64, [block])
            block += 1
        elif act < 0.45 and len(active):
            rows.leave(int(draw.choice(active.tolist())))
        elif len(active):
            row = int(draw.choice(active.tolist()))
            if rows.num_blocks[row] < width:
                rows.add_blocks(row, np.asarray([block]))
                block += 1
        active = np.flatnonzero(rows.is_active)
        decode_R = active[[draw.random() < 0.9 for _ in active]]  # some are prefilled meanwhile
        if len(decode_R):
            size = min(8, 1 << int(len(decode_R) - 1).bit_length())
            tables.seat(decode_R, rows, size)
            assert np.array_equal(tables.blocks_NM[:size].numpy(), whole(rows, decode_R, size, width))
    assert (tables.blocks_NM[-1] == SCRATCH_BLOCK).all()


def test_a_look_at_which_nobody_comes_or_goes_sends_new_blocks_only() -> None:
    rows = Rows(64, BLOCK_SIZE)
    for row in range(64):
        enter(rows, 400, 800, list(range(1 + row * 100, 101 + row * 100)))
    tables, rows_R = BlockTables(64, 256, torch.device("cpu")), np.arange(64)
    tables.seat(rows_R, rows, 64)
    first = tables.bytes_sent
    assert first == (64 + 2 * 64 * 100) * 8
    tables.seat(rows_R, rows, 64)
    assert tables.bytes_sent == first, "nothing is new"
    rows.add_blocks(7, np.asarray([9000]))
    tables.seat(rows_R, rows, 64)
    assert tables.bytes_sent - first == 2 * 8, "where it goes, and its number"


def test_when_one_leaves_the_lines_of_the_others_are_not_sent_again() -> None:
    rows = Rows(64, BLOCK_SIZE)
    for row in range(64):
        enter(rows, 400, 800, list(range(1 + row * 100, 101 + row * 100)))
    tables = BlockTables(64, 256, torch.device("cpu"))
    tables.seat(np.arange(64), rows, 64)
    before = tables.bytes_sent
    rows.leave(0)
    tables.seat(np.arange(1, 64), rows, 64)
    assert tables.bytes_sent - before == 64 * 8, "one number per line: where it was"


def test_a_row_that_somebody_else_took_over_is_sent_anew() -> None:
    rows = Rows(2, BLOCK_SIZE)
    enter(rows, 8, 40, [1, 2])
    tables, rows_R = BlockTables(2, 12, torch.device("cpu")), np.asarray([0])
    tables.seat(rows_R, rows, 1)
    rows.leave(0)
    enter(rows, 3, 40, [3])
    tables.seat(rows_R, rows, 1)
    assert tables.blocks_NM[0].tolist() == [3] + [SCRATCH_BLOCK] * 11
