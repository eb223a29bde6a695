"""The reward for following instructions that a program can verify.

Owns: kind "ifeval" and how its tasks are written. Refuses: the checks themselves (instruction_checks.py).
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from temper.errors import UserError, did_you_mean
from temper.protocols import Reward
from temper.rewards.form.instruction_checks import CHECKS, CHOICES, loose_variants
from temper.rewards.form.visible import num_visible, visible
from temper.types import Score, Task, Trajectory

TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "str": (str,), "Sequence[str]": (list,)}


class BadInstructions(ValueError):
    """Why the instructions of a task cannot be checked."""


@dataclass(frozen=True, slots=True)
class Instruction:
    id: str
    arguments: Mapping[str, Any]

    def is_followed(self, text: str, *, is_loose: bool) -> bool:
        """Judged by what a reader sees. An empty response follows nothing, even what only forbids."""
        shown = visible(text)
        variants = loose_variants(shown) if is_loose else [shown]
        return any(num_visible(variant) and CHECKS[self.id](variant, **self.arguments) for variant in variants)


class InstructionReward(Reward):
    """The share of the task's instructions that the response follows; with all_or_nothing 1 when all are, else 0.

    Loose mode forgives a first line, a last line and asterisks around what was asked for.
    """

    name = "ifeval"

    def __init__(self, *, mode: str = "strict", all_or_nothing: bool = False) -> None:
        if mode not in ("strict", "loose"):
            raise UserError(f'reward "ifeval": mode="{mode}" is unknown. Use "strict" or "loose".')
        self._is_loose = mode == "loose"
        self._all_or_nothing = all_or_nothing

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        try:
            instructions = read_instructions(task)
        except BadInstructions as error:
            return Score.error(str(error))
        followed = [item.is_followed(trajectory.text, is_loose=self._is_loose) for item in instructions]
        return Score.of(float(all(followed)) if self._all_or_nothing else sum(followed) / len(followed))

    def check(self, task: Task) -> str | None:
        try:
            read_instructions(task)
        except BadInstructions as error:
            return str(error)
        return None


def read_instructions(task: Task) -> list[Instruction]:
    """From extra "instructions", else the answer: JSON with instruction_id_list and kwargs, as in IFEval's rows."""
    text = task.extra.get("instructions", task.answer)
    try:
        row = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError) as error:
        raise BadInstructions(f"its instructions are no valid JSON: {error}") from error
    ids, arguments = (row.get("instruction_id_list"), row.get("kwargs")) if isinstance(row, dict) else (None, None)
    if not isinstance(ids, list) or not isinstance(arguments, list) or not ids or len(ids) != len(arguments):
        raise BadInstructions("it needs instruction_id_list and kwargs, two lists of one length and not empty")
    return [_instruction(*pair) for pair in zip(ids, arguments, strict=True)]


def _instruction(name: Any, arguments: Any) -> Instruction:
    if name not in CHECKS:
        raise BadInstructions(f"instruction {name!r} is unknown.{did_you_mean(str(name), CHECKS)}")
    if not isinstance(arguments, dict):
        raise BadInstructions(f"the arguments of {name} are {arguments!r:.60}; they must be an object")
    given = {key: value for key, value in arguments.items() if value is not None}
    wanted = dict(list(inspect.signature(CHECKS[name]).parameters.items())[1:])
    if set(given) != set(wanted):
        raise BadInstructions(
            f"{name} takes {', '.join(wanted) or 'nothing'}; it was given {', '.join(given) or 'nothing'}"
        )
    for key, value in given.items():
        if not isinstance(value, TYPES[str(wanted[key].annotation)]):
            raise BadInstructions(f"{name}: {key}={value!r:.60} must be {wanted[key].annotation}")
        if key in CHOICES and value not in CHOICES[key]:
            raise BadInstructions(f"{name}: {key}={value!r} must be one of {', '.join(CHOICES[key])}")
    return Instruction(name, given)
