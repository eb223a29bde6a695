"""Of many cases alike, some in the default tests and all in the heavy ones.

Owns: the mark. Refuses: a case to keep that is not there, which would leave nothing in its place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def mostly_heavy(cases: Iterable[Any], *, keep: Collection[Any]) -> list[Any]:
    """The cases in their order; all but those to keep are marked heavy."""
    cases = list(cases)
    missing = [case for case in keep if case not in cases]
    assert not missing, f"there is no case {missing}"
    return [case if case in keep else pytest.param(case, marks=pytest.mark.heavy) for case in cases]
