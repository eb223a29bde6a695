"""What all tables of a recipe have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from temper.types import Scalar

Factor = str | dict[str, Scalar]
"""A named function, or a table with its name and arguments: "clip" or {name = "clip", high = 0.28}."""


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


def require_auto_or_number(value: object, *, least: int) -> object:
    """One complaint where a union of types would have one for each of them."""
    is_number = isinstance(value, int) and not isinstance(value, bool) and value >= least
    if not is_number and value != "auto":
        raise ValueError(f'use a whole number of at least {least}, or "auto"')
    return value
