"""Checkpoint directories that are either complete and verified, or not there.

A checkpoint is written aside, fsynced, given a manifest with the sha256 of every part, and renamed into place last.
Owns: atomicity, the order of checkpoints. Refuses: verification (folders/integrity.py); knowing what is inside, which
writers fill in.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from temper.errors import DiskFull, UserError, is_disk_full
from temper.folders.integrity import MANIFEST, STATE, verify, write_manifest

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
        write_manifest(folder)
        for path in _tree(folder):
            _sync(path)
        _move_into_place(folder, final)
    except Exception as error:
        shutil.rmtree(folder, ignore_errors=True)
        if is_disk_full(error):
            raise DiskFull(_explain("disk full", part, final, latest_checkpoint(parent))) from error
        if isinstance(error, OSError):
            why = _explain(str(error), part, final, latest_checkpoint(parent))
            raise UserError(f"{why}; mend it and resume") from error
        raise
    return final


def read_checkpoint(folder: Path) -> dict[str, Any]:
    """The state of a checkpoint whose every part is present and unchanged. UserError names the first that is not."""
    verify(folder, to_resume=True)
    state: dict[str, Any] = json.loads((folder / STATE).read_bytes())
    return state


def list_checkpoints(parent: Path) -> list[Path]:
    """Finished checkpoints, oldest first: by the number at the end of the name, so step-9 comes before step-10.

    UserError names one without its manifest. It was damaged, for a checkpoint gets its name last; skipped, a run would
    go on from an older one and nobody would know.
    """
    found = sorted((path for path in parent.glob("*-*") if _number(path) >= 0 and path.is_dir()), key=_number)
    for path in found:
        if not (path / MANIFEST).is_file():
            raise UserError(
                f"{path} is not a complete checkpoint: {MANIFEST} is missing. Restore it from a copy, or remove the "
                f"directory to go on from the checkpoint before it"
            )
    return found


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


def _number(path: Path) -> int:
    """Number at the end of the name. -1: not a checkpoint, such as the merged copy of one."""
    found = re.fullmatch(r"[^.-][^-]*-(\d+)", path.name)
    return int(found[1]) if found else -1


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


def _explain(problem: str, part: str, final: Path, previous: Path | None) -> str:
    intact = f"the previous checkpoint {previous.name} is intact" if previous else "there is no earlier checkpoint"
    return f"{problem} while saving {part} of {final}; {intact}"
