"""The table of runs: states, scores, differences, and the notes that may be written."""

from __future__ import annotations

import json
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from temper.dashboard import queries
from temper.dashboard.answers import MOST_BYTES, why_not_written
from temper.dashboard.database import reading
from temper.dashboard.series import make_axes
from temper.runs.reader import RunReader
from temper.runs.state import ended_row
from temper.runs.store.run_store import open_run

Serve = Callable[..., Any]
JSON = {"tags": ["best"], "note": "why <b>not</b>"}


@pytest.fixture
def runs(trained: Path, tmp_path: Path) -> Path:
    """Five copies: as it was, another seed, another rate, failed, and killed."""
    for name in ("plain", "seed", "rate", "failed", "killed"):
        shutil.copytree(trained, tmp_path / name)
    change(tmp_path / "seed", "seed = 0\nmirrors", "seed = 5\nmirrors")
    change(tmp_path / "rate", "learning_rate = 0.001", "learning_rate = 0.5")
    for name, rows in (
        ("failed", [ended_row("failed", "ValueError: <i>it broke</i>")]),
        ("killed", [("heartbeat", repr(time.time() - 3600))]),
    ):
        with closing(sqlite3.connect(tmp_path / name / "run.db")) as connection, connection:
            connection.execute("DELETE FROM meta WHERE name = 'finished'")
            connection.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", rows)
    return tmp_path


def change(folder: Path, before: str, after: str) -> None:
    text = (folder / "config.toml").read_text()
    assert before in text
    (folder / "config.toml").write_text(text.replace(before, after))


def rows_of(server: Any) -> dict[str, Any]:
    return {row["name"]: row for row in server.get("/api/table")["runs"]}


def test_a_run_is_what_its_last_words_and_its_heartbeat_say(runs: Path, serve: Serve) -> None:
    rows = rows_of(serve(runs))
    assert {name: row["state"] for name, row in rows.items()} == {
        "plain": "finished", "seed": "finished", "rate": "finished", "failed": "failed", "killed": "dead",
    }  # fmt: skip
    assert rows["failed"]["ended"] == "ValueError: <i>it broke</i>"
    assert "no sign of life since" in rows["killed"]["ended"]


def test_the_score_goes_from_the_first_to_the_last_with_their_intervals(runs: Path, serve: Serve) -> None:
    row = rows_of(serve(runs))["plain"]
    with RunReader(runs / "plain") as reader:
        results = [result for result in reader.evaluations() if result.name == row["score"]["name"]]
        rewards = [point.value for point in reader.metric("reward/mean")]
        steps = reader.steps()
        seconds = sum(reader.seconds().values())
    assert len(results) > 1
    for end, result in (("first", results[0]), ("last", results[-1])):
        told = row["score"][end]
        assert (told["score"], told["low"], told["high"]) == (result.score, result.low, result.high)
    assert row["score"]["differs"] == []
    assert row["reward"] == {"first": rewards[0], "last": rewards[-1]}
    assert (row["steps_done"], row["drawn"]) == (len(steps), sum(step.tokens_drawn for step in steps))
    assert row["seconds"] == pytest.approx(seconds)


def test_scores_under_other_budgets_are_said_not_to_compare(runs: Path, serve: Serve) -> None:
    with closing(sqlite3.connect(runs / "plain" / "run.db")) as connection, connection:
        (budget,) = connection.execute("SELECT budget FROM evaluations LIMIT 1").fetchone()
        other = json.dumps({**json.loads(budget), "max_new_tokens": 999})
        connection.execute("UPDATE evaluations SET budget = ? WHERE stage = 1", (other,))
    assert rows_of(serve(runs))["plain"]["score"]["differs"] == ["max_new_tokens"]


def test_a_stage_that_starts_elsewhere_is_not_what_the_others_made(runs: Path, serve: Serve) -> None:
    config = runs / "plain" / "config.toml"
    first, second = config.read_text().split("[[stage]]")[1:]
    assert 'path = ""\ndtype' in second
    config.write_text(
        f"[[stage]]{first}[[stage]]" + second.replace('path = ""\ndtype', 'path = "stage:first"\ndtype', 1)
    )
    score = rows_of(serve(runs))["plain"]["score"]
    assert (score["first"]["stage"], score["last"]["stage"]) == (0, 0)
    assert rows_of(serve(runs))["failed"]["score"]["last"]["stage"] == 1


def test_the_table_names_the_keys_that_differ_and_no_other(runs: Path, serve: Serve) -> None:
    server = serve(runs)
    table = server.get("/api/table")
    assert table["differing"] == ["seed", "rl.optim.learning_rate"]
    rows = {row["name"]: row for row in table["runs"]}
    assert rows["seed"]["recipe"] == {"seed": 5, "rl.optim.learning_rate": 0.001}
    assert rows["rate"]["recipe"] == {"seed": 0, "rl.optim.learning_rate": 0.5}
    assert rows["plain"]["seeds"] == rows["seed"]["seeds"] != rows["rate"]["seeds"]


def test_a_run_that_cannot_be_read_is_a_row_that_says_so(runs: Path, serve: Serve) -> None:
    (runs / "broken").mkdir()
    (runs / "broken" / "run.db").write_bytes(b"no database" * 100)
    rows = rows_of(serve(runs))
    assert "not a database" in rows["broken"]["error"]
    assert rows["plain"]["error"] is None


