"""Rows of files: JSON lines, JSON lists, Parquet, folders that the package `datasets` saved, data sets of the hub.

Owns: formats, and the place of each row in its file. Refuses: what a row means (schemas.py, dataset.py).
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from temper.errors import UserError, install_line, nearest_file
from temper.folders.hub import RowsName, fetch_rows, rows_name


class Row(NamedTuple):
    """One row of a file."""

    number: int
    """From 1, part of the task's id."""
    place: str
    """For people: "line 3"."""
    content: Any


def rows_of(path: Path) -> Iterator[Row]:
    """Every row, in order, as JSON has it: objects are dicts. Raises UserError, also in the middle of a file."""
    if path.is_dir():
        return _saved_rows(path)
    if (name := rows_name(str(path))) is not None:
        return _fetched_rows(name)
    if not path.is_file():
        raise UserError(
            f"{path}: no such file.{nearest_file(path)} Give the path of a .jsonl, .json or .parquet file, or the name "
            'of a data set on the hub, e.g. "openai/gsm8k:main/train".'
        )
    kind = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    if kind not in _READERS:
        raise UserError(
            f'{path}: "{kind}" files cannot be read. Use .jsonl (one JSON object per line), .json (a list of objects), '
            "either of them with .gz, .parquet, or a folder written by save_to_disk of the package datasets."
        )
    return _READERS[kind](path)


def _fetched_rows(name: RowsName) -> Iterator[Row]:
    """A split of the hub's: its files as one."""
    number = 0
    for file in fetch_rows(name):
        for row in rows_of(file):
            number += 1
            yield Row(number, f"{file.name}, {row.place}", row.content)


def _open(path: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


def _json_lines(path: Path) -> Iterator[Row]:
    with _open(path) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield Row(number, f"line {number}", json.loads(line))
            except ValueError as error:  # bad JSON or bad UTF-8
                raise UserError(
                    f"{path}, line {number}: not valid JSON ({error}). Write one JSON object per line."
                ) from error


def _json_list(path: Path) -> Iterator[Row]:
    """Its objects one by one: read whole, the list would not say which line an object begins on."""
    with _open(path) as file:
        content = file.read()
    if content.lstrip()[:1] == b"{":  # many publish JSON lines under this name
        yield from _json_lines(path)
        return
    place, line, number, before = 0, 1, 0, "["
    try:
        text = content.decode()
        while True:
            found = re.compile(rf"\s*{re.escape(before)}\s*").match(text, place)
            if found is None:
                break
            line += text.count("\n", place, found.end())
            row, end = json.JSONDecoder().raw_decode(text, found.end())
            number += 1
            yield Row(number, f"row {number}, line {line}", row)
            line += text.count("\n", found.end(), end)
            place, before = end, ","
        if text[place:].strip() != "]":
            raise ValueError("the list does not end with ]" if number else "it is no list")
    except ValueError as error:
        raise UserError(f"{path}, line {line}: not valid JSON ({error}). Write a list of objects.") from error


def _parquet_rows(path: Path) -> Iterator[Row]:
    pyarrow = _pyarrow(path)
    try:
        table = pyarrow.parquet.read_table(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path}: not a readable Parquet file ({error}).") from error
    yield from _table_rows(table)


def _saved_rows(folder: Path) -> Iterator[Row]:
    """A data set that the package `datasets` saved: Arrow streams, and state.json that names them."""
    if (folder / "dataset_dict.json").is_file():
        splits = json.loads((folder / "dataset_dict.json").read_text())["splits"]
        raise UserError(f"{folder} holds the splits {', '.join(splits)}. Name one of them: {folder / splits[0]}")
    if not (folder / "state.json").is_file():
        raise UserError(f"{folder}: a folder without state.json. Give a file, or what datasets' save_to_disk wrote.")
    pyarrow = _pyarrow(folder)
    number = 0
    for file in json.loads((folder / "state.json").read_text())["_data_files"]:
        try:
            with pyarrow.memory_map(str(folder / file["filename"])) as stream:
                table = pyarrow.ipc.open_stream(stream).read_all()
        except (OSError, pyarrow.ArrowException) as error:
            raise UserError(f"{folder / file['filename']}: not a readable Arrow file ({error}).") from error
        for row in _table_rows(table, number):
            number = row.number
            yield row


def _table_rows(table: Any, before: int = 0) -> Iterator[Row]:
    rows = (row for batch in table.to_batches() for row in batch.to_pylist())
    for number, row in enumerate(rows, start=before + 1):
        yield Row(number, f"line {number}", row)


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f"{path}: Parquet needs the package pyarrow. Run: {install_line('parquet')}") from error
    return pyarrow


_READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json_list,
    ".parquet": _parquet_rows,
    ".pq": _parquet_rows,
}
"""By the ending of a file's name."""
