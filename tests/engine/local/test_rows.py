"""What running sequences take: memory by what they hold, and Python by what changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from temper.engine.local.rows import Rows
from temper.engine.local.sequence import NO_ROW, Sequence
from temper.types import Request, SamplingParams


def ignore(_: Any) -> None:
    """Nobody waits for these completions."""


def make(prompt: int, drawn_by: list[int]) -> Sequence:
    request = Request(id="r", prompt_ids=tuple(range(prompt)), params=SamplingParams())
    sequence = Sequence(request=request, random_key=0, deliver=ignore)
    for place, version in enumerate(drawn_by, start=prompt):
        sequence.take(place, -1.0, version)
    return sequence


def append(rows: Rows, row: int, tokens: list[int], version: int) -> None:
    tokens_RS = np.asarray([tokens])
    logprobs_RS = np.full(tokens_RS.shape, -0.5, dtype=np.float32)
    rows.append(np.asarray([row]), tokens_RS, logprobs_RS, np.asarray([len(tokens)]), version)


def test_a_sequence_leaves_with_the_versions_that_drew_it_over_every_change() -> None:
    rows = Rows(2, 4)
    row = rows.enter(make(3, [5, 5]), 40)
    for version, tokens in ((5, [7]), (5, [8, 9]), (6, [1]), (8, [2, 3])):
        append(rows, row, tokens, version)
    sequence, _ = rows.leave(row)
    assert sequence.versions.tolist() == [5, 5, 5, 5, 5, 6, 8, 8]
    assert sequence.token_ids.tolist() == [0, 1, 2, 3, 4, 7, 8, 9, 1, 2, 3]
    assert sequence.logprobs.tolist() == [-1.0, -1.0] + [-0.5] * 6
    again = rows.enter(sequence, 40)
    append(rows, again, [4], 9)
    assert rows.leave(again)[0].versions.tolist() == [5, 5, 5, 5, 5, 6, 8, 8, 9], (
        "nothing of an earlier stay is counted twice"
    )


def test_rows_are_taken_from_the_first_free_one_and_know_their_sequence() -> None:
    rows = Rows(4, 4)
    sequences = [make(2, []) for _ in range(4)]
    assert [rows.enter(sequence, 8) for sequence in sequences] == [0, 1, 2, 3]
    assert rows.num_free == 0
    rows.leave(2)
    rows.leave(1)
    assert (sequences[1].row, sequences[3].row, rows.num_free) == (NO_ROW, 3, 2)
    assert rows.enter(sequences[2], 8) == 1


def test_a_longer_sequence_leaves_what_others_hold_in_place() -> None:
    rows = Rows(3, 4)
    first = rows.enter(make(5, [1, 1]), 12)
    rows.add_blocks(first, np.asarray([4, 9]))
    rows.enter(make(2, []), 500)
    assert rows.tokens[first, :7].tolist() == list(range(7))
    assert rows.blocks[first, :3].tolist() == [4, 9, 0]


def test_many_long_rows_take_eight_bytes_a_token_and_memory_only_for_what_they_hold() -> None:
    rows, length = Rows(4096, 16), 40_000
    resident = resident_bytes()
    for _ in range(64):
        rows.enter(make(100, []), length)
    reserved = rows.tokens.nbytes + rows.logprobs.nbytes
    assert reserved <= 8.001 * 4096 * length
    if resident is not None:
        used = (resident_bytes() or 0) - resident
        assert used < 64 * 2**20, f"{used / 2**20:.0f} MiB for 64 rows of 100 tokens, of {reserved / 2**30:.2f} GiB"


def resident_bytes() -> int | None:
    """None: this system does not say."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096
    except OSError:
        return None


@pytest.mark.parametrize("rows", [8, 512])
def test_only_rows_whose_version_changes_are_looked_at_by_python(rows: int) -> None:
    table = Rows(rows, 4)
    for _ in range(rows):
        table.enter(make(2, []), 40)
    everyone = np.arange(rows)
    for version in (3, 3, 3, 4):
        drawn = np.full((rows, 1), 7)
        table.append(everyone, drawn, np.zeros((rows, 1), dtype=np.float32), np.ones(rows, dtype=np.int64), version)
    assert {len(runs) for runs in table._runs} == {2}
