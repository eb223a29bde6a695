"""Routes of texts that are computed piece by piece.

Owns: which record a token keeps. Refuses: what the numbers mean (models/experts/routes.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from temper.types.columns import Ragged, join_ragged, no_lists, ragged


def continue_routes(before: Ragged[Any], longer: Ragged[Any]) -> Ragged[Any]:
    """Routes of a text whose start had routes before: a token keeps its first record, for by that the token after it
    was drawn. Only tokens without one, as the last of the start, take theirs from the longer text."""
    num_known = int(np.count_nonzero(before.counts))
    assert not before.counts[num_known:].any(), "records begin at the first token and have no gaps"
    return join_ragged([before[:num_known], longer[num_known:]])  # type: ignore[list-item]


def end_routes(routes: Sequence[Sequence[int]], length: int) -> Ragged[Any]:
    """Those of a text that is cut to this many tokens: the last was computed, and is the last no more."""
    whole = ragged(routes)
    return join_ragged([whole[: length - 1], no_lists(1, whole)])  # type: ignore[list-item]
