"""The check that all parallel fields share."""

from __future__ import annotations


def require_parallel(owner: object, *names: str) -> None:
    """Asserts that the named fields of `owner` have one length."""
    sizes = {name: len(getattr(owner, name)) for name in names}
    assert len(set(sizes.values())) == 1, f"{type(owner).__name__}: fields must be parallel, got lengths {sizes}"