def test_notes_are_kept_in_the_runs_directory_and_never_in_its_record(runs: Path, serve: Serve) -> None:
    server = serve(runs)
    before = (runs / "plain" / "run.db").read_bytes()
    answer = server.put(f"{server.run('plain')}/notes", {**JSON, "tags": ["best", " best ", "b"]})
    kept = {"tags": ["best", "b"], "note": "why <b>not</b>"}
    assert (answer.status_code, answer.json()) == (200, {**kept, "notes_error": None})
    assert json.loads((runs / "plain" / "notes.json").read_text()) == kept
    assert (runs / "plain" / "run.db").read_bytes() == before
    assert rows_of(server)["plain"]["tags"] == ["best", "b"]
    assert rows_of(server)["seed"]["tags"] == []


def test_writing_notes_does_not_wait_for_a_run_that_writes(trained: Path, tmp_path: Path, serve: Serve) -> None:
    run = tmp_path / "live"
    store = open_run(run, config='[[stage]]\nkind = "rl"\n', resume=False)
    holding, done = threading.Event(), threading.Event()

    def hold(connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO events VALUES (1, 'note', 'half a step')")
        holding.set()
        done.wait(30)

    try:
        store._submit(hold)  # a transaction of the writer, half done
        assert holding.wait(10)
        server = serve(run)
        assert server.put(f"{server.run()}/notes", JSON).status_code == 200
        assert rows_of(server)["live"]["note"] == JSON["note"]
    finally:
        done.set()
        store.close()
    with RunReader(run) as reader:
        assert [event.text for event in reader.events()] == ["half a step"]


def test_a_note_that_is_none_is_refused_in_words(runs: Path, serve: Serve) -> None:
    server = serve(runs)
    address = f"{server.run('plain')}/notes"
    for content, status in (({"tags": ["a,b"], "note": ""}, 409), ({"tags": "a"}, 400), ([], 400)):
        answer = server.put(address, content)
        assert (answer.status_code, list(answer.json())) == (status, ["error"]), content
    assert server.put("/api/runs/nobody/notes", JSON).status_code == 404
    assert not (runs / "plain" / "notes.json").exists()


def test_damaged_notes_are_told_and_kept(runs: Path, serve: Serve) -> None:
    (runs / "plain" / "notes.json").write_text("{")
    server = serve(runs)
    assert "notes.json cannot be read" in rows_of(server)["plain"]["notes_error"]
    assert server.put(f"{server.run('plain')}/notes", JSON).status_code == 409
    assert (runs / "plain" / "notes.json").read_text() == "{"


@pytest.mark.parametrize(
    "headers", [{"origin": "http://evil.example"}, {"origin": "null"}, {"content-type": "text/plain"}]
)
def test_another_sites_page_writes_nothing(runs: Path, serve: Serve, headers: dict[str, str]) -> None:
    server = serve(runs)
    address = f"{server.run('plain')}/notes"
    assert server.put(address, JSON, **headers).status_code == 403
    assert not (runs / "plain" / "notes.json").exists()
    assert server.put(address, JSON, origin=server.url).status_code == 200


def test_a_server_for_others_only_reads() -> None:
    good = [(b"host", b"a:1"), (b"content-type", b"application/json"), (b"content-length", b"9")]
    assert why_not_written(frozenset({"a"}), good) == ""
    assert "this machine alone" in why_not_written(None, good)
    assert "at most" in why_not_written(frozenset({"a"}), good[:-1])
    assert "at most" in why_not_written(frozenset({"a"}), [*good[:-1], (b"content-length", b"%d" % (MOST_BYTES + 1))])


def test_axes_add_up_within_a_stage(trained: Path, serve: Serve) -> None:
    server = serve(trained)
    axes = server.get(f"{server.run()}/axes")
    with RunReader(trained) as reader:
        steps = [step for step in reader.steps() if step.stage == 1]
        seconds = sum(value for (stage, _), value in reader.seconds().items() if stage == 1)
    assert axes["1"]["steps"] == [step.step for step in steps]
    assert axes["1"]["drawn"] == [sum(s.tokens_drawn for s in steps[: place + 1]) for place in range(len(steps))]
    assert axes["1"]["trained"][-1] == sum(step.tokens_trained for step in steps)
    assert axes["1"]["seconds"][-1] == pytest.approx(seconds)
    assert axes["0"]["drawn"][-1] == 0, "imitation draws nothing"


def test_long_axes_keep_their_sums_and_their_end() -> None:
    axes = make_axes(((0, step, 2, 3, 0.5) for step in range(1, 2502)), most=1000)["0"]
    assert len(axes["steps"]) <= 1001
    assert axes["steps"][-1] == 2501
    assert axes["drawn"] == [2 * step for step in axes["steps"]]
    assert axes["seconds"] == [0.5 * step for step in axes["steps"]]


def test_ties_in_the_lists_of_prompts_are_counted() -> None:
    from temper.dashboard.pages import NUM_PROMPTS, _ties

    order = [(0.0, -1, "a"), *((0.5, -1, str(place)) for place in range(NUM_PROMPTS + 4))]
    assert _ties(order) == {"all": NUM_PROMPTS + 4, "listed": NUM_PROMPTS - 1}
    assert _ties(order[:3]) == {"all": 2, "listed": 2}
    assert _ties([]) == {"all": 0, "listed": 0}


def test_a_count_beyond_what_a_reader_cares_for_says_so(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries, "MOST_COUNTED", 5)
    with reading(trained) as database:
        (every,) = database.rows("SELECT COUNT(*) FROM trajectories")[0]
        assert queries.count_rollouts(database, queries.RolloutFilter()) == (every, True), "an index counts all of them"
        assert queries.count_rollouts(database, queries.RolloutFilter(stage=1)) == (every, True)
        assert queries.count_rollouts(database, queries.RolloutFilter(min_length=1)) == (5, False)
