"""Side effects by episode: filtered, in parts, newest first, and what a model wrote in them stays text."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from temper.dashboard.database import Database, OutOfTime
from temper.dashboard.effects import KINDS, EffectFilter, list_effects
from temper.types import LASTING

Serve = Callable[..., Any]
ATTACK = '<script>alert(1)</script> 100% "quoted"'


def event(kind: str, name: str, detail: str = "", turn: int | None = 0) -> dict[str, Any]:
    return {"turn": turn, "kind": kind, "name": name, "detail": detail, "cost": 0.0}


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """The trained run, in whose episodes tools did something: two calls at step 1 and four at step 2; and in those of
    its evaluations, one call at step 0 and two at step 2."""
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    early = [event("tool_call", "look"), event("side_effect", "pay", "done: pay(3)"), event("denied", "burn", turn=1)]
    late = [event("described", "pay", ATTACK), event("side_effect", "write_100%", "attempt 1, which failed: x", None)]
    with sqlite3.connect(folder / "run.db") as connection:
        (stage,) = connection.execute("SELECT MAX(stage) FROM groups").fetchone()
        for step, events, members in ((1, early, "(0)"), (2, late, "(0, 1)")):
            connection.execute(
                "UPDATE trajectories SET events = ? WHERE stage = ? AND step = ? AND group_id = (SELECT group_id FROM "
                f"groups WHERE stage = ? AND step = ? ORDER BY draw LIMIT 1) AND member IN {members}",
                (json.dumps(events), stage, step, stage, step),
            )
        for place, (step, kind) in enumerate(((0, "described"), (2, "side_effect"), (2, "denied"))):
            values = (stage, step, "greedy", place, "heldout:7", 3, 1, kind, "sell", ATTACK)
            connection.execute(f"INSERT INTO heldout_effects VALUES ({', '.join('?' * len(values))})", values)
    connection.close()
    return folder


def asked(folder: Path, offset: int = 0, limit: int = 50, **wanted: Any) -> list[tuple[Any, ...]]:
    rows = list_effects(folder, EffectFilter(**wanted), offset, limit)["rows"]
    return [(row["step"], row["member"], row["turn"], row["tool"], row["outcome"]) for row in rows]


def test_the_newest_come_first_and_each_episode_in_its_own_order(run: Path) -> None:
    assert asked(run) == [
        (2, 3, 1, "sell", "carried out"), (2, 3, 1, "sell", "denied"),
        (2, 0, 0, "pay", "described"), (2, 0, None, "write_100%", "carried out"),
        (2, 1, 0, "pay", "described"), (2, 1, None, "write_100%", "carried out"),
        (1, 0, 0, "pay", "carried out"), (1, 0, 1, "burn", "denied"),
        (0, 3, 1, "sell", "described"),
    ]  # fmt: skip


def test_those_of_evaluations_say_so_and_have_no_episode_to_open(run: Path) -> None:
    rows = list_effects(run, EffectFilter(tool="sell"), 0, 50)["rows"]
    assert {(row["evaluation"], row["group_id"], row["task_id"]) for row in rows} == {("greedy", None, "heldout:7")}
    rows = list_effects(run, EffectFilter(tool="pay"), 0, 50)["rows"]
    assert {(row["evaluation"], row["group_id"] is None) for row in rows} == {(None, False)}


def test_filters_find_a_part_of_a_name_and_an_outcome(run: Path) -> None:
    assert [row[0] for row in asked(run, tool="PA")] == [2, 2, 1]
    assert [row[3] for row in asked(run, tool="_100%")] == ["write_100%"] * 2, "signs mean themselves"
    assert asked(run, tool="p_y") == []
    for outcome, count in (("carried out", 4), ("described", 3), ("denied", 2)):
        found = asked(run, outcome=outcome)
        assert [row[4] for row in found] == [outcome] * count
    assert [row[0] for row in asked(run, tool="pay", outcome="carried out")] == [1]


def test_parts_of_the_list_make_up_the_whole_and_say_whether_there_are_more(run: Path) -> None:
    whole = asked(run)
    assert len(whole) == 9
    assert [row for offset in range(0, 9, 4) for row in asked(run, offset, 4)] == whole
    more = [list_effects(run, EffectFilter(), offset, 4)["more"] for offset in (0, 4, 8)]
    assert more == [True, True, False]
    assert list_effects(run, EffectFilter(), 0, 9)["more"] is False


def test_a_run_without_any_has_an_empty_list(trained: Path) -> None:
    assert list_effects(trained, EffectFilter(), 0, 50) == {"rows": [], "more": False}


def test_what_was_found_in_time_is_shown(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = Database.iterate

    def iterate(self: Database, text: str, *values: Any) -> Any:
        yield next(ask(self, text, *values))
        raise OutOfTime

    monkeypatch.setattr(Database, "iterate", iterate)
    monkeypatch.setattr("temper.dashboard.queries.stages", lambda database: [{"stage": 1}])
    found = list_effects(run, EffectFilter(), 0, 50)
    assert (len(found["rows"]), found["more"]) == (1, None)


def test_every_kind_that_is_never_forgotten_is_listed() -> None:
    assert set(KINDS) == set(LASTING)


def test_the_server_passes_questions_on_leaves_text_as_it_is_and_leads_to_the_episode(run: Path, serve: Serve) -> None:
    server = serve(run)
    address = f"{server.run()}/effects"
    found = server.get(address, tool="pay", outcome="described", offset=1, limit=1)
    assert [(row["member"], row["detail"]) for row in found["rows"]] == [(1, ATTACK)]
    assert server.ask(f"{address}?tool={'x' * 5000}").status_code == 400
    assert server.ask(f"{address}?outcome=done").status_code == 400
    key = {name: found["rows"][0][name] for name in ("stage", "step", "group_id", "member")}
    episode = server.get(f"{server.run()}/trajectory", **key)
    assert ATTACK in [one["detail"] for one in episode["events"]]
