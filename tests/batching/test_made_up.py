"""Rows that nobody drew are rows: they pack, and have what a policy gradient reads."""

from __future__ import annotations

from temper.batching.made_up import RowShape, made_up_rows
from temper.batching.pack import pack


def test_rows_of_a_group_have_their_prompt_in_common_and_differ_behind_it() -> None:
    shape = RowShape(prompt_tokens=3, completion_tokens=4, vocabulary=50)
    rows = made_up_rows(shape, num_rows=5, group_size=2)
    assert [(row.group_id, row.index) for row in rows] == [
        ("made up 0", 0), ("made up 0", 1), ("made up 1", 0), ("made up 1", 1), ("made up 2", 0),
    ]  # fmt: skip
    assert rows[0].token_ids[:3] == rows[1].token_ids[:3] != rows[2].token_ids[:3]
    assert rows[0].token_ids[3:] != rows[1].token_ids[3:]
    assert sum(sum(row.weights) for row in rows) == 1.0
    assert all(any(row.advantages) for row in rows), "without credit there is no backward pass"


def test_columns_that_an_objective_asks_for_pack_as_those_of_a_sampler() -> None:
    shape = RowShape(
        prompt_tokens=2, completion_tokens=3, vocabulary=4, version=7, num_top=2, has_keep_sets=True, teacher="maths"
    )
    (packed,) = pack(made_up_rows(shape, num_rows=2, group_size=2), tokens_per_microbatch=10)
    assert packed.top_ids is not None
    assert packed.top_ids.shape == (10, 2)
    assert packed.keep_ids is not None, "pack refuses keep-sets without the drawn token"
    assert packed.versions.tolist() == [-1, -1, 7, 7, 7] * 2
    assert packed.teachers == ("maths", "maths")
    assert int(packed.token_ids.max()) < 4


def test_a_row_without_a_prompt_gets_a_first_token_that_is_not_scored() -> None:
    (row,) = made_up_rows(RowShape(prompt_tokens=0, completion_tokens=2, vocabulary=9), num_rows=1, group_size=1)
    assert list(row.loss_mask) == [0, 1, 1]
