"""What somebody else said, as it may be kept: in errors that are stored with a run, and on screens."""

from __future__ import annotations

from collections.abc import Iterable


def quote(text: str, keys: Iterable[str], longest: int = 400) -> str:
    """The text without keys, in printable letters, then cut: of a key that crosses the cut a part would be left."""
    for key in sorted(filter(None, keys), key=len, reverse=True):
        text = text.replace(key, "[key]")
    text = "".join(letter if letter.isprintable() else " " for letter in text)
    return text if len(text) <= longest else f"{text[:longest]}..."
