"""Regular expressions, as run in a worker process. Refuses: any import of torch or of Temper's types."""

from __future__ import annotations

import re
from collections.abc import Sequence


def matches(pattern: str, text: str) -> bool:
    """Whether all of the text matches."""
    return re.fullmatch(pattern, text.strip(), flags=re.DOTALL) is not None


def found(searches: Sequence[tuple[str, str]]) -> bool:
    """Whether each pattern is found somewhere in its text."""
    return all(re.search(pattern, text) is not None for pattern, text in searches)
