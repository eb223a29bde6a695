"""Where tasks come from, and in which order: files, and the seeded stream that a resumed run continues exactly.

Owns: rows with a prompt and its gold answer, mixtures, permutations, keeping held-out prompts out. Refuses: formats of
files (files.py), all other shapes of rows (schemas.py), tokens (render.py).
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol, cast

from temper.errors import UserError, did_you_mean
from temper.tasks.files import rows_of
from temper.tasks.schemas import ROLES, BadRow, Schema, read_tools, schema_of
from temper.types import Message, Scalar, Task

MAX_NAMED = 20
"""Most bad rows of a file that one message names."""
MAX_SKIPS = 10_000
"""Held-out tasks in a row after which an unbounded generator is taken to make nothing else."""

State = Mapping[str, Scalar | list[Scalar]]


class TaskSource(Protocol):
    """Numbered tasks. The same index is the same task, always."""

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int | None:
        """How many tasks there are; None: an unbounded generator."""
        ...

    def task(self, index: int) -> Task: ...


@dataclass(frozen=True, slots=True)
class FileSource:
    """The rows of a file, all in memory."""

    name: str
    tasks: tuple[Task, ...]
    skipped: tuple[str, ...] = ()
    """Rows that were left out because nothing can be learned from them: place and reason of each."""

    @property
    def size(self) -> int | None:
        return len(self.tasks)

    def task(self, index: int) -> Task:
        return self.tasks[index]


@dataclass(frozen=True, slots=True)
class NamedSource:
    """A source whose tasks bear its label, where a stage tells its sources apart."""

    source: TaskSource
    label: str

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def size(self) -> int | None:
        return self.source.size

    def task(self, index: int) -> Task:
        return replace(self.source.task(index), source=self.label)


def read_file(
    path: Path,
    prompt_field: str = "prompt",
    answer_field: str = "answer",
    answer_pattern: str = "",
    size: int = 0,
    skip_bad: bool = False,
) -> FileSource:
    """Reads a .jsonl, .json or .parquet file, a folder that `datasets` saved, or a data set of the hub. Every row is
    checked now, so that row 40,000 cannot end a run on its second day.

    Rows have the columns `prompt_field` and `answer_field`; or, where these are left as they are, a shape that
    schemas.py knows. answer_field "" means that there are no gold answers. size 0 means every row.
    `skip_bad` leaves rows out that cannot be trained; the source names them.
    """
    pattern = _compile(answer_pattern, path) if answer_pattern else None
    name = path.name if path.exists() else str(path)  # a data set of the hub's: "owner/name:split"
    tasks: list[Task] = []
    bad: list[str] = []
    schema: Schema | None = None
    for row in rows_of(path):
        if size and len(tasks) == size:
            break
        task_id = f"{name}:{row.number}"
        try:
            if not tasks and not bad:
                schema = _schema(row.content, prompt_field, answer_field)
            if schema is None:
                tasks.append(_task(task_id, row.content, prompt_field, answer_field, pattern))
            else:
                tasks.append(_task_of_schema(task_id, row.content, schema, pattern))
        except BadRow as error:
            bad.append(f"{row.place}: {error}")
    if bad and not skip_bad:
        raise UserError(f"{path}, {bad[0]}{_further(bad[1:])}")
    if not tasks:
        raise UserError(f"{path}: the file has no rows. Give a file with at least one task.")
    if len(tasks) < size:
        raise UserError(
            f"{path}: size={size} is more than its {len(tasks)} tasks. Use size = {len(tasks)}, or 0 for all."
        )
    return FileSource(name, tuple(tasks), tuple(bad))


def _further(bad: Sequence[str]) -> str:
    """Names the other bad rows, so that a file is mended in one go and not in one go per row."""
    if not bad:
        return ""
    places = ", ".join(text.partition(":")[0] for text in bad[:MAX_NAMED])
    return f"\n{len(bad)} more rows are bad: {places}{', ...' if len(bad) > MAX_NAMED else ''}."


def _schema(row: Any, prompt_field: str, answer_field: str) -> Schema | None:
    """What the file's first row says about all of them. None: a prompt and a gold answer, in columns that are named."""
    is_named = (prompt_field, answer_field) != ("prompt", "answer")
    if is_named or not isinstance(row, dict) or {prompt_field, answer_field} <= row.keys():
        return None
    if set(row) == {prompt_field}:
        return None  # the message about a missing answer says what to do
    return schema_of(row)


