"""Numbers of many tokens in one array, read like a list.

Owns: how columns of tokens are held. A step has millions of tokens, and a list of Python numbers takes ten times the
memory and a hundred times the time. Whoever computes over whole columns takes `array_of`; everyone else indexes,
slices, compares and iterates as with a list, and gets plain Python numbers. Columns are read-only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray

Number = TypeVar("Number", int, float)


class Column(Sequence[Number], Generic[Number]):
    """A list of numbers over an array. The array is not copied: whoever gives it away does not write to it again."""

    __slots__ = ("array",)
    __hash__ = None  # type: ignore[assignment]  # like a list

    def __init__(self, array: NDArray[Any]) -> None:
        assert array.ndim == 1, "a column has one number per place"
        self.array = _read_only(array)

    def __len__(self) -> int:
        return len(self.array)

    @overload
    def __getitem__(self, place: int) -> Number: ...
    @overload
    def __getitem__(self, place: slice) -> Column[Number]: ...
    def __getitem__(self, place: int | slice) -> Number | Column[Number]:
        found = self.array[place]
        return Column(found) if isinstance(place, slice) else found.item()

    def __iter__(self) -> Iterator[Number]:
        return iter(self.array.tolist())

    def __contains__(self, value: object) -> bool:
        return bool((self.array == value).any())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Column):
            return np.array_equal(self.array, other.array)
        return self.array.tolist() == list(other) if isinstance(other, Sequence) else NotImplemented

    def __add__(self, other: Sequence[Number]) -> Column[Number]:
        """Both, one after the other: as lists add, not as arrays do. No __radd__: it would make `list += column` a
        column."""
        return Column(np.concatenate((self.array, array_of(other, self.array.dtype))))

    def __repr__(self) -> str:
        return repr(self.array.tolist())

    def __reduce__(self) -> tuple[Any, ...]:
        return Column, (self.array,)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self.array, dtype=dtype) if copy else np.asarray(self.array, dtype=dtype)


class Ragged(Sequence[Sequence[Number]], Generic[Number]):
    """A list of lists of numbers: those of place i are values[offsets[i] : offsets[i + 1]]."""

    __slots__ = ("offsets", "values")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, values: NDArray[Any], offsets: NDArray[np.int64]) -> None:
        assert len(offsets) > 0, "n places have n + 1 offsets"
        assert 0 <= offsets[0] <= offsets[-1] <= len(values), "offsets lie within the values"
        self.values, self.offsets = _read_only(values), _read_only(offsets)

    @staticmethod
    def of_counts(values: NDArray[Any], counts: NDArray[Any]) -> Ragged[Any]:
        """The first counts[0] values belong to place 0, and so on."""
        return Ragged(values, np.concatenate(([0], np.cumsum(counts, dtype=np.int64))))

    @property
    def counts(self) -> NDArray[np.int64]:
        """How many numbers each place has."""
        return np.diff(self.offsets)

    @property
    def flat(self) -> NDArray[Any]:
        """The numbers of all places, one after another."""
        return self.values[self.offsets[0] : self.offsets[-1]]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, place: int) -> Column[Number]: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Sequence[Number]]: ...
    def __getitem__(self, place: int | slice) -> Sequence[Any]:
        if isinstance(place, slice):
            start, stop, step = place.indices(len(self))
            assert step == 1, "a slice of lists is of neighbours"
            return Ragged(self.values, self.offsets[start : max(start, stop) + 1])
        number = range(len(self))[place]
        return Column(self.values[self.offsets[number] : self.offsets[number + 1]])

    def __iter__(self) -> Iterator[Column[Number]]:
        return (Column(part) for part in np.split(self.flat, self.offsets[1:-1] - self.offsets[0])[: len(self)])

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Ragged):
            return np.array_equal(self.counts, other.counts) and np.array_equal(self.flat, other.flat)
        return self.tolist() == [list(part) for part in other] if isinstance(other, Sequence) else NotImplemented

    def __repr__(self) -> str:
        return repr(self.tolist())

    def __reduce__(self) -> tuple[Any, ...]:
        return Ragged.of_counts, (self.flat, self.counts)

    def tolist(self) -> list[list[Number]]:
        return [part.array.tolist() for part in self]


def integers(values: Sequence[int] | NDArray[Any]) -> Column[int]:
    """Token ids, versions: four bytes each."""
    return _column(values, np.int32)


def bits(values: Sequence[int] | NDArray[Any]) -> Column[int]:
    """A mask: one byte each."""
    return _column(values, np.uint8)


def floats(values: Sequence[float] | NDArray[Any]) -> Column[float]:
    """As exact as they are given: float32 stays float32, and Python's numbers are float64."""
    is_float32 = isinstance(values, Column | np.ndarray) and array_of(values).dtype == np.float32
    return _column(values, np.float32 if is_float32 else np.float64)


def _column(values: Sequence[Any] | NDArray[Any], dtype: type[np.generic]) -> Column[Any]:
    if isinstance(values, Column) and values.array.dtype == dtype:
        return values
    return Column(array_of(values, dtype))


def ragged(rows: Sequence[Sequence[Any]] | NDArray[Any], dtype: DTypeLike | None = None) -> Ragged[Any]:
    """Lists of numbers, from lists or from a table [n, k]. Without a dtype as exact as given, like `floats`."""
    if isinstance(rows, Ragged):
        return rows if dtype is None or rows.values.dtype == dtype else Ragged(rows.values.astype(dtype), rows.offsets)
    if isinstance(rows, np.ndarray):
        return Ragged.of_counts(array_of(rows.reshape(-1), dtype), np.full(len(rows), rows.shape[1]))
    parts = [array_of(row, dtype or np.float64) for row in rows]
    values = np.concatenate(parts) if parts else np.empty(0, dtype or np.float64)
    return Ragged.of_counts(values, np.fromiter(map(len, parts), dtype=np.int64, count=len(parts)))


def join_ragged(parts: Iterable[Ragged[Any]]) -> Ragged[Any]:
    """All places, one after another. Values are copied only when more than one part has some."""
    parts = list(parts)
    filled = [part for part in parts if part.offsets[0] < part.offsets[-1]]
    counts = np.concatenate([part.counts for part in parts])
    if not filled:
        return Ragged.of_counts(parts[0].values[:0], counts)
    return Ragged.of_counts(filled[0].flat if len(filled) == 1 else np.concatenate([p.flat for p in filled]), counts)


def no_lists(count: int, like: Ragged[Any]) -> Ragged[Any]:
    """`count` places without numbers."""
    return Ragged(like.values[:0], np.zeros(count + 1, dtype=np.int64))


def array_of(values: Sequence[Any] | NDArray[Any], dtype: DTypeLike | None = None) -> NDArray[Any]:
    """The numbers of a column or of any sequence; without a copy where they are in such an array already."""
    return np.asarray(values.array if isinstance(values, Column) else values, dtype=dtype)


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    if array.flags.writeable:
        array = array.view()
        array.flags.writeable = False
    return array
