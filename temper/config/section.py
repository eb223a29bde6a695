"""What all tables of a recipe have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

Scalar = str | int | float | bool
"""The same as in temper.types, which imports torch: a recipe is read, and compared with the defaults, without it."""
Factor = str | dict[str, Scalar]
"""A named function, or a table with its name and arguments: "clip" or {name = "clip", high = 0.28}."""


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
