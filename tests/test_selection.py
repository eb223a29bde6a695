"""Which tests run when: the table names tests that exist, and marks what it names."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.fakes.selection import marks_of, read_selection

TESTS = Path(__file__).parent


def test_every_test_of_the_table_exists_and_is_in_one_list() -> None:
    selection = read_selection()
    assert set(selection) == {"heavy", "slow"}
    named = [test for tests in selection.values() for test in tests]
    assert len(named) == len(set(named))
    for test in named:
        file, _, name = test.partition("[")[0].partition("::")
        assert f"def {name}(" in (TESTS / file).read_text(), f"tests/selection.toml: {test} does not exist"


def test_a_case_is_marked_by_itself_and_with_its_test() -> None:
    selection = {"heavy": ["a.py::one"], "slow": ["a.py::two[x]"]}
    assert marks_of("a.py::one", selection) == marks_of("a.py::one[y]", selection) == ["heavy"]
    assert marks_of("a.py::two[x]", selection) == ["slow"]
    assert marks_of("a.py::two[y]", selection) == []


def test_every_folder_of_tests_is_walked(pytestconfig: pytest.Config) -> None:
    """By default pytest passes by folders that are called "build"."""
    skipped = pytestconfig.getini("norecursedirs")
    folders = {path.parent for path in TESTS.rglob("test_*.py")}
    assert TESTS / "build" in folders
    for folder in folders:
        for part in folder.relative_to(TESTS.parent).parts:
            assert not any(fnmatch(part, pattern) for pattern in skipped), folder
