"""What a run's policy said, for a terminal.

Owns: the lines. Refuses: finding rollouts (dashboard/queries.py, as the page does). Imports nothing heavy.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from temper.dashboard import queries
from temper.dashboard.database import DATABASE, OutOfTime, reading
from temper.dashboard.queries import RolloutFilter
from temper.errors import UserError

QUERY_SECONDS = 60.0
"""Nobody waits for a page here, so a search may take longer than there."""
INDENT = " " * 10


def read_rollouts(run: Path, wanted: RolloutFilter, num: int) -> tuple[list[dict[str, Any]], bool]:
    """The newest, each with everything that was said and paid, and whether there are more. stage counts from 0."""
    if not (run / DATABASE).is_file():
        raise UserError(f"{run} is not a run directory: it has no {DATABASE}")
    with reading(run, QUERY_SECONDS) as database:
        names = {stage["stage"]: stage["name"] for stage in queries.stages(database)}
        if wanted.stage is not None and wanted.stage not in names:
            known = ", ".join(f"{number + 1} ({name})" for number, name in names.items()) or "none yet"
            raise UserError(f"{run} has no stage {wanted.stage + 1}. Its stages: {known}")
        found, has_more = queries.rollouts(database, wanted, 0, num)
        if has_more and len(found) < num:
            raise UserError(f"a search through so large a run took over {QUERY_SECONDS:g} s. Give --step or --stage")
        try:
            return [_whole(database, row, names) for row in found], has_more
        except OutOfTime as error:
            raise UserError(f"{error}: give --step") from error


def _whole(database: Any, row: dict[str, Any], names: dict[int, str]) -> dict[str, Any]:
    place = (row["stage"], row["step"], row["group_id"])
    group = queries.group(database, *place)
    assert group is not None, "a rollout belongs to a group"
    member = next(other for other in queries.members(database, *place) if other["member"] == row["member"])
    return {**row, **member, **group, "stage": row["stage"] + 1, "stage_name": names[row["stage"]]}


def render(rollouts: list[dict[str, Any]], *, has_more: bool) -> Iterator[str]:
    """Lines, the newest rollout first."""
    for rollout in rollouts:
        yield _head(rollout)
        for message in rollout["prompt"]:
            yield _said(message["role"], message)
        if rollout["text"] is None:
            yield _said("", {"content": "(its text went to make room for newer ones: rollout.transcripts_gb)"})
        for message in rollout["messages"]:
            yield _said(message["role"], message)
        if rollout["answer"] is not None:
            yield _said("gold", {"content": rollout["answer"]})
        yield _said("reward", {"content": _paid(rollout)})
        yield ""
    if not rollouts:
        yield "no rollouts match"
    elif has_more:
        yield f"{len(rollouts)} shown, newest first; there are more: --num, --step, --find"


def _head(rollout: dict[str, Any]) -> str:
    outcome = "" if rollout["outcome"] == "trained" else f", {rollout['outcome'].replace(':', ': ')}"
    return (
        f"--- {rollout['stage_name']} step {rollout['step']}, task {rollout['task_id']}, "
        f"answer {rollout['member'] + 1}, {rollout['num_tokens']} tokens, {rollout['status']}{outcome}"
    )


def _said(who: str, message: dict[str, Any]) -> str:
    """One message, its lines below each other."""
    content = message.get("content") or ""
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    if calls := message.get("tool_calls"):
        text = "\n".join([*([text] if text else []), json.dumps(calls, ensure_ascii=False)])
    return f"{who:<{len(INDENT)}}" + text.replace("\n", f"\n{INDENT}")


def _paid(rollout: dict[str, Any]) -> str:
    """'0.750 (edit 0.750)', or why there is none."""
    if rollout["error"]:
        return f"none: {rollout['error']}"
    if rollout["score"] is None:
        return f"none: {rollout['reason'] or rollout['score_kind']}"
    parts = ", ".join(
        f"{name} {value:.3f}" if isinstance(value, int | float) else f"{name}: {value}"
        for name, value in rollout["parts"].items()
    )
    return f"{rollout['score']:.3f} ({parts})" if parts else f"{rollout['score']:.3f}"
