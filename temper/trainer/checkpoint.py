"""Checkpoint directories that are either complete and verified, or not there.

A checkpoint is written aside, fsynced, given a manifest with the sha256 of every part, and renamed into place last.
Owns: atomicity, verification, the order of checkpoints. Refuses: knowing what is inside; writers fill the folder.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from temper.errors import UserError

MANIFEST = "manifest.json"
STATE = "state.json"
UNFINISHED = ".tmp-"
"""Prefix of folders that are being written; one that is found at start-up was left by a killed run."""


def write_checkpoint(
    parent: Path, name: str, writers: Mapping[str, Callable[[Path], None]], state: Mapping[str, Any]
) -> Path:
    """Makes parent/name, e.g. "step-40". Each writer puts its files into the folder it is given.

    Killed at any instant, there is either the whole checkpoint or none. On any failure nothing is left behind.
    """
    parent.mkdir(parents=True, exist_ok=True)
    folder, final = parent / f"{UNFINISHED}{name}", parent / name
    shutil.rmtree(folder, ignore_errors=True)
    part = STATE
    try:
        folder.mkdir()
        (folder / STATE).write_text(json.dumps(state, sort_keys=True))
        for part in writers:
            writers[part](folder)
        part = MANIFEST
        _write_manifest(folder)
        for path in _tree(folder):
            _sync(path)
        _move_into_place(folder, final)
    except Exception as error:
        shutil.rmtree(folder, ignore_errors=True)
        if (problem := _disk_problem(error)) is None:
            raise
        raise UserError(_explain(problem, part, final, latest_checkpoint(parent))) from error
    return final


def read_checkpoint(folder: Path) -> dict[str, Any]:
    """The state of a checkpoint whose every part is present and unchanged. UserError names the first that is not."""
    advice = "Use an older checkpoint, or restore this one from a copy"
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        parts = manifest["parts"]
        is_intact = manifest["sha256"] == _digest_of_parts(parts)
    except FileNotFoundError:
        raise UserError(f"{folder} is not a complete checkpoint: {MANIFEST} is missing. {advice}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder}: {MANIFEST} is damaged ({error}). {advice}") from error
    if not is_intact:
        raise UserError(f"{folder}: {MANIFEST} is damaged (its checksum differs). {advice}")
    for relative, recorded in parts.items():
        path = folder / relative
        if not path.is_file():
            raise UserError(f"{folder}: part {relative} is missing. {advice}")
        if (size := path.stat().st_size) != recorded["size"]:
            raise UserError(f"{folder}: part {relative} has {size} bytes instead of {recorded['size']}. {advice}")
        if sha256_of(path) != recorded["sha256"]:
            raise UserError(f"{folder}: part {relative} is damaged (its checksum differs). {advice}")
    state: dict[str, Any] = json.loads((folder / STATE).read_bytes())
    return state


def list_checkpoints(parent: Path) -> list[Path]:
    """Finished checkpoints, oldest first: by the number at the end of the name, so step-9 comes before step-10."""
    found = [path for path in parent.glob("*-*") if _number(path) >= 0 and (path / MANIFEST).is_file()]
    return sorted(found, key=_number)


def latest_checkpoint(parent: Path) -> Path | None:
    """None when there is none."""
    checkpoints = list_checkpoints(parent)
    return checkpoints[-1] if checkpoints else None


def prune(parent: Path, keep: int) -> list[Path]:
    """Removes all but the newest `keep` checkpoints; returns what was removed."""
    assert keep >= 1, "the last checkpoint is never removed"
    old = list_checkpoints(parent)[:-keep]
    for path in old:
        # Renamed first: a run killed halfway through the removal must not leave something that looks like a checkpoint.
        leaving = path.with_name(f"{UNFINISHED}removed-{path.name}")
        path.rename(leaving)
        shutil.rmtree(leaving)
    return old


def remove_unfinished(parent: Path) -> list[Path]:
    """Clears what killed runs left. Call before the first write of a run, never beside a running one."""
    leftovers = sorted(parent.glob(f"{UNFINISHED}*"))
    for path in leftovers:
        shutil.rmtree(path)
    return leftovers


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _number(path: Path) -> int:
    tail = path.name.rpartition("-")[2]
    return int(tail) if tail.isdecimal() and not path.name.startswith(".") else -1


def _write_manifest(folder: Path) -> None:
    files = [path for path in _tree(folder) if path.is_file()]
    parts = {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": sha256_of(path)} for path in files
    }
    manifest = {"parts": parts, "sha256": _digest_of_parts(parts)}
    (folder / MANIFEST).write_text(json.dumps(manifest, sort_keys=True))


def _digest_of_parts(parts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _tree(folder: Path) -> Iterator[Path]:
    """Everything below, sorted, then the folder itself."""
    yield from sorted(folder.rglob("*"))
    yield folder


def _move_into_place(folder: Path, final: Path) -> None:
    """A checkpoint of the same name, from a run that was resumed further back, makes room."""
    replaced = final.with_name(f"{UNFINISHED}replaced-{final.name}")
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    folder.rename(final)
    _sync(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _disk_problem(error: BaseException) -> str | None:
    """What the disk refused, or None when the failure is not the disk's. Libraries in Rust and C++ hide the number."""
    text = str(error)
    number = getattr(error, "errno", None)
    if number in (errno.ENOSPC, errno.EDQUOT) or "No space left" in text or "os error 28" in text:
        return "disk full"
    return f"{text}" if isinstance(error, OSError) else None


def _explain(problem: str, part: str, final: Path, previous: Path | None) -> str:
    intact = f"the previous checkpoint {previous.name} is intact" if previous else "there is no earlier checkpoint"
    remedy = "free space and resume" if problem == "disk full" else "mend it and resume"
    return f"{problem} while saving {part} of {final}; {intact}; {remedy}"
