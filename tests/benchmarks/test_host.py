"""The benchmark of the host's work: it runs every part, and lists and arrays come to the same."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import ModuleType

import pytest

from temper.batching import rows_of_groups

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    import host

    return host


def options(**changed: object) -> argparse.Namespace:
    return argparse.Namespace(**{"completions": 16, "tokens": 40, "keep": 5, "top": 3, "lists": False, **changed})


def test_every_part_is_measured(host: ModuleType) -> None:
    found = host.run(options())
    parts = {"rows", "credit", "metrics", "packing", "traces", "handing over"}
    assert set(found) == parts | {"behind", "store_bytes"}
    assert found["store_bytes"] > 0


def test_rows_are_the_same_from_lists_and_from_arrays(host: ModuleType) -> None:
    arrays, lists = (rows_of_groups(host.make_groups(options(lists=is_lists))) for is_lists in (False, True))
    assert arrays == lists
    assert arrays[0].keep_ids is not None
