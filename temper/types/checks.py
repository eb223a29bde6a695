"""What types with parallel fields share: columns in place of lists, and the check of their lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def hold(owner: object, convert: Callable[[Any], object], *names: str) -> None:
    """Converts the named fields of a frozen `owner` that is just being made; those that are None stay None."""
    for name in names:
        if (value := getattr(owner, name)) is not None:
            object.__setattr__(owner, name, convert(value))


def require_parallel(owner: object, *names: str) -> None:
    """Asserts that the named fields of `owner` have one length."""
    sizes = {name: len(getattr(owner, name)) for name in names}
    assert len(set(sizes.values())) == 1, f"{type(owner).__name__}: fields must be parallel, got lengths {sizes}"
