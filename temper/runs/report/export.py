"""The metrics of a run as one table for other tools: CSV, or Parquet where pyarrow is installed.

Owns: the long form (one line per number) and the wide form (one line per step). Refuses: rollouts and tokens.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from temper.errors import UserError, install_line
from temper.runs.reader import RunReader

Form = Literal["long", "wide"]
Cell = int | float | str | None
Table = tuple[list[str], list[list[Cell]]]
"""Names of the columns, and rows."""

KEYS = ("stage", "step")
LONG_COLUMNS = [*KEYS, "name", "value"]
_NUMBERS = """
    SELECT stage, step, name, value FROM metrics
    UNION ALL SELECT stage, step, 'loss/total', loss FROM steps
    UNION ALL SELECT stage, step, 'seconds/' || name, seconds FROM seconds
    UNION ALL SELECT stage, step, 'heldout/' || name, score FROM evaluations
    UNION ALL SELECT stage, step, 'heldout/' || name || '/low', low FROM evaluations
    UNION ALL SELECT stage, step, 'heldout/' || name || '/high', high FROM evaluations
    ORDER BY 1, 2, 3"""
"""Everything that has a step: metrics, the loss, the phases of its time, held-out scores with their interval."""


def long_table(reader: RunReader) -> Table:
    """One row per number; None where it was not a number."""
    return LONG_COLUMNS, [list(row.values()) for row in reader.query(_NUMBERS)]


def wide_table(reader: RunReader) -> Table:
    """One row per step, one column per name in alphabetical order; None where a step lacks it."""
    by_step: dict[tuple[Cell, Cell], dict[Cell, Cell]] = {}
    for stage, step, name, value in long_table(reader)[1]:
        by_step.setdefault((stage, step), {})[name] = value
    names = sorted({str(name) for row in by_step.values() for name in row})
    return [*KEYS, *names], [[*key, *(row.get(name) for name in names)] for key, row in by_step.items()]


def export_metrics(run: Path, target: Path, *, form: Form = "long") -> int:
    """Writes the metrics of a run directory to a .csv or .parquet file in one piece; returns the number of rows."""
    write = {".csv": _csv, ".parquet": _parquet}.get(target.suffix.lower())
    if write is None:
        raise UserError(f"{target} is neither a .csv nor a .parquet file. Give the file one of these endings")
    if not target.absolute().parent.is_dir():
        raise UserError(f"{target.absolute().parent} is not a directory. Make it first, or write elsewhere")
    with RunReader(run) as reader:
        columns, rows = long_table(reader) if form == "long" else wide_table(reader)
    aside = target.with_name(f".{target.name}.new")
    try:
        aside.write_bytes(write(columns, rows))
        aside.replace(target)
    except OSError as error:
        raise UserError(f"{target} cannot be written: {error}") from error
    finally:
        aside.unlink(missing_ok=True)
    return len(rows)


def _csv(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> bytes:
    """Numbers with all their digits; an empty cell where there is none."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_exact(cell) for cell in row] for row in rows)
    return text.getvalue().encode()


def _exact(cell: Cell) -> Cell:
    return repr(cell) if isinstance(cell, float) else cell


def _parquet(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> bytes:
    try:
        import pyarrow as pa  # type: ignore[import-untyped, unused-ignore]
        import pyarrow.parquet as pq  # type: ignore[import-untyped, unused-ignore]
    except ImportError as error:
        raise UserError(f"Parquet needs pyarrow. Write a .csv file, or run: {install_line('parquet')}") from error
    types = {"stage": pa.int64(), "step": pa.int64(), "name": pa.string()}
    arrays = [
        pa.array([row[place] for row in rows], types.get(name, pa.float64())) for place, name in enumerate(columns)
    ]
    sink = io.BytesIO()
    pq.write_table(pa.table(arrays, names=list(columns)), sink)
    return sink.getvalue()
