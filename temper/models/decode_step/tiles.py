"""How a product of few rows is cut up, so that every multiprocessor reads as many weights: from its sizes alone.

Owns: the rule. Refuses: measuring at run time, because bits would depend on a clock.
The kernel is kernels/decode_step.py.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_ROWS = 64
"""More rows are work for a library's tiles."""
OUTPUTS = 64
"""Of a tile: the least that Hopper's tensor cores multiply at once. Gate and up have so many each."""
MULTIPROCESSORS = 132
"""Of an H100 or H200."""
SHARED_BYTES = 227 * 1024
"""Of a multiprocessor; a program takes 1 KiB beside what it asks for."""
LEAST_STEPS = 2
"""A part with fewer steps only waits for its first loads."""
SHAPES = ((128, 4), (128, 3), (64, 4), (64, 3), (64, 2))
"""(depth of a step, stages), the fastest first where they fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTiles:
    rows: int
    depth: int
    """Inner columns of a step."""
    steps: int
    """Steps of every part but the last, which may have fewer."""
    parts: int
    """Programs that share the inner dimension of one tile."""
    stages: int
    """Loads of so many steps are under way or waiting."""


def tiles_of(rows: int, outputs: int, width: int, *, is_gated: bool = False) -> StepTiles:
    """For rows [rows, width] times a weight [outputs, width], or two of them where it is gated: not cut, then."""
    tile_rows = max(16, 1 << (rows - 1).bit_length())
    columns = _ceil(outputs, OUTPUTS)
    most = 1 if is_gated else max(1, _ceil(width, SHAPES[0][0]) // LEAST_STEPS)
    parts = min(range(1, most + 1), key=lambda parts: _cost(columns, parts, tile_rows, width))
    depth, stages = _shape(columns * parts, tile_rows, is_gated)
    steps = _ceil(_ceil(width, depth), parts)
    return StepTiles(rows=tile_rows, depth=depth, steps=steps, parts=_ceil(_ceil(width, depth), steps), stages=stages)


def _cost(columns: int, parts: int, rows: int, width: int) -> float:
    """Weights that the busiest multiprocessor reads, in tiles; and the sums that are written and read for every part,
    four bytes a row each where a weight has two bytes a column."""
    busiest = _ceil(columns * parts, MULTIPROCESSORS) / parts
    return busiest + columns * parts / MULTIPROCESSORS * 4 * rows / width


def _shape(programs: int, rows: int, is_gated: bool) -> tuple[int, int]:
    """Such that all programs run at once, or else as many as can."""
    lines = rows + (2 if is_gated else 1) * OUTPUTS
    wanted = _ceil(programs, MULTIPROCESSORS)
    room = SHARED_BYTES // wanted - 1024
    return next(((depth, stages) for depth, stages in SHAPES if depth * stages * lines * 2 <= room), SHAPES[-1])


def _ceil(count: int, size: int) -> int:
    return -(-count // size)
