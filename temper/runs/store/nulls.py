"""Null for numbers that are not known, in run.db and in JSON. Imports nothing heavy: the dashboard reads it too."""

from __future__ import annotations

import math
from typing import Any

from temper.storable import as_float


def number(value: float) -> float | None:
    """NaN is stored as NULL: explicitly, because SQLite would do it silently and some drivers refuse."""
    value = as_float(value)
    return None if math.isnan(value) else value


def finite(value: Any) -> Any:
    """Tables and lists with null for numbers that are not finite: JSON has no other way to say it."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
