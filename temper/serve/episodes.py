"""Recorded completions as episodes, and the scores that they are given afterwards.

Owns: which completions are one episode, what an episode is called, where its score is kept. Refuses: judging
(commands/judging/score_records.py), and a score for an episode that has gone on since.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from temper.errors import UserError
from temper.rollout.agents import DrawnCall, turns_of, was_answered
from temper.rollout.episode import cut_status
from temper.serve.records import Recorded, Speech, open_records, read_records
from temper.storable import storable
from temper.types import Score, ScoreKind, Status, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedEpisode:
    """What a client drew in one session, or one completion of a client that named none."""

    id: str
    """Name of the session, or "chatcmpl-.../0": id of the request and number of the choice."""
    origin: str
    """Request and choice of its oldest completion, which are equal in copies of a file and nowhere else."""
    first: int
    """Its oldest completion in the file."""
    last: int
    """Its newest one."""
    speeches: frozenset[Speech]
    """Of the models that drew it: one, unless the session went on with another."""
    played: Trajectory
    """Its opening is empty when it was no chat."""
    judge: str
    """Who gave its score. Empty: nobody has, or it went on afterwards."""


def read_episodes(path: Path) -> list[RecordedEpisode]:
    """Every episode with something that its client was given, in the order in which they began."""
    by_name: dict[str, list[Recorded]] = {}
    for row in read_records(path):
        if was_answered(row.turn.completion):
            by_name.setdefault(row.session or f"{row.request_id}/{row.choice}", []).append(row)
    scores = _scores(path)
    return [_episode(name, rows, scores) for name, rows in by_name.items()]


def write_scores(path: Path, scores: Mapping[int, Score], judge: str) -> None:
    """Keeps scores by an episode's newest completion, all of them or none. Earlier ones are replaced."""
    now = time.time()
    rows = [(last, score.kind.value, score.value, storable(score.reason), judge, now) for last, score in scores.items()]
    try:
        with closing(open_records(path)) as connection, connection:
            connection.executemany("INSERT OR REPLACE INTO scores VALUES (?, ?, ?, ?, ?, ?)", rows)
    except sqlite3.Error as error:
        raise UserError(f"{path}: scores cannot be written: {error}") from error


def _episode(name: str, rows: Sequence[Recorded], scores: Mapping[int, tuple[Score, str]]) -> RecordedEpisode:
    calls = [
        DrawnCall(completion=row.turn.completion, text=row.turn.message.content, messages=row.messages) for row in rows
    ]
    opening, turns, order = turns_of(calls)
    score, judge = scores.get(rows[-1].id, (Score.unscorable("not scored yet"), ""))
    newest = rows[-1].turn
    played = Trajectory(
        task_id=name,
        group_id=name,
        index=0,
        turns=tuple(turns),
        status=cut_status(newest.completion) or Status.COMPLETED,
        score=score,
        opening=opening,
        turn_order=order,
        # Of conversations side by side, what was said last need not stand last.
        result=None if turns[-1].completion is newest.completion else newest.message.content,
    )
    speeches = frozenset(row.speech for row in rows)
    return RecordedEpisode(
        id=name,
        origin=f"{rows[0].request_id}/{rows[0].choice}",
        first=rows[0].id,
        last=rows[-1].id,
        speeches=speeches,
        played=played,
        judge=judge,
    )


def _scores(path: Path) -> dict[int, tuple[Score, str]]:
    with closing(open_records(path)) as connection:
        rows = connection.execute("SELECT last, kind, value, reason, judge FROM scores").fetchall()
    return {
        last: (Score(kind=ScoreKind(kind), value=value, reason=reason), judge)
        for last, kind, value, reason, judge in rows
    }
