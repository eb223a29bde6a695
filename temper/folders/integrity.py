"""Model directories that are what they were when they were written, and that hold no code.

Owns: manifests (sha256 of every part) and their verification, and the refusal of code that came with a checkpoint.
Refuses: reading models. Imports nothing heavy: `report` verifies without torch.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from temper.errors import UserError

MANIFEST = "manifest.json"
STATE = "state.json"
TRAINING = "trainer/"
"""Parts of a checkpoint that only a resume reads: moments and master weights, most of its bytes."""
ADVICE = "Use an older checkpoint, or restore this one from a copy"
CODE_KEYS = ("config.json", "tokenizer_config.json", "processor_config.json", "generation_config.json")
"""Files in which `auto_map` names classes in Python files beside them."""
CODE_ENDINGS = (".py", ".pyc", ".so")
HASHING_THREADS = 4

_verified: dict[Path, frozenset[tuple[str, int, int, int]]] = {}
"""Directories this process has verified, with what their files were then: each is hashed once, not by every reader."""
_verifying = threading.Lock()


def verify(folder: Path, *, to_resume: bool = False) -> None:
    """UserError when a model directory holds code, or is a checkpoint of Temper's that is not what was written.

    to_resume: it must be a checkpoint, and what only a resume reads is hashed, too; else only its sizes are compared.
    """
    refuse_code(folder)
    if not (to_resume or is_own(folder)):
        return
    place, before = folder.resolve(), _signature(folder)
    with _verifying:
        if to_resume or _verified.get(place) != before:
            verify_manifest(folder, lambda part: to_resume or not part.startswith(TRAINING))
            _verified[place] = before


def refuse_code(folder: Path) -> None:
    """A checkpoint is data. What came with code of its own is refused before any of it could run."""
    advice = (
        "Temper never runs code from a checkpoint. If transformers itself implements this model, use a copy without "
        "such files and without auto_map"
    )
    for name in CODE_KEYS:
        if (folder / name).is_file() and (found := _read_json(folder / name).get("auto_map")):
            raise UserError(f"{folder / name} names code: auto_map {str(found)[:120]}. {advice}")
    if code := [path.relative_to(folder).as_posix() for path in _files(folder) if path.suffix in CODE_ENDINGS]:
        raise UserError(f"{folder} holds code: {', '.join(code[:3])}. {advice}")


def is_own(folder: Path) -> bool:
    """Whether Temper wrote this directory with a manifest: by what it holds or, should that be lost, by its place."""
    if (folder / STATE).is_file() or "parts" in _read_json(folder / MANIFEST):
        return True
    run = folder.resolve().parents[2:3]
    is_placed = re.fullmatch(r"step-\d+", folder.name) and folder.resolve().parent.parent.name == "checkpoints"
    return bool(is_placed and run and (run[0] / "run.db").is_file())


def write_manifest(folder: Path) -> None:
    """Over everything in the folder."""
    parts = {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": sha256_of(path)}
        for path in _files(folder)
        if path != folder / MANIFEST
    }
    manifest = {"parts": parts, "sha256": _digest_of_parts(parts)}
    (folder / MANIFEST).write_text(json.dumps(manifest, sort_keys=True))


def verify_manifest(folder: Path, is_hashed: Callable[[str], bool] = lambda part: True) -> None:
    """UserError names the first part that is missing, changed, or not in the manifest at all."""
    parts = _read_manifest(folder)
    for relative, recorded in parts.items():
        path = folder / relative
        if not path.is_file():
            raise UserError(f"{folder}: part {relative} is missing. {ADVICE}")
        if (size := path.stat().st_size) != recorded["size"]:
            raise UserError(f"{folder}: part {relative} has {size} bytes instead of {recorded['size']}. {ADVICE}")
    hashed = [relative for relative in parts if is_hashed(relative)]
    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        found = pool.map(sha256_of, [folder / relative for relative in hashed])
        for relative, digest in zip(hashed, found, strict=True):
            if digest != parts[relative]["sha256"]:
                raise UserError(f"{folder}: part {relative} is damaged (its checksum differs). {ADVICE}")
    present = {path.relative_to(folder).as_posix() for path in _files(folder)}
    if extra := sorted(present - parts.keys() - {MANIFEST}):
        raise UserError(
            f"{folder}: {', '.join(extra[:3])} is not in {MANIFEST}: it was added after the checkpoint was written and "
            f"could change how it is read. Move it elsewhere"
        )


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        parts: dict[str, Any] = manifest["parts"]
        is_intact = manifest["sha256"] == _digest_of_parts(parts)
    except FileNotFoundError:
        raise UserError(f"{folder} is not a complete checkpoint: {MANIFEST} is missing. {ADVICE}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder}: {MANIFEST} is damaged ({error}). {ADVICE}") from error
    if not is_intact:
        raise UserError(f"{folder}: {MANIFEST} is damaged (its checksum differs). {ADVICE}")
    return parts


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_of_parts(parts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _files(folder: Path) -> Iterator[Path]:
    """Every file below, sorted. Those of the desktop and of network file systems begin with a dot and mean nothing."""
    hidden = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return (path for path in hidden if not path.name.startswith((".DS_Store", ".nfs")))


def _signature(folder: Path) -> frozenset[tuple[str, int, int, int]]:
    facts = [(str(path), path.stat()) for path in _files(folder)]
    return frozenset((name, fact.st_size, fact.st_mtime_ns, fact.st_ino) for name, fact in facts)


def _read_json(path: Path) -> dict[str, Any]:
    """Empty when it is not there or not a table: whoever reads the file in earnest says what is wrong with it."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
