"""How products of few float8 rows are cut up: every multiprocessor has work, no part is empty, sizes decide."""

from __future__ import annotations

import pytest

from temper.models.float8.tiles import DEPTH, MULTIPROCESSORS, Tiles, steps_of, tiles_of

SEVEN = {"qkv": (4608, 3584), "o": (3584, 3584), "gate_up": (37888, 3584), "down": (3584, 18944)}
ONE_AND_A_HALF = {"qkv": (2048, 1536), "o": (1536, 1536), "gate_up": (17920, 1536), "down": (1536, 8960)}
TINY = {"qkv": (64, 32), "o": (32, 32), "gate_up": (128, 32), "down": (32, 64)}


def programs(rows: int, outputs: int, tiles: Tiles) -> int:
    return -(-rows // tiles.rows) * -(-outputs // tiles.outputs) * tiles.parts


@pytest.mark.parametrize(("name", "parts"), [("qkv", 7), ("o", 7), ("gate_up", 1), ("down", 9)])
def test_a_layer_of_7b_is_cut_so_that_two_programs_run_on_every_multiprocessor(name: str, parts: int) -> None:
    outputs, width = SEVEN[name]
    tiles = tiles_of(64, outputs, width)
    assert tiles is not None
    assert (tiles.rows, tiles.outputs, tiles.parts) == (64, 128, parts)
    assert MULTIPROCESSORS <= programs(64, outputs, tiles) <= 3 * MULTIPROCESSORS


def test_a_layer_of_7b_at_more_rows_has_tiles_for_the_library() -> None:
    assert all(tiles_of(256, *sizes) is None for sizes in SEVEN.values())
    assert [name for name, sizes in SEVEN.items() if tiles_of(128, *sizes) is None] == ["gate_up"]


@pytest.mark.parametrize("sizes", [*SEVEN.values(), *ONE_AND_A_HALF.values(), *TINY.values(), (80, 1552), (16, 16)])
@pytest.mark.parametrize("rows", [1, 16, 64, 65, 128])
def test_parts_cover_the_inner_dimension_and_none_is_empty(rows: int, sizes: tuple[int, int]) -> None:
    tiles = tiles_of(rows, *sizes)
    if tiles is None:
        assert rows > 64
        return
    steps = -(-sizes[1] // DEPTH)
    each = steps_of(sizes[1], tiles.parts)
    assert (tiles.parts - 1) * each < steps <= tiles.parts * each
    # What a multiprocessor of Hopper has, for a program's stages.
    assert (tiles.rows + tiles.outputs) * DEPTH * tiles.stages <= 227 * 1024 // 2


def test_smaller_layers_get_smaller_tiles() -> None:
    found = {name: tiles_of(64, *sizes) for name, sizes in ONE_AND_A_HALF.items()}
    assert {name: (tiles.outputs, tiles.parts) for name, tiles in found.items() if tiles is not None} == {
        "qkv": (64, 3), "o": (64, 3), "gate_up": (128, 1), "down": (128, 14),
    }  # fmt: skip
    assert all(tiles is not None and tiles.parts == 1 for tiles in (tiles_of(4, *sizes) for sizes in TINY.values()))


def test_the_cut_does_not_depend_on_the_number_of_rows() -> None:
    """So neither do a row's bits, up to the most rows."""
    for sizes in SEVEN.values():
        parts = {tiles.parts for rows in (1, 17, 64, 65, 128) if (tiles := tiles_of(rows, *sizes)) is not None}
        assert len(parts) == 1
