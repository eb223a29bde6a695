"""Block tables on the device, one line per place of a pass. A look of the host sends what is new since the last one.

Owns: which sequence's table lies in which place, and how much of it was sent. Refuses: handing out blocks (blocks.py).
A running sequence's table only grows, so its line is sent once; when rows come and go the lines move on the device.
Shapes: _N places, _R rows in use, M blocks per row, _T blocks that are sent.
"""

from __future__ import annotations

import numpy as np
import torch

from temper.engine.local.blocks import SCRATCH_BLOCK
from temper.engine.local.rows import Rows, Rows_R


class BlockTables:
    def __init__(self, num_places: int, width: int, device: torch.device) -> None:
        # The last line belongs to no sequence: scratch lines are copied from it.
        self.blocks_NM = torch.full((num_places + 1, width), SCRATCH_BLOCK, dtype=torch.int64, device=device)
        self._rows_R: Rows_R = np.empty(0, dtype=np.int64)
        self._arrival_R: Rows_R = np.empty(0, dtype=np.int64)
        """Arrival number of the sequence in each place. With the row it identifies the sequence."""
        self._sent_R: Rows_R = np.empty(0, dtype=np.int64)
        self._size = 0
        self.bytes_sent = 0
        """Bytes sent to the device since the start."""

    def seat(self, rows_R: Rows_R, rows: Rows, size: int) -> None:
        """Makes the first lines those of these rows, in this order, and the rest of `size` lines scratch.

        Columns a row does not own must never name the block of another.
        """
        arrival_R = rows.arrival[rows_R]
        if size != self._size or not (
            np.array_equal(rows_R, self._rows_R) and np.array_equal(arrival_R, self._arrival_R)
        ):
            self._move(rows_R, arrival_R, size)
        counts_R = rows.num_blocks[rows_R] - self._sent_R
        if total := int(counts_R.sum()):
            place_T = np.repeat(np.arange(len(rows_R)), counts_R)
            column_T = np.arange(total) + np.repeat(self._sent_R - (np.cumsum(counts_R) - counts_R), counts_R)
            blocks_T = rows.blocks[rows_R[place_T], column_T]
            sent = self._send(np.stack((place_T * self.blocks_NM.shape[1] + column_T, blocks_T)))
            self.blocks_NM.view(-1).scatter_(0, sent[0], sent[1])
            self._sent_R = self._sent_R + counts_R

    def clear(self) -> None:
        """Makes every line scratch. Whoever was seated is sent anew."""
        self.blocks_NM.fill_(SCRATCH_BLOCK)
        self._rows_R = self._arrival_R = self._sent_R = np.empty(0, dtype=np.int64)
        self._size = 0

    def _move(self, rows_R: Rows_R, arrival_R: Rows_R, size: int) -> None:
        """Lines of sequences that stay go to their new places, on the device; all others become scratch."""
        nobody = len(self.blocks_NM) - 1
        highest = max(rows_R.max(initial=-1), self._rows_R.max(initial=-1)) + 1
        place_of = np.full(highest, nobody, dtype=np.int64)
        place_of[self._rows_R] = np.arange(len(self._rows_R))
        before_R = place_of[rows_R]
        known = np.append(self._arrival_R, np.full(nobody + 1 - len(self._arrival_R), -1))
        before_R = np.where(known[before_R] == arrival_R, before_R, nobody)
        sent = np.append(self._sent_R, np.zeros(nobody + 1 - len(self._sent_R), dtype=np.int64))
        source_N = np.full(size, nobody, dtype=np.int64)
        source_N[: len(rows_R)] = before_R
        self.blocks_NM[:size].copy_(self.blocks_NM[self._send(source_N)])
        self._rows_R, self._arrival_R, self._sent_R, self._size = rows_R.copy(), arrival_R, sent[before_R], size

    def _send(self, array: np.ndarray) -> torch.Tensor:
        self.bytes_sent += array.nbytes
        return torch.from_numpy(array).to(self.blocks_NM.device, non_blocking=True)