def _task_of_schema(task_id: str, row: Any, schema: Schema, pattern: re.Pattern[str] | None) -> Task:
    if (own := schema_of(row)).name != schema.name:
        raise BadRow(
            f"the row is of schema {own.name} {own.columns}, and those before it are of schema {schema.name} "
            f"{schema.columns}. Use one file for each."
        )
    task = schema.task(task_id, row)
    if pattern is None:
        return task
    if schema.name in ("pair", "steps"):
        raise BadRow(f"answer_pattern finds one gold answer, and rows of schema {schema.name} have none. Leave it out.")
    return replace(task, answer=_answer(task.answer, "answer", pattern))


def _task(task_id: str, row: Any, prompt_field: str, answer_field: str, pattern: re.Pattern[str] | None) -> Task:
    if not isinstance(row, dict):
        raise BadRow(f'the row is {row!r:.60}, not an object. Write {{"{prompt_field}": ..., "{answer_field}": ...}}.')
    messages = _messages(_column(row, prompt_field, "prompt_field"), prompt_field)
    answer = None
    if answer_field:
        answer = _answer(_column(row, answer_field, "answer_field"), answer_field, pattern)
    rest = {
        key: value
        for key, value in row.items()
        if key not in (prompt_field, answer_field) and isinstance(value, (str, int, float, bool))
    }
    extra = {**rest, **read_tools(row.get("tools"))}
    # References, no copies: also the whole of a column of which answer_pattern took a part.
    columns = {name: value for name, value in row.items() if name not in ("prompt", "answer", *extra)}
    return Task(id=task_id, messages=messages, answer=answer, extra=extra, columns=columns)


def _column(row: dict[str, Any], name: str, setting: str) -> Any:
    if name in row:
        return row[name]
    hint = ' or to "" when there are no gold answers' if setting == "answer_field" else ""
    raise BadRow(
        f'there is no column "{name}".{did_you_mean(name, row)} Columns: {", ".join(row) or "none"}. '
        f"Set {setting} to one of them{hint}."
    )


def _messages(prompt: Any, field: str) -> tuple[Message, ...]:
    if isinstance(prompt, str):
        if not prompt.strip():
            raise BadRow(f'"{field}" is empty. Remove the row or give it a prompt.')
        return (Message(role="user", content=prompt),)
    if not isinstance(prompt, list) or not prompt:
        raise BadRow(f'"{field}" is {prompt!r:.60}; it must be text or a list of {{role, content}}.')
    for message in prompt:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise BadRow(f'"{field}" holds {message!r:.60}; each message must be {{"role": ..., "content": text}}.')
        if message.get("role") not in ROLES:
            raise BadRow(f'"{field}" has role {message.get("role")!r}; allowed: {", ".join(ROLES)}.')
    if prompt[-1]["role"] == "assistant":
        raise BadRow(f'"{field}" ends with an assistant message; it must end with one the model is to answer.')
    return tuple(Message(role=message["role"], content=message["content"]) for message in prompt)


def _answer(value: Any, field: str, pattern: re.Pattern[str] | None) -> str | None:
    if value is None:
        return None
    if not isinstance(value, (str, int, float)):
        raise BadRow(f'"{field}" is {value!r:.60}; it must be text or a number.')
    text = str(value)
    if pattern is None:
        return text.strip()
    found = pattern.search(text)
    if found is None or found.group(1) is None:
        raise BadRow(f'"{field}" does not match answer_pattern {pattern.pattern!r}: it ends in {text[-60:]!r}.')
    return found.group(1).strip()


def _compile(pattern: str, path: Path) -> re.Pattern[str]:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise UserError(f"{path}: answer_pattern {pattern!r} is not a regular expression: {error}.") from error
    if compiled.groups < 1:
        raise UserError(
            f'{path}: answer_pattern {pattern!r} has no group. Put the answer in parentheses, e.g. "#### (.+)".'
        )
    return compiled


def fingerprint(task: Task) -> str:
    """Equal for tasks that ask the same thing, whatever their id, spacing or Unicode form."""
    parts = [
        [message.role, " ".join(unicodedata.normalize("NFC", message.content).split())] for message in task.messages
    ]
    if "episode_seed" in task.extra:  # what is asked is hidden in the environment's state, not in its words
        parts.append(["episode", str(task.extra["episode_seed"])])
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def asks_one_of(task: Task, excluded: Collection[str]) -> bool:
    """Whether a task is one of these fingerprints, or a conversation that answers one of them."""
    if not excluded:
        return False
    roles = [message.role for message in task.messages]
    asked = replace(task, messages=task.messages[: roles.index("assistant")]) if "assistant" in roles[1:] else task
    return fingerprint(task) in excluded or (asked is not task and fingerprint(asked) in excluded)


