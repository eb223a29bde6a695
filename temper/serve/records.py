"""What was drawn for whom, kept exactly: one SQLite row per completion, written in one transaction.

Owns: the file, finding the exchange that a prompt goes on from, reading back. Refuses: text as a source of token ids.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from temper.errors import BackendError, UserError
from temper.storable import storable
from temper.types import Completion, Finish, Message, SamplingParams, Turn

FORMAT = 2
WAIT_SECONDS = 10.0
SCHEMA = """
CREATE TABLE IF NOT EXISTS completions (
  id INTEGER PRIMARY KEY,
  request_id TEXT NOT NULL,
  choice INTEGER NOT NULL,
  session TEXT NOT NULL,
  model TEXT NOT NULL,
  created REAL NOT NULL,
  parent INTEGER,           -- the row whose prompt and drawn ids this prompt begins with
  history TEXT NOT NULL,    -- new, extends, or fork: why
  messages TEXT NOT NULL,   -- what was said since the parent, as JSON; without one, everything
  reply TEXT NOT NULL,      -- the answer as text, stop texts cut off, tool calls not taken out
  said TEXT NOT NULL,       -- the answer with special tokens, the end of turn left out
  completion TEXT NOT NULL, -- prompt ids, drawn ids, log-probabilities, versions, finish ... as JSON
  reply_key TEXT,           -- of the conversation including this answer
  num_messages INTEGER NOT NULL, -- of the conversation including this answer; 0 of a plain completion
  text_length INTEGER NOT NULL,
  text_hash TEXT NOT NULL,  -- of prompt and drawn text, special tokens included
  tokenizer TEXT NOT NULL,  -- hashes of what ids mean and of how messages become text; empty: not known
  template TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS scores ( -- given afterwards; episodes.py
  last INTEGER PRIMARY KEY, -- the newest completion of what was judged: one that goes on has no score any more
  kind TEXT NOT NULL,
  value REAL,
  reason TEXT,
  judge TEXT NOT NULL,      -- who gave it
  created REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS completions_by_reply ON completions (session, reply_key);
CREATE INDEX IF NOT EXISTS completions_by_length ON completions (session, text_length);
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speech:
    """How a model reads and writes, as hashes: equal ones mean the same by the same ids."""

    tokenizer: str = ""
    """Empty: not known; the same below."""
    template: str = ""

    @staticmethod
    def of(tokenizer: Any) -> Speech:
        """Every id with its token, and the chat template. What a file holds beside that changes when it is saved."""
        template = tokenizer.chat_template or ""
        return Speech(
            tokenizer=hash_of(json.dumps(sorted(tokenizer.get_vocab().items()))),
            template=hash_of(template if isinstance(template, str) else json.dumps(template, sort_keys=True)),
        )


UNKNOWN_SPEECH = Speech()


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOrigin:
    """How a prompt came about."""

    history: str = "new"
    """new, extends, or fork: why."""
    parent: int | None = None
    messages: tuple[Message, ...] = ()
    """Messages since the parent; without a parent, all. Empty for prompts that were not a chat."""
    text: str = ""
    """The prompt as text, special tokens included."""
    num_messages: int = 0
    """Messages of the whole conversation that was sent; 0: it was not a chat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One completion to be recorded."""

    request_id: str
    choice: int
    session: str
    model: str
    created: float
    origin: PromptOrigin
    reply: str
    said: str
    drawn_text: str
    """All drawn ids as text, special tokens included."""
    reply_key: str | None
    completion: Completion


@dataclass(frozen=True, slots=True, kw_only=True)
class Parent:
    """The exchange that a prompt goes on from."""

    row: int
    ids: tuple[int, ...]
    """Its prompt and what was drawn."""
    text_length: int
    num_messages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One completion read back."""

    id: int
    request_id: str
    choice: int
    session: str
    """Empty: the client named none."""
    model: str
    created: float
    parent: int | None
    history: str
    messages: tuple[Message, ...]
    speech: Speech
    turn: Turn
    """Its replies are what the first recorded prompt that goes on from here added."""


class Records(Protocol):
    """Where completions are kept, and found again by what was said."""

    def add(self, entry: Entry) -> int:
        """Keeps one completion; returns its number."""
        ...

    def said(self, session: str, keys: Sequence[str]) -> Mapping[str, str]:
        """What the model really said in each of these conversations that is known, by key."""
        ...

    def parent_of(self, session: str, text: str) -> Parent | None:
        """The longest exchange of the session that this text begins with."""
        ...

    def close(self) -> None: ...


class RecordFile:
    """Implements Records: one file. Every call must come from one thread at a time."""

    def __init__(self, path: Path, speech: Speech = UNKNOWN_SPEECH) -> None:
        """speech: of the model that draws; what is recorded without it is not trained on."""
        self._path, self._speech = path, speech
        path.parent.mkdir(parents=True, exist_ok=True)
        self._connection = open_records(path)
        try:
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.executescript(SCHEMA)
            self._connection.execute(f"PRAGMA user_version={FORMAT}")
        except sqlite3.Error as error:
            self._connection.close()
            raise UserError(f"--record {path} cannot be written: {error}") from error

    def add(self, entry: Entry) -> int:
        """Writes one completion, all of it or nothing; returns its row."""
        origin, whole = entry.origin, entry.origin.text + entry.drawn_text
        values = {
            "request_id": entry.request_id,
            "choice": entry.choice,
            "session": entry.session,
            "model": entry.model,
            "created": entry.created,
            "parent": origin.parent,
            "history": origin.history,
            "messages": json.dumps([dataclasses.asdict(message) for message in origin.messages]),
            "reply": entry.reply,
            "said": entry.said,
            "completion": json.dumps(dataclasses.asdict(entry.completion), default=list),  # columns
            "reply_key": entry.reply_key,
            "num_messages": origin.num_messages and origin.num_messages + 1,
            "text_length": len(whole),
            "text_hash": hash_of(whole),
            "tokenizer": self._speech.tokenizer,
            "template": self._speech.template,
        }
        names, marks = ", ".join(values), ", ".join(f":{name}" for name in values)
        try:
            with self._connection:
                stored = {name: storable(value) for name, value in values.items()}
                row = self._connection.execute(f"INSERT INTO completions ({names}) VALUES ({marks})", stored).lastrowid
        except sqlite3.Error as error:
            raise BackendError(f"--record {self._path} cannot be written any more: {error}") from error
        assert row is not None, "an inserted row has a number"
        return row

    def said(self, session: str, keys: Sequence[str]) -> Mapping[str, str]:
        found: dict[str, str] = {}
        for key in keys:  # one by one through the index: a conversation may have more turns than SQLite has parameters
            query = "SELECT said FROM completions WHERE session = ? AND reply_key = ? ORDER BY id DESC LIMIT 1"
            if (row := self._connection.execute(query, (session, key)).fetchone()) is not None:
                found[key] = row[0]
        return found

    def parent_of(self, session: str, text: str) -> Parent | None:
        query = (
            "SELECT id, text_length, text_hash, num_messages FROM completions WHERE session = ? AND text_length <= ? "
            "ORDER BY text_length DESC, id DESC"
        )
        hashes: dict[int, str] = {}
        for row, length, known, num_messages in self._connection.execute(query, (session, len(text))):
            if length not in hashes:
                hashes[length] = hash_of(text[:length])
            if hashes[length] == known:
                completion = self._completion(row)
                ids = (*completion.prompt_ids, *completion.token_ids)
                return Parent(row=row, ids=ids, text_length=length, num_messages=num_messages)
        return None

    def close(self) -> None:
        self._connection.close()

    def _completion(self, row: int) -> Completion:
        found = self._connection.execute("SELECT completion FROM completions WHERE id = ?", (row,)).fetchone()
        return completion_of(json.loads(found[0]))


def read_records(path: Path, session: str | None = None) -> list[Recorded]:
    """Everything recorded, or one session, in the order it was finished. Safe while a server writes."""
    if not path.is_file():
        raise UserError(f"{path} is no file of records. Make one with temper serve --record {path}")
    connection = open_records(path)
    connection.row_factory = sqlite3.Row
    where, values = ("", ()) if session is None else (" WHERE session = ?", (session,))
    try:
        rows = connection.execute(f"SELECT * FROM completions{where} ORDER BY id", values).fetchall()
    except sqlite3.Error as error:
        raise UserError(f"{path} is no file of records: {error}") from error
    finally:
        connection.close()
    replies: dict[int, tuple[Message, ...]] = {}
    for row in rows:
        if row["parent"] is not None:
            replies.setdefault(row["parent"], _messages(row["messages"]))
    return [_recorded(row, replies.get(row["id"], ())) for row in rows]


def completion_of(stored: Mapping[str, Any]) -> Completion:
    """A Completion from its JSON form, to the bit: Python writes floats so that they read back as they were."""
    params = stored["params"]
    if params is not None:
        params = SamplingParams(**{**params, "stop_ids": tuple(params["stop_ids"]), "stop": tuple(params["stop"])})
    injected = stored.get("injected", ())  # places in a row, which JSON holds one by one; old records have none
    changed = {"prompt_ids": tuple(stored["prompt_ids"]), "finish": Finish(stored["finish"]), "params": params}
    changed["injected"] = range(injected[0], injected[-1] + 1) if injected else range(0)
    return Completion(**{**stored, **changed})


def hash_of(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _recorded(row: sqlite3.Row, replies: tuple[Message, ...]) -> Recorded:
    said = Message(role="assistant", content=row["reply"])
    same = ("id", "request_id", "choice", "session", "model", "created", "parent", "history")
    return Recorded(
        **{name: row[name] for name in same},
        messages=_messages(row["messages"]),
        speech=Speech(tokenizer=row["tokenizer"], template=row["template"]),
        turn=Turn(completion=completion_of(json.loads(row["completion"])), message=said, replies=replies),
    )


def _messages(text: str) -> tuple[Message, ...]:
    return tuple(Message(**message) for message in json.loads(text))


def open_records(path: Path) -> sqlite3.Connection:
    """Refuses files that are something else, so that a mistyped path is not written to."""
    try:
        connection = sqlite3.connect(path, timeout=WAIT_SECONDS, check_same_thread=False)
        found = connection.execute("PRAGMA user_version").fetchone()[0]
    except sqlite3.Error as error:
        raise UserError(f"{path} cannot be opened as a file of records: {error}. Give a new file") from error
    if found not in (0, FORMAT) or (found == 0 and _has_tables(connection)):
        connection.close()
        raise UserError(f"{path} is not a file of records of this version of Temper. Give a new file")
    return connection


def _has_tables(connection: sqlite3.Connection) -> bool:
    return bool(connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone())
