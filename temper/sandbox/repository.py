"""The files that a task brings, and what became of them, as text that a rollout can carry to its reward.

Owns: reading a task's files, writing changes down, applying them. Refuses: paths that no folder can hold, and more than
MAX_BYTES: a policy or an agent wrote what is read here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import PurePosixPath

from temper.errors import TaskError
from temper.sandbox.program import MAX_FILES, is_inside
from temper.types import Task

MAX_BYTES = 4 << 20
"""Most that all contents together may have: each path needs a page of the sandbox's disk besides."""
MAX_PATH_BYTES, MAX_NAME_BYTES = 1024, 255

Files = Mapping[str, bytes]


def has_repository(task: Task) -> bool:
    return "files" in task.columns or "files" in task.extra


def read_repository(task: Task) -> dict[str, bytes]:
    """The column "files" of a task: texts by path, as a table or as JSON. Raises TaskError."""
    given = task.columns.get("files", task.extra.get("files"))
    try:
        texts = json.loads(given) if isinstance(given, str) else given
        if not isinstance(texts, dict) or not texts:
            raise ValueError(f"it has {given!r:.60}")
        return apply_changes({}, json.dumps(texts))
    except (ValueError, RecursionError) as error:
        raise TaskError(f'task {task.id} needs "files", texts by path: {error}') from error


def write_changes(before: Files, after: Files) -> str:
    """What changed, as JSON: text by path, null for what is gone. Bytes that are no text become half characters."""
    changed = {path: as_text(content) for path, content in after.items() if before.get(path) != content}
    gone = dict.fromkeys(path for path in before if path not in after)
    return json.dumps({**changed, **gone}, sort_keys=True)


def apply_changes(before: Files, changes: str) -> dict[str, bytes]:
    """The files after the changes. Raises ValueError with what is wrong with them."""
    given = json.loads(changes)
    if not isinstance(given, dict):
        raise ValueError("changes are texts by path")
    after = dict(before)
    for path, text in given.items():
        if (problem := path_problem(path)) is not None:
            raise ValueError(problem)
        if text is None:
            after.pop(path, None)
        elif isinstance(text, str):
            after[path] = as_bytes(text)
        else:
            raise ValueError(f"{path!r:.80} holds {text!r:.40}, which is no text")
    if len(after) > MAX_FILES or sum(map(len, after.values())) > MAX_BYTES:
        raise ValueError(f"there are more than {MAX_FILES} files or {MAX_BYTES >> 20} MiB")
    if below := next((path for path in after if any(str(part) in after for part in PurePosixPath(path).parents)), None):
        raise ValueError(f"{below!r:.80} lies below a file")
    return after


def path_problem(path: str) -> str | None:
    """Why no file can have this path, or None."""
    raw = as_bytes(path)
    is_short = len(raw) <= MAX_PATH_BYTES and all(len(part) <= MAX_NAME_BYTES for part in raw.split(b"/"))
    is_written_once = str(PurePosixPath(path)) == path  # "a//b" and "./a" would be second names of a file
    if is_inside(path) and is_short and is_written_once:
        return None
    return f"{path!r:.80} is no path of a file: it must be relative, without '..', and not too long"


def as_text(content: bytes) -> str:
    return content.decode(errors="surrogateescape")


def as_bytes(text: str) -> bytes:
    try:
        return text.encode(errors="surrogateescape")
    except UnicodeEncodeError:  # half a character that never was a byte
        return text.encode(errors="surrogatepass")