def take_all(sources: Iterable[TaskSource]) -> tuple[Task, ...]:
    """Every task of bounded sources without repeated prompts, e.g. the held-out set."""
    unique: dict[str, Task] = {}
    for source in sources:
        assert source.size is not None, "an unbounded source cannot be read to its end"
        for index in range(source.size):
            task = source.task(index)
            unique.setdefault(fingerprint(task), task)
    return tuple(unique.values())


class Stream:
    """An endless mixture of sources. What draw k is depends on the seed and k alone, never on when it is asked for.

    Each draw picks a source by weight, from a hash of (seed, k), and takes that source's next task. A bounded source is
    walked in a new seeded permutation per epoch, an unbounded one in order. The state is one number per source.
    """

    def __init__(
        self, sources: Sequence[TaskSource], weights: Sequence[float], seed: int, excluded: Collection[str] = ()
    ) -> None:
        assert len(sources) == len(weights) > 0, "a stream needs sources, each with a weight"
        self.sources = tuple(sources)
        self.weights = tuple(weights)
        self.seed = seed
        self._excluded = frozenset(excluded)
        self._draws = 0
        self._positions = [0] * len(sources)
        self._orders: dict[int, tuple[int, list[int]]] = {}
        self.index = -1
        """Of the task that was taken last, in its source."""

    @property
    def num_draws(self) -> int:
        """Draws so far, which is also the number of the next."""
        return self._draws

    def next(self) -> tuple[int, Task]:
        """The number of this draw, from 0, and its task."""
        task = self.take(self.pick(self.weights))
        return self.finish_draw(), task

    def pick(self, weights: Sequence[float]) -> int:
        """Place of the source that this draw is from, where sources have these weights."""
        share = random.Random(f"{self.seed}/draw/{self._draws}").random()
        bounds = [bound / sum(weights) for bound in accumulate(weights)]
        last = max(place for place, weight in enumerate(weights) if weight > 0)  # rounding may leave a gap below 1
        return next((place for place, bound in enumerate(bounds) if share < bound), last)

    def finish_draw(self) -> int:
        """Counts the draw; returns its number."""
        self._draws += 1
        return self._draws - 1

    def state(self) -> dict[str, Scalar | list[Scalar]]:
        return {"draws": self._draws, "positions": [*self._positions], "sources": [*self._names()]}

    def load_state(self, state: State) -> None:
        """Continues where state() was taken. Other data than it was taken from is an error, not a silent restart."""
        if state["sources"] != self._names():
            raise UserError(
                f"the checkpoint was trained on {state['sources']}, the recipe now gives {self._names()}. "
                "Resume with the same training sources, or start a new run."
            )
        self._draws = cast(int, state["draws"])
        self._positions = [int(position) for position in cast(list[Scalar], state["positions"])]

    def _names(self) -> list[str]:
        return [f"{source.name} ({'unbounded' if source.size is None else source.size})" for source in self.sources]

    def reach(self, chosen: int) -> int:
        """Tasks in a row among which each of a bounded source's is found: two epochs, for the walk may be anywhere."""
        size = self.sources[chosen].size
        return MAX_SKIPS if size is None else 2 * size

    def take(self, chosen: int) -> Task:
        """The source's next task that is not held out; the skipped ones stay skipped after a resume."""
        source = self.sources[chosen]
        for _ in range(self.reach(chosen)):
            self.index = self._index(chosen)
            task = source.task(self.index)
            self._positions[chosen] += 1
            if not asks_one_of(task, self._excluded):
                return task
        raise UserError(
            f"{source.name}: every prompt is also in the held-out set, so nothing is left to train on. "
            "Use another file or seed for heldout, or a smaller heldout.size."
        )

    def _index(self, chosen: int) -> int:
        position, size = self._positions[chosen], self.sources[chosen].size
        if size is None:
            return position
        epoch, offset = divmod(position, size)
        if chosen not in self._orders or self._orders[chosen][0] != epoch:
            order = list(range(size))
            random.Random(f"{self.seed}/source/{chosen}/epoch/{epoch}").shuffle(order)
            self._orders[chosen] = (epoch, order)
        return self._orders[chosen][1][offset]
