"""What people write beside a run: tags and a note, in notes.json of its directory.

Owns: that file and its limits. Refuses: run.db; whoever writes a note never waits for training, nor training for them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from temper.errors import UserError

FILE = "notes.json"
MOST_TAGS, MOST_TAG_LETTERS, MOST_NOTE_LETTERS = 20, 40, 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class RunNotes:
    tags: tuple[str, ...] = ()
    note: str = ""
    """Untrusted, like the tags: whoever shows them escapes them."""


def make_notes(tags: Iterable[str], note: str) -> RunNotes:
    """Tags without blanks around them, each once, in the order given."""
    kept = tuple(dict.fromkeys(tag for tag in (" ".join(tag.split()) for tag in tags) if tag))
    if len(kept) > MOST_TAGS:
        raise UserError(f"{len(kept)} tags are too many; a run has at most {MOST_TAGS}")
    for tag in kept:
        if len(tag) > MOST_TAG_LETTERS or "," in tag:
            raise UserError(f"the tag {tag[:60]!r} is not one: at most {MOST_TAG_LETTERS} letters, and no comma")
    if len(note) > MOST_NOTE_LETTERS:
        raise UserError(f"the note has {len(note):,} letters; at most {MOST_NOTE_LETTERS:,} are kept")
    return RunNotes(tags=kept, note=note.strip())


def read_notes(folder: Path) -> RunNotes:
    """Nothing was written: no tags and an empty note. A file that is something else raises."""
    path = folder / FILE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return RunNotes()
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error}). Mend it or remove it") from error
    tags, note = (found.get("tags"), found.get("note")) if isinstance(found, dict) else (None, None)
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags) or not isinstance(note, str):
        raise UserError(f'{path} is no {{"tags": [texts], "note": text}}. Mend it or remove it')
    return RunNotes(tags=tuple(tags), note=note)


def write_notes(folder: Path, notes: RunNotes) -> None:
    """In one piece: a reader sees the old file or the new one. A damaged file is not written over."""
    read_notes(folder)
    path = folder / FILE
    aside = path.with_name(f".{FILE}.{os.getpid()}")
    try:
        aside.write_text(json.dumps(asdict(notes), ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise UserError(f"{path} cannot be written ({error.strerror})") from error
