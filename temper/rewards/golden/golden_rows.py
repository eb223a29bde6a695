"""The golden sets and the attack pack: responses whose verdict is known because of how they were made.

Owns: reading and checking the rows, shipped or a user's own. Refuses: running verifiers (commands/judging/verify.py).
A row is JSON: response and is_correct, and as the kind needs them prompt, answer, tests (text), options of the reward.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from temper.errors import UserError
from temper.types import Message, Scalar, Task, Trajectory

FOLDER = Path(__file__).parent
FILES = {
    "math": ("math.jsonl", "math_by_hand.jsonl", "math_pairs.jsonl"),
    "code": ("code.jsonl",),
    "format": ("format.jsonl",),
}
ATTACKS = ("attacks.jsonl", "attacks_on_forms.jsonl")
_TEXTS = ("response", "category", "prompt", "answer", "tests", "kind")


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenRow:
    """One response with a known verdict."""

    id: str
    """File and line."""
    response: str
    is_correct: bool
    category: str = ""
    prompt: str = ""
    answer: str | None = None
    tests: str = ""
    """For kind "code": the tests of the task, as extra["tests"]."""
    options: Mapping[str, Scalar] = field(default_factory=dict)
    """Options of the reward that judges this row; those of the command line come on top."""
    kind: str = ""
    """Kind of the reward that is attacked; set in the attack pack only."""

    def task(self) -> Task:
        extra: dict[str, Scalar] = {"tests": self.tests} if self.tests else {}
        return Task(id=self.id, messages=(Message(role="user", content=self.prompt),), answer=self.answer, extra=extra)

    def trajectory(self) -> Trajectory:
        """The response as a finished episode of one turn."""
        return Trajectory.saying(self.id, self.response)


def load_golden(kind: str, path: Path | None = None) -> list[GoldenRow]:
    """The shipped rows of a kind, or those of a file."""
    if path is None and kind not in FILES:
        known = ", ".join(sorted(FILES))
        raise UserError(f'no golden set is shipped for reward "{kind}", only for {known}. Give one with --golden FILE.')
    paths = [path] if path is not None else [FOLDER / name for name in FILES[kind]]
    return [row for each in paths for row in _read(each)]


def load_attacks(kind: str | None = None) -> list[GoldenRow]:
    """The attacks on rewards of a kind, or all. None may score, so is_correct is False in every row."""
    return [row for name in ATTACKS for row in _read(FOLDER / name) if kind in (None, row.kind)]


def _read(path: Path) -> Iterable[GoldenRow]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # not splitlines: JSON may hold other line ends as text
    except OSError as error:
        raise UserError(f"cannot read the golden set {path}: {error.strerror}") from error
    rows = [_row(line, f"{path.name}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise UserError(f"the golden set {path} has no rows")
    return rows


def _row(line: str, where: str) -> GoldenRow:
    try:
        fields: dict[str, Any] = json.loads(line)
        row = GoldenRow(id=where, **{"is_correct": False, **fields} if fields.get("kind") else fields)
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{where} is no golden row: {error}. It needs response and is_correct.") from error
    wrong = [name for name in _TEXTS if not isinstance(getattr(row, name), str | None)]
    if wrong or not isinstance(row.is_correct, bool) or not isinstance(row.options, dict):
        raise UserError(f"{where}: {', '.join(wrong) or 'is_correct or options'} has the wrong type")
    return row
