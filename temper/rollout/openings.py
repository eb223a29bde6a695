"""Environments tried before anything is drawn: made, started, shown to the chat template, closed.

Owns: what a mistake in an environment's constructor or start() looks like to its author. Refuses: playing (episode.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from temper.calls import CLOSE_SECONDS, call, explain_error, is_end_of_task
from temper.errors import UserError
from temper.protocols import Env, EnvOpening, HasTools
from temper.rollout.episode import EpisodeRenderer
from temper.types import Task

TASKS_PER_KIND = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """How the episode of one task begins."""

    task: Task
    prompt_ids: tuple[int, ...]
    tools: tuple[str, ...]
    """Names of the tools that the chat template shows."""
    dry_tools: tuple[str, ...] = ()
    """Names of those whose calls are only described."""


async def try_openings(
    make_env: Callable[[str], Env], renderer: EpisodeRenderer, tasks: Sequence[Task], *, seed: int, seconds: float
) -> list[Opening]:
    """Opens a few episodes of every environment that the tasks name, with and without tools of their own, and closes
    them at once.

    Raises UserError with the first exception's own words, file and line. `seconds` is the deadline of each.
    """
    openings = []
    for task in _some_of_each(tasks):
        try:
            openings.append(await _open(make_env, renderer, task, seed, seconds))
        except BaseException as error:  # the rim: an environment is user code
            if is_end_of_task(error):
                raise
            raise UserError(f"task {task.id}: the environment does not start: {explain_error(error)}") from error
    return openings


async def _open(
    make_env: Callable[[str], Env], renderer: EpisodeRenderer, task: Task, seed: int, seconds: float
) -> Opening:
    env = make_env(task.env)
    name = type(env).__name__
    try:
        opening = await call(env.start(task, seed), seconds, f"{name}.start()")
        if not isinstance(opening, EnvOpening):
            raise UserError(f"{name}.start returned {opening!r:.60}, not an EnvOpening")
        messages = renderer.prompt_messages(dataclasses.replace(task, messages=opening.messages))
        names = tuple(str(tool.get("function", tool).get("name", "?")) for tool in opening.tools)
        dry = tuple(env.dry_tools) if isinstance(env, HasTools) else ()
        return Opening(task=task, prompt_ids=renderer.prompt_ids(messages, opening.tools), tools=names, dry_tools=dry)
    finally:
        await call(env.close(), CLOSE_SECONDS, f"{name}.close()")


def _some_of_each(tasks: Sequence[Task]) -> list[Task]:
    alike: dict[tuple[str, bool], list[Task]] = {}
    for task in tasks:
        alike.setdefault((task.env, bool(task.tools)), []).append(task)
    return [task for own in alike.values() for task in own[:TASKS_PER_KIND]]
