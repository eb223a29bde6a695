"""How a product of few float8 rows is cut up, so that the whole GPU reads weights: from its sizes alone.

With tiles of 128 x 128 a layer with 3,584 outputs occupies 28 of 132 multiprocessors, and the weights, which are all
that a decode step waits for, come at a fifth of the memory's speed. Tiles are therefore cut along the inner dimension.
Owns: the rule. Refuses: measuring at run time, because bits would depend on a clock.
The kernel is kernels/float8_products.py.
"""

from __future__ import annotations

from dataclasses import dataclass

MULTIPROCESSORS = 132
"""Of an H100 or H200."""
MOST_ROWS = 128
"""More rows are enough tiles for the library."""
ROW_TILE = 64
"""The least that Hopper's tensor cores multiply at once. Twice that for more rows."""
DEPTH = 128
"""Inner columns per step: a line of memory of every output."""
LEAST_STEPS = 4
"""A part with fewer steps only waits for its first loads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    rows: int
    outputs: int
    parts: int
    """Programs that share the inner dimension of one tile."""
    stages: int
    """Loads of so many steps are under way or waiting."""
    warps: int


def tiles_of(rows: int, outputs: int, width: int) -> Tiles | None:
    """For rows [rows, width] times a weight [outputs, width]. None: the library is faster."""
    columns = _ceil(outputs, 128)
    if rows > MOST_ROWS or (rows > ROW_TILE and columns > MULTIPROCESSORS):
        return None
    most_parts = max(1, _ceil(width, DEPTH) // LEAST_STEPS)
    tile = 128 if columns * most_parts >= MULTIPROCESSORS else 64
    parts = _even_parts(width, min(most_parts, max(1, 2 * MULTIPROCESSORS // _ceil(outputs, tile))))
    is_low = rows <= ROW_TILE
    # Shared memory of 228 KiB holds three programs of three stages: with one part each, all tiles run at once.
    stages = 3 if parts == 1 or not is_low else 4
    return Tiles(
        rows=ROW_TILE if is_low else 2 * ROW_TILE, outputs=tile, parts=parts, stages=stages, warps=4 if is_low else 8
    )


def steps_of(width: int, parts: int) -> int:
    """Steps of every part but the last, which may have fewer."""
    return _ceil(_ceil(width, DEPTH), parts)


def _even_parts(width: int, parts: int) -> int:
    """At most so many, and none empty: 9 steps in 4 parts are 3 parts of 3."""
    return _ceil(_ceil(width, DEPTH), steps_of(width, parts))


def _ceil(count: int, size: int) -> int:
    return -(-count // size)
