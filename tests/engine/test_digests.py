"""Two tensors have one digest when they hold the same, and no small change goes unseen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from temper.engine.digests import WIDTH, Digests, differing, digested
from temper.types import Publication


def digest_of(tensor: Tensor, *more: Tensor) -> str:
    digests = Digests()
    digests.add("it", tensor, *more)
    return digests.read()["it"]


def rows(kind: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(37, 3 * WIDTH + 5).to(kind)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.float8_e4m3fn])
def test_it_does_not_depend_on_where_and_how_the_numbers_lie(kind: torch.dtype) -> None:
    tensor = rows(kind)
    block = torch.cat([tensor.new_zeros(1).to(torch.float32).to(kind), tensor.reshape(-1)])
    assert digest_of(block[1:].view(tensor.shape)) == digest_of(tensor), "begins between two words"
    assert digest_of(tensor.T.contiguous().T) == digest_of(tensor)
    assert digest_of(torch.zeros(0, 7, dtype=torch.float32)) == digest_of(torch.ones(0, 7))
    assert digest_of(torch.tensor(2.5)) != digest_of(torch.tensor(2.25))


def lowest_bit(tensor: Tensor) -> None:
    tensor.view(torch.int32)[20, 1000] ^= 1


def highest_bit_of_the_last(tensor: Tensor) -> None:
    tensor.view(torch.int32)[-1, -1] ^= -(2**31)


def two_rows_swapped(tensor: Tensor) -> None:
    tensor[[3, 4]] = tensor[[4, 3]]


def two_columns_swapped(tensor: Tensor) -> None:
    tensor[:, [3, 4]] = tensor[:, [4, 3]]


def one_added_and_taken_away(tensor: Tensor) -> None:
    words = tensor.view(torch.int32)
    words[5, 8] += 1
    words[5, 10] -= 1


def shifted_by_a_row_of_the_table(tensor: Tensor) -> None:
    flat = tensor.view(-1)
    flat.copy_(flat.roll(2 * WIDTH))


CHANGES = [
    lowest_bit, highest_bit_of_the_last, two_rows_swapped, two_columns_swapped, one_added_and_taken_away,
    shifted_by_a_row_of_the_table,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change: Callable[[Tensor], None]) -> None:
    tensor = rows()
    before = digest_of(tensor)
    change(tensor)
    assert digest_of(tensor) != before


def test_shapes_types_and_what_is_held_with_it_count() -> None:
    found = {
        digest_of(torch.zeros(4)), digest_of(torch.zeros(2, 2)), digest_of(torch.zeros(4, dtype=torch.int32)),
        digest_of(torch.zeros(4), torch.ones(2)), digest_of(torch.ones(2), torch.zeros(4)),
    }  # fmt: skip
    assert len(found) == 5


def test_what_was_published_is_what_was_handed_over_first() -> None:
    """Also when a sampler that comes later is given what the trainer has made of it."""
    trained = {"a": torch.zeros(3), "b": torch.ones(2)}
    publication, digests = digested(Publication(version=7, tensors=trained))
    assert publication.version == 7
    for name in publication.tensors:
        publication.tensors[name]
    before = digests.read()
    trained["a"] += 1
    assert publication.tensors["a"].tolist() == [1.0] * 3
    assert digests.read() == before
    later, others = digested(Publication(version=8, tensors=trained))
    dict(later.tensors)
    assert differing(before, others.read()) == ["a"]
    assert differing(before, {name: text for name, text in before.items() if name != "b"}) == ["b"]
