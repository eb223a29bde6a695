"""Results of `temper eval` kept with a run. Owns: reading them, and the reason why one cannot be read.

Refuses: leaving such a file out: a missing bar would be taken for a missing evaluation.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

FOLDER = "evaluations"
"""Folder of a run that holds its results."""
FORMAT = 1
"""The same as FORMAT of runs/results.py, which imports torch: a dashboard must start without."""
KEYS = ("suite", "checkpoint", "weights_sha256", "created", "budget", "constant_score", "metrics")


def suites(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """Results, oldest first; and the files that are not results, each as {"file", "reason"}, by name."""
    found: list[dict[str, Any]] = []
    unreadable: list[dict[str, str]] = []
    for path in sorted((folder / FOLDER).glob("*.json")):
        try:
            facts = path.stat()
            found.append(_suite(path, facts.st_mtime_ns, facts.st_size))
        except OSError as error:
            unreadable.append({"file": path.name, "reason": f"it cannot be opened ({error.strerror})"})
        except _NoResult as error:
            unreadable.append({"file": path.name, "reason": str(error)})
    return sorted(found, key=lambda result: float(result["created"])), unreadable


class _NoResult(Exception):
    """The file holds something else, or not all of it. The text is the reason."""


@lru_cache(maxsize=64)
def _suite(path: Path, changed: int, size: int) -> dict[str, Any]:
    """One result without what the model said. Kept as long as the file stays as it is: it may have megabytes."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise _NoResult(f"it is not JSON ({error})") from error
    if not isinstance(result, dict) or result.get("format") != FORMAT:
        held = result.get("format") if isinstance(result, dict) else None
        raise _NoResult(f"it is not a result of temper eval in format {FORMAT} (found {held!r:.40})")
    try:
        return {"file": path.name, **_shown(result)}
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise _NoResult(f"it is a damaged result of temper eval ({type(error).__name__}: {error})") from error


def _shown(result: dict[str, Any]) -> dict[str, Any]:
    prompts = [
        {"task_id": prompt["task_id"], "scores": [sample["score"] for sample in prompt["samples"]]}
        for prompt in result["prompts"]
    ]
    curves: dict[str, list[dict[str, Any]]] = {}
    for name, values in result["metrics"].items():
        kind, _, k = name.replace("^", "^@").partition("@")
        if k.isdecimal():
            curves.setdefault(kind, []).append({"k": int(k), **values})
    curves = {kind: sorted(points, key=lambda point: int(point["k"])) for kind, points in curves.items()}
    shown = {key: result[key] for key in KEYS}
    return {**shown, "created": float(result["created"]), "curves": curves, "prompts": prompts}
