"""Histories of prompts as the page of data asks for them: searched, sorted, in parts, and over the steps."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from temper.dashboard.prompts import BANDS, PromptFilter, band_of, list_prompts, spread_of
from temper.runs.reader import RunReader

Serve = Callable[..., Any]
COLUMNS = {
    "task": "task_id",
    "source": "source",
    "rate": "rate",
    "draws": "draws",
    "attempts": "attempts",
    "step": "step",
}


def asked(folder: Path, *, offset: int = 0, limit: int = 200, **wanted: str) -> dict[str, Any]:
    return list_prompts(folder, PromptFilter(**wanted), offset, limit)


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """The trained run, some of whose prompts were drawn again, and one never scored."""
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    with sqlite3.connect(folder / "run.db") as connection:
        connection.execute("UPDATE prompts SET source = 'words' WHERE step > 4")
        connection.execute(
            "INSERT INTO prompts SELECT stage, task_id, 9, source, 2, 2 * attempts, passed + 1, 0.5 FROM prompts "
            "WHERE step = 1"
        )
        connection.execute("INSERT INTO prompts VALUES (1, 'broken', 9, '', 1, 0, 0.0, NULL)")
    connection.close()
    return folder


def test_prompts_are_sorted_by_any_column_and_those_without_a_value_come_last(run: Path) -> None:
    with RunReader(run) as reader:
        standing = {prompt.task_id: prompt for prompt in reader.prompts()}
    for name, column in COLUMNS.items():
        for sort in (name, f"-{name}"):
            rows = asked(run, sort=sort)["rows"]
            assert {row["task_id"] for row in rows} == standing.keys()
            for row in rows:
                prompt = standing[row["task_id"]]
                same = ("step", "source", "draws", "attempts", "passed", "rate")
                assert [row[key] for key in same] == [getattr(prompt, key) for key in same]
            values = [row[column] for row in rows]
            known = [value for value in values if value is not None]
            assert known == sorted(known, reverse=sort.startswith("-"))
            assert values[len(known) :] == [None] * (len(values) - len(known))


def test_parts_of_the_list_make_up_the_whole(run: Path) -> None:
    whole = asked(run)
    parts = [asked(run, offset=offset, limit=7)["rows"] for offset in range(0, whole["total"], 7)]
    assert [row for part in parts for row in part] == whole["rows"]
    assert whole["total"] == whole["every"] == len(whole["rows"])


def test_a_search_finds_words_of_prompts_tasks_and_sources(run: Path) -> None:
    whole = asked(run)["rows"]
    one = next(row for row in whole if len(row["prompt"]) == 2)
    found = asked(run, q=one["prompt"])["rows"]
    assert one["task_id"] in {row["task_id"] for row in found}
    said = ("task_id", "source", "prompt")
    assert all(one["prompt"] in " ".join(row[name] for name in said) for row in found)
    assert asked(run, q="words")["rows"] == [row for row in whole if row["source"] == "words"], "in the same order"
    assert asked(run, q="brok")["rows"][0]["rate"] is None
    nothing = asked(run, q="100%")
    assert (nothing["rows"], nothing["total"]) == ([], 0), "signs mean themselves"


def test_the_server_passes_questions_on_and_refuses_long_ones(run: Path, serve: Serve) -> None:
    server = serve(run)
    address = f"{server.run()}/prompts"
    told = server.get(address, q="words", sort="-draws", offset=1, limit=3)
    assert told == asked(run, q="words", sort="-draws", offset=1, limit=3)
    assert server.ask(f"{address}?q={'x' * 5000}").status_code == 400


def test_a_prompt_leads_to_its_newest_group(trained: Path, serve: Serve) -> None:
    server = serve(trained)
    row = server.get(f"{server.run()}/prompts", limit=1)["rows"][0]
    key = {name: row[name] for name in ("stage", "step", "group_id")}
    group = server.get(f"{server.run()}/group", **key)
    assert group["task_id"] == row["task_id"]
    assert group["prompt"][-1]["content"] == row["prompt"]


def test_shares_of_pass_rates_follow_every_prompt_from_step_to_step() -> None:
    rows = [
        (0, 1, "a", 0.0), (0, 1, "b", 0.5),
        (0, 2, "a", 0.25), (0, 2, "c", 1.0),
        (0, 4, "c", 0.75),
        (1, 1, "a", 0.1),
    ]  # fmt: skip
    never, low, middle, high, always = BANDS
    points = spread_of(rows)
    assert points[never] == [(0, 1, 0.5), (0, 2, 0.0), (0, 4, 0.0), (1, 1, 0.0)]
    assert points[low] == [(0, 1, 0.0), (0, 2, 1 / 3), (0, 4, 1 / 3), (1, 1, 1.0)]
    assert points[middle] == [(0, 1, 0.5), (0, 2, 1 / 3), (0, 4, 1 / 3), (1, 1, 0.0)]
    assert points[high] == [(0, 1, 0.0), (0, 2, 0.0), (0, 4, 1 / 3), (1, 1, 0.0)]
    assert points[always] == [(0, 1, 0.0), (0, 2, 1 / 3), (0, 4, 0.0), (1, 1, 0.0)]
    assert spread_of([]) == {}


def test_every_pass_rate_has_one_band() -> None:
    rates = [0.0, 1e-9, 0.25, 0.26, 0.74, 0.75, 1 - 1e-9, 1.0]
    assert [BANDS.index(band_of(rate)) for rate in rates] == [0, 1, 1, 2, 2, 3, 3, 4]


def test_the_page_has_what_choosers_did_where_there_are_any(run: Path, serve: Serve) -> None:
    server = serve(run)
    data = server.get(f"{server.run()}/data")
    assert data["chosen"] == {}
    assert set(data["spread"]) == set(BANDS)
    assert [sum(part) for part in zip(*(curve[0]["values"] for curve in data["spread"].values()), strict=True)] == (
        pytest.approx([1.0] * len(data["spread"][BANDS[0]][0]["steps"]))
    )
    with sqlite3.connect(run / "run.db") as connection:
        connection.execute("INSERT INTO metrics VALUES (1, 3, 'data/pool_easy', 0.25)")
    connection.close()
    chosen = server.get(f"{server.run()}/data")["chosen"]
    assert json.dumps(chosen) == '{"data/pool_easy": [{"stage": 1, "steps": [3], "values": [0.25]}]}'
