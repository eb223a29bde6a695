"""Log-probabilities of a frozen reference, computed once for every row of a run.

Owns: the cache and its file. Refuses: references that move (the trainer scores those at every step).
What was computed with which neighbours is part of the last bits, so the file keeps whole blocks, one per step: a
resumed run finds a block as it was or computes it again with the same rows.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from temper.batching.samples import ScoreFn
from temper.types import Column, Sample, array_of


class References:
    def __init__(self, score: ScoreFn, path: Path | None = None, identity: str = "") -> None:
        """`path`: where blocks are kept over a resume, one file per stage and rank; None: in memory only. `identity`
        names the reference, so that a file of another one is not believed."""
        self._score, self._path = score, path
        self._title = json.dumps({"reference": identity}).encode() + b"\n"
        self._known: dict[str, array[float]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def start(self) -> None:
        """Reads what an earlier process kept; a block that it did not finish is cut off."""
        if self._path is None or not self._path.exists():
            return
        with self._path.open("r+b") as file:
            end = 0
            if file.readline() == self._title:
                end = len(self._title)
                for block in _blocks(file):
                    self._known |= block
                    end = file.tell()
            file.truncate(end)

    def fill(self, rows: Sequence[Sample]) -> list[Sample]:
        """The rows with the reference's log-probabilities; those not seen before are scored, all in one call."""
        keys = [_key(row) for row in rows]
        unknown = {key: row for key, row in zip(keys, rows, strict=True) if key not in self._known}
        if unknown:
            scored = self._score(list(unknown.values()), "reference")
            columns = zip(unknown.items(), scored, strict=True)
            block = {key: array("d", _drawn(column, row).tobytes()) for (key, row), column in columns}
            if self._path is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with self._path.open("ab") as file:
                    file.write((b"" if file.tell() else self._title) + _encoded(block))
            self._known |= block
        return [
            replace(row, reference_logprobs=_spread(self._known[key], row)) for key, row in zip(keys, rows, strict=True)
        ]


def _key(row: Sample) -> str:
    """By what the reference reads, not by a name: the same text under two names is scored once."""
    content = array_of(row.token_ids, np.int64).tobytes() + array_of(row.loss_mask, np.uint8).tobytes()
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _drawn(column: Sequence[float], row: Sample) -> NDArray[np.float64]:
    return array_of(column, np.float64)[array_of(row.loss_mask, np.bool_)]


def _spread(values: array[float], row: Sample) -> Column[float]:
    column = np.zeros(len(row.loss_mask))
    column[array_of(row.loss_mask, np.bool_)] = values
    return Column(column)


def _encoded(block: dict[str, array[float]]) -> bytes:
    payload = b"".join(values.tobytes() for values in block.values())
    sizes = {key: len(values) for key, values in block.items()}
    header = {"digest": hashlib.blake2b(payload, digest_size=16).hexdigest(), "sizes": sizes}
    return json.dumps(header).encode() + b"\n" + payload


def _blocks(file: BinaryIO) -> Iterator[dict[str, array[float]]]:
    """Whole blocks, up to the end or to the first that was cut."""
    while line := file.readline():
        try:
            header = json.loads(line)
        except ValueError:
            return
        sizes: dict[str, int] = header["sizes"]
        payload = file.read(8 * sum(sizes.values()))
        if hashlib.blake2b(payload, digest_size=16).hexdigest() != header["digest"]:
            return
        values, block, place = array("d", payload), {}, 0
        for key, size in sizes.items():
            block[key] = values[place : place + size]
            place += size
        yield block
