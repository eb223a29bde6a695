"""The right calls that a task brings with it. Owns: reading its column "solution". Refuses: making calls."""

from __future__ import annotations

import json
from typing import Any

from temper.envs.tool_calls import Calls
from temper.types import Task


def read_solution(task: Task) -> Any:
    """The column "solution" of a task, as a value or as JSON; None where it has none, or one in words, as files of
    problems do."""
    given = task.columns.get("solution", task.extra.get("solution"))
    try:
        return json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        return None


def read_calls(task: Task) -> Calls:
    """[] where its solution is not made of calls."""
    match read_solution(task):
        case [*calls] if all(map(_is_call, calls)):
            return [(name, arguments) for name, arguments in calls]
    return []


def _is_call(value: object) -> bool:
    match value:
        case [str(), dict()]:
            return True
    return False
