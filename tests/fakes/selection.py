"""Which tests run when: some of many cases alike in the default tests, more in the heavy ones, all in the slow ones.

Owns: the marks that are not in the test files themselves: of parametrized cases, and of tests that cost much on two
cores and repeat others (tests/selection.toml). Refuses: a case to keep that is not there, which would leave nothing
in its place.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import pytest

TABLE = Path(__file__).parents[1] / "selection.toml"


def mostly_heavy(cases: Iterable[Any], *, keep: Collection[Any]) -> list[Any]:
    """The cases in their order; all but those to keep are marked heavy."""
    return _mostly(pytest.mark.heavy, cases, keep)


def mostly_slow(cases: Iterable[Any], *, keep: Collection[Any]) -> list[Any]:
    """The cases in their order; all but those to keep are marked slow."""
    return _mostly(pytest.mark.slow, cases, keep)


def _mostly(mark: Any, cases: Iterable[Any], keep: Collection[Any]) -> list[Any]:
    cases = list(cases)
    missing = [case for case in keep if case not in cases]
    assert not missing, f"there is no case {missing}"
    return [case if case in keep else pytest.param(case, marks=mark) for case in cases]


def read_selection() -> dict[str, list[str]]:
    """By mark: tests, as `file::test` or `file::test[case]` below tests/."""
    return tomllib.loads(TABLE.read_text())


def marks_of(node: str, selection: dict[str, list[str]]) -> list[str]:
    """Of a test, by its place below tests/."""
    return [mark for mark, tests in selection.items() if node in tests or node.partition("[")[0] in tests]
