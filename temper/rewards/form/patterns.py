"""Regular expressions, as run in a worker process. Refuses: any import of torch or of Temper's types."""

from __future__ import annotations

import re
from collections.abc import Sequence


def matches(pattern: str, texts: Sequence[str]) -> bool:
    """Whether all of each text matches."""
    return all(re.fullmatch(pattern, text.strip(), flags=re.DOTALL) is not None for text in texts)


def found(searches: Sequence[tuple[str, str]]) -> bool:
    """Whether each pattern is found somewhere in its text."""
    return all(re.search(pattern, text) is not None for pattern, text in searches)
