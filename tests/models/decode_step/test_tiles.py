"""How products are cut: nothing is left out, and everything runs at once."""

from __future__ import annotations

import pytest

from temper.models.decode_step.tiles import MULTIPROCESSORS, OUTPUTS, SHARED_BYTES, StepTiles, tiles_of

SHAPES = [(960, 576), (576, 1536), (2048, 1536), (1536, 8960), (4608, 3584), (3584, 18944), (5120, 2048), (64, 40)]
GATED = [(1536, 576), (8960, 1536), (18944, 3584), (48, 40)]


def programs(tiles: StepTiles, outputs: int) -> int:
    return -(-outputs // OUTPUTS) * tiles.parts


def shared_bytes(tiles: StepTiles, *, is_gated: bool) -> int:
    return tiles.stages * tiles.depth * 2 * (tiles.rows + (2 if is_gated else 1) * OUTPUTS) + 1024


@pytest.mark.parametrize("rows", [1, 16, 17, 33, 64])
@pytest.mark.parametrize(("outputs", "width"), SHAPES)
def test_parts_cover_the_inner_dimension_and_none_is_empty(rows: int, outputs: int, width: int) -> None:
    tiles = tiles_of(rows, outputs, width)
    steps = -(-width // tiles.depth)
    assert (tiles.parts - 1) * tiles.steps < steps <= tiles.parts * tiles.steps
    assert tiles.rows >= rows
    assert tiles.rows in (16, 32, 64)


@pytest.mark.parametrize("rows", [1, 32, 64])
@pytest.mark.parametrize(
    ("outputs", "width", "is_gated"), [(*shape, False) for shape in SHAPES] + [(*shape, True) for shape in GATED]
)
def test_all_programs_run_at_once(rows: int, outputs: int, width: int, is_gated: bool) -> None:
    tiles = tiles_of(rows, outputs, width, is_gated=is_gated)
    resident = SHARED_BYTES // shared_bytes(tiles, is_gated=is_gated)
    assert programs(tiles, outputs) <= resident * MULTIPROCESSORS
    assert tiles.parts == 1 or not is_gated


def test_a_product_with_few_outputs_is_cut_until_the_gpu_is_busy() -> None:
    """24 tiles of outputs would leave 108 of 132 multiprocessors idle."""
    assert tiles_of(32, 1536, 1536).parts == 4
    assert programs(tiles_of(64, 1536, 8960), 1536) == 120
    assert tiles_of(32, 132 * OUTPUTS, 4096).parts == 1, "nothing to gain where every multiprocessor has a tile"
