"""Packing: every row once, trajectories whole, order irrelevant."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from temper.batching import pack, shard
from temper.batching.pack import pack_over_ranks
from temper.types import Sample


def row(group_id: str, index: int, length: int) -> Sample:
    rng = random.Random(f"{group_id} {index} {length}")
    mask = [0] + [rng.randint(0, 1) for _ in range(length - 1)]
    return Sample(
        group_id=group_id,
        index=index,
        token_ids=[rng.randint(0, 99) for _ in mask],
        loss_mask=mask,
        behavior_logprobs=[-rng.random() * m for m in mask],
        versions=[m - 1 for m in mask],
        advantages=[rng.gauss(0, 1) * m for m in mask],
        weights=[rng.random() * m for m in mask],
    )


ROWS = [row(f"g{place // 3}", place % 3, length) for place, length in enumerate([5, 12, 3, 8, 8, 2, 30, 4, 6, 9])]
ROWS.append(row("g0", 1, 7))  # a forked second row of the trajectory with 12 tokens
CONTENTS = sorted((list(row.token_ids), list(row.advantages)) for row in ROWS)


def unpacked(microbatch) -> list[tuple]:
    parts = [torch.split(getattr(microbatch, name), list(microbatch.lengths)) for name in ("token_ids", "advantages")]
    return [(tokens.tolist(), advantages.tolist()) for tokens, advantages in zip(*parts, strict=True)]


@pytest.mark.parametrize("budget", [1, 8, 16, 40, 1000])
def test_every_row_is_packed_once_and_under_the_budget(budget) -> None:
    microbatches = pack(ROWS, budget, torch.float64)
    assert sorted(r for m in microbatches for r in unpacked(m)) == CONTENTS
    for microbatch in microbatches:
        is_alone = len(set(microbatch.trajectory_ids.tolist())) == 1
        assert sum(microbatch.lengths) <= budget or is_alone


@pytest.mark.parametrize("budget", [1, 16, 40])
def test_rows_of_one_trajectory_stay_together(budget) -> None:
    homes = [place for place, m in enumerate(pack(ROWS, budget)) for length in m.lengths if length in (12, 7)]
    assert len(homes) == 2
    assert homes[0] == homes[1]
    microbatch = pack(ROWS, budget)[homes[0]]
    ids = [int(part[0]) for part in torch.split(microbatch.trajectory_ids, list(microbatch.lengths))]
    assert ids[microbatch.lengths.index(12)] == ids[microbatch.lengths.index(7)]


def test_packing_does_not_depend_on_order() -> None:
    # Rows of one trajectory keep their own order, so only whole trajectories are shuffled.
    forked = [r for r in ROWS if (r.group_id, r.index) == ("g0", 1)]
    others = [r for r in ROWS if r not in forked]
    random.Random(0).shuffle(others)
    first, second = pack(ROWS, 20), pack([*others[:3], *forked, *others[3:]], 20)
    assert [unpacked(m) for m in first] == [unpacked(m) for m in second]


def test_rows_of_a_group_meet_and_so_do_groups_of_similar_length() -> None:
    rows = [row(name[0], index, int(name[1])) for index, name in enumerate(["c3", "a9", "b5", "b2", "c7", "a2", "c4"])]
    (together,) = pack(rows, 100)
    assert together.lengths == (9, 2, 7, 4, 3, 5, 2)
    assert [m.lengths for m in pack(rows, 15)] == [(9, 2), (7, 4, 3), (5, 2)]


def test_positions_restart_and_ids_name_rows_and_trajectories() -> None:
    (microbatch,) = pack([row("a", 0, 3), row("b", 0, 2)], 100)
    assert microbatch.positions.tolist() == [0, 1, 2, 0, 1]
    assert microbatch.sequence_ids.tolist() == [0, 0, 0, 1, 1]
    assert microbatch.trajectory_ids.tolist() == [0, 0, 0, 1, 1]
    assert microbatch.lengths == (3, 2)
    assert microbatch.weights.dtype == torch.float32


def test_other_policies_are_packed_for_all_rows_or_for_none() -> None:
    rows = [row("a", 0, 3), row("b", 0, 2)]
    full = [dataclasses.replace(r, reference_logprobs=[-1.0] * len(r.token_ids)) for r in rows]
    (microbatch,) = pack(full, 100)
    assert microbatch.proximal_logprobs is None
    assert microbatch.reference_logprobs.tolist() == [-1.0] * 5
    with pytest.raises(AssertionError, match="either all rows"):
        pack([full[0], rows[1]], 100)


@pytest.mark.parametrize("together", ["trajectory", "group"])
def test_rows_without_credit_come_last_and_by_themselves(together) -> None:
    """A group of which one row has credit stays whole."""
    idle = {("g0", 0), ("g0", 2), ("g1", 0), ("g1", 1), ("g1", 2)}
    rows = [dataclasses.replace(r, advantages=[0.0] * len(r.advantages)) if (r.group_id, r.index) in idle else r
            for r in ROWS]  # fmt: skip
    microbatches = pack(rows, 40, together=together)
    has_credit = [m.has_credit for m in microbatches]
    assert has_credit == sorted(has_credit, reverse=True)
    lengths = sorted(length for m in microbatches if not m.has_credit for length in m.lengths)
    assert lengths == (sorted([5, 3, 8, 8, 2]) if together == "trajectory" else sorted([8, 8, 2]))


def test_every_row_of_a_microbatch_knows_which_sample_it_is() -> None:
    microbatches = pack(ROWS, 12)
    numbers = [number for microbatch in microbatches for number in microbatch.rows]
    assert sorted(numbers) == list(range(len(ROWS)))
    assert numbers != sorted(numbers), "rows are packed in another order than they come"
    for microbatch in microbatches:
        expected = [token for number in microbatch.rows for token in ROWS[number].token_ids]
        assert microbatch.token_ids.tolist() == expected


def test_nothing_packs_to_nothing() -> None:
    assert pack([], 16) == []


@pytest.mark.parametrize("world", [1, 2, 3, 20])
def test_shards_are_disjoint_complete_and_balanced(world) -> None:
    microbatches = pack(ROWS, 12)
    shares = [shard(microbatches, rank, world) for rank in range(world)]
    assert sorted(place for share in shares for place in share) == list(range(len(microbatches)))
    loads = [sum(sum(microbatches[place].lengths) for place in share) for share in shares]
    assert max(loads) - min(loads) <= max(sum(m.lengths) for m in microbatches)
    assert world < 20 or [] in shares


def owners(microbatch) -> list[tuple[int, int]]:
    """(trajectory, length) of every row."""
    ids = [int(part[0]) for part in torch.split(microbatch.trajectory_ids, list(microbatch.lengths))]
    return list(zip(ids, microbatch.lengths, strict=True))


@pytest.mark.parametrize("budget", [1, 16, 40, 1000])
def test_groups_stay_together_side_by_side_in_order_of_index(budget) -> None:
    microbatches = pack(ROWS, budget, torch.float64, together="group")
    assert sorted(r for m in microbatches for r in unpacked(m)) == CONTENTS
    # g2 has the longest row, then g0 with its forked row, then g3, a group of one, and g1.
    lengths = [length for m in microbatches for length in m.lengths]
    assert lengths == [30, 4, 6, 5, 12, 7, 3, 9, 8, 8, 2]
    if budget == 1:
        assert [owners(m) for m in microbatches][1] == [(0, 5), (1, 12), (1, 7), (2, 3)]
    for microbatch in microbatches:
        assert sum(microbatch.lengths) <= max(budget, 40)


def test_packing_by_group_depends_on_neither_order_nor_budget() -> None:
    forked = [r for r in ROWS if (r.group_id, r.index) == ("g0", 1)]
    others = [r for r in ROWS if r not in forked]
    random.Random(0).shuffle(others)
    shuffled = [*others[:3], *forked, *others[3:]]
    first = [r for m in pack(ROWS, 20, together="group") for r in unpacked(m)]
    assert first == [r for m in pack(shuffled, 60, together="group") for r in unpacked(m)]


def test_packing_row_by_row_would_part_pairs() -> None:
    """The mutation: without `together` a budget that is used up parts them."""
    pairs = [row("a", 0, 9), row("a", 1, 3), row("b", 0, 8), row("b", 1, 4)]
    assert [m.lengths for m in pack(pairs, 13, together="group")] == [(9, 3), (8, 4)]
    assert [m.lengths for m in pack(pairs, 20)] == [(9, 3, 8), (4,)]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_every_rank_gets_a_microbatch_where_there_are_rows_enough(num_ranks: int) -> None:
    rows = [row(f"g{number}", 0, 10 + number) for number in range(8)]
    packed = pack_over_ranks(rows, 10_000, num_ranks)
    assert len(packed) >= num_ranks
    assert sorted(number for microbatch in packed for number in microbatch.rows) == list(range(8))
    loads = [sum(sum(packed[place].lengths) for place in shard(packed, rank, num_ranks)) for rank in range(num_ranks)]
    assert max(loads) <= sum(10 + number for number in range(8)) / num_ranks + 17, "nobody has much more than a share"
    assert len(pack_over_ranks(rows, 20, num_ranks)) == len(pack(rows, 20)), "enough of them stay as they are"
    assert len(pack_over_ranks(rows[:1], 10_000, 4)) == 1
