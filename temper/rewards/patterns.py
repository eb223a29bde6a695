"""Regular expressions, as run in a worker process. Refuses: any import of torch or of Temper's types."""

from __future__ import annotations

import re


def matches(pattern: str, text: str) -> bool:
    """Whether all of the text matches."""
    return re.fullmatch(pattern, text.strip(), flags=re.DOTALL) is not None
