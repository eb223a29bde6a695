"""The age of rows is that of the policy's tokens: what no version drew has none."""

from __future__ import annotations

import numpy as np

from temper.dashboard.pages import _staleness
from temper.runs.store.arrays import PLANES, pack_array


def row(*versions: int) -> tuple[int, bytes, bytes, str]:
    """A row of one prompt token, trained by the step that made version 6."""
    mask, drawn_by = np.array([0] + [1] * len(versions)), np.array([-1, *versions])
    return 6, pack_array(mask, "loss_mask"), pack_array(drawn_by, "versions"), PLANES


def test_rows_of_opponents_and_of_data_sets_are_of_no_age() -> None:
    rows = [row(5, 5), row(4, 5), row(-1, -1)]
    assert _staleness(rows) == {"ages": [0, 1], "counts": [1, 1]}
