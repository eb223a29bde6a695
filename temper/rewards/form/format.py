"""Rewards on the form of a response: a regular expression, tags, JSON that fits a schema.

Owns: kinds "format", "tags", "json_schema". Refuses: regular expressions in this process; one can take for ever.
"""

from __future__ import annotations

import re

from temper.errors import UserError
from temper.protocols import Reward
from temper.rewards.form.json_schema import JsonSchema, find_json
from temper.rewards.form.visible import num_visible, visible
from temper.rewards.workers.pool import WorkerFailed, WorkerPool, blame
from temper.types import Score, Task, Trajectory

_TAG_NAME = re.compile(r"[A-Za-z][\w-]*")


class FormatReward(Reward):
    """1 when the whole response matches the regular expression ("." also matches line ends), else 0.

    It must match as written and without what nobody sees: a thought of zero-width spaces is none.
    """

    name = "format"

    def __init__(self, *, pattern: str, workers: int = 1, deadline_seconds: float = 2.0) -> None:
        require_pattern(pattern, 'reward "format"')
        self._pattern = pattern
        self._pool = WorkerPool(
            "temper.rewards.form.patterns:matches", size=workers, deadline_seconds=deadline_seconds, is_pure=True
        )

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        try:
            return Score.of(float(await self._pool.call(self._pattern, [trajectory.text, visible(trajectory.text)])))
        except WorkerFailed as error:
            return blame(error)

    async def close(self) -> None:
        self._pool.close()


def require_pattern(pattern: str, where: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise UserError(f"{where}: pattern {pattern!r} is not a regular expression: {error}") from error


def has_tags(text: str, names: tuple[str, ...], *, min_characters: int = 1) -> bool:
    """Whether the text is <a>...</a> <b>...</b> ... in this order, each tag once, and nothing but space between.

    Inside each there must be that many characters that show something: a form filled with nothing is not an answer. Nor
    may a tag hide behind characters that nobody sees.
    """
    shown, place = visible(text), 0
    for name in names:
        opening, closing = f"<{name}>", f"</{name}>"
        if any(written.count(tag) != 1 for written in (text, shown) for tag in (opening, closing)):
            return False
        start, end = text.index(opening), text.index(closing)
        if text[place:start].strip() or start < place or end < start:
            return False
        if num_visible(text[start + len(opening) : end]) < min_characters:
            return False
        place = end + len(closing)
    return not text[place:].strip()


class TagsReward(Reward):
    """1 when the response is the named tags in order, e.g. tags = "think answer"; else 0. See has_tags."""

    name = "tags"

    def __init__(self, *, tags: str = "think answer", min_characters: int = 1) -> None:
        names = tuple(tags.replace(",", " ").split())
        if not names or len(set(names)) != len(names) or not all(map(_TAG_NAME.fullmatch, names)):
            raise UserError(
                f'reward "tags": tags={tags!r} must be different names with spaces between, e.g. "think answer".'
            )
        self._names = names
        self._min_characters = min_characters

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        return Score.of(float(has_tags(trajectory.text, self._names, min_characters=self._min_characters)))


class JsonSchemaReward(Reward):
    """1 when the response is JSON that fits the schema, alone or in one ```json fence; else 0."""

    name = "json_schema"

    def __init__(self, *, schema: str, workers: int = 1, deadline_seconds: float = 2.0) -> None:
        self._schema = JsonSchema(schema)
        self._pool = WorkerPool(
            "temper.rewards.form.patterns:found", size=workers, deadline_seconds=deadline_seconds, is_pure=True
        )

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        fits, searches = self._schema.fits(find_json(trajectory.text))
        if not fits or not searches:
            return Score.of(float(fits))
        try:
            return Score.of(float(await self._pool.call(searches)))
        except WorkerFailed as error:
            return blame(error)

    async def close(self) -> None:
        self._pool.close()
