"""Columns: arrays inside, lists outside."""

from __future__ import annotations

import dataclasses
import json
import pickle

import numpy as np
import pytest

from temper.types import Column, Completion, Finish, Ragged, array_of, join_ragged, no_lists
from temper.types.columns import floats, integers, ragged


def make_completion(**columns: object) -> Completion:
    given = {"token_ids": [5, 6], "logprobs": [-0.1, -0.2], "versions": [3, 4], **columns}
    return Completion(prompt_ids=(1,), finish=Finish.STOP, **given)


def test_a_column_reads_like_a_list_of_python_numbers() -> None:
    column = integers([3, 1, 4, 1, 5])
    assert column == [3, 1, 4, 1, 5]
    assert column != [3, 1, 4, 1, 6]
    assert [type(value) for value in (*column, column[0], column[-1])] == [int] * 7
    assert column[1:3] == [1, 4]
    assert (len(column), bool(column), bool(column[:0])) == (5, True, False)
    assert 4 in column
    assert column.index(4) == 2
    assert column + [9] == [3, 1, 4, 1, 5, 9]  # noqa: RUF005
    grown = [0]
    grown += column
    assert grown == [0, 3, 1, 4, 1, 5]
    assert isinstance(grown, list), "a list that takes a column stays a list"
    assert json.dumps(list(column)) == "[3, 1, 4, 1, 5]"
    with pytest.raises(IndexError):
        column[5]


def test_float32_from_an_engine_stays_float32_and_python_numbers_lose_nothing() -> None:
    drawn = np.array([-0.1, -0.2], dtype=np.float32)
    assert array_of(floats(drawn)).dtype == np.float32
    assert list(floats(drawn)) == drawn.tolist()
    assert list(floats([-0.1, -0.2])) == [-0.1, -0.2]


def test_nobody_can_write_to_a_column_and_the_giver_keeps_his_array() -> None:
    given = np.array([1, 2], dtype=np.int32)
    column = Column(given)
    with pytest.raises(ValueError, match="read-only"):
        column.array[0] = 9
    assert given.flags.writeable


def test_lists_of_lists_are_two_arrays_and_read_like_lists() -> None:
    lists = ragged([[5, 9], [], [6]], np.int32)
    assert lists == [[5, 9], [], [6]]
    assert (lists.values.tolist(), lists.offsets.tolist(), lists.counts.tolist()) == (
        [5, 9, 6],
        [0, 2, 2, 3],
        [2, 0, 1],
    )
    assert [list(part) for part in lists] == [[5, 9], [], [6]]
    assert (lists[0], lists[-1], lists[1:]) == ([5, 9], [6], [[], [6]])
    assert lists[1:].flat.tolist() == [6]
    assert ragged(np.array([[1, 2], [3, 4]], dtype=np.int32)) == [[1, 2], [3, 4]]
    assert ragged([], np.int32) == []


def test_joined_lists_share_their_numbers_when_one_part_has_them() -> None:
    drawn = ragged([[5, 9], [6]], np.int32)
    joined = join_ragged([no_lists(2, drawn), drawn])
    assert joined == [[], [], [5, 9], [6]]
    assert np.shares_memory(joined.values, drawn.values)
    assert join_ragged([drawn, no_lists(1, drawn), drawn[1:]]) == [[5, 9], [6], [], [6]]
    assert join_ragged([no_lists(2, drawn)]) == [[], []]


def test_completions_take_lists_and_arrays_and_are_equal_when_they_hold_the_same() -> None:
    lists = make_completion(keep_ids=[[5, 7], [6]])
    arrays = make_completion(token_ids=np.array([5, 6]), keep_ids=Ragged(np.array([5, 7, 6]), np.array([0, 2, 3])))
    assert lists == arrays
    assert lists != make_completion(keep_ids=[[5], [6]])
    assert lists == dataclasses.replace(arrays)
    assert pickle.loads(pickle.dumps(lists)) == lists
    assert (array_of(lists.token_ids).dtype, arrays.keep_ids.values.dtype) == (np.int32, np.int32)


def test_columns_of_other_lengths_are_refused() -> None:
    with pytest.raises(AssertionError, match="parallel"):
        make_completion(keep_ids=[[5]])
