"""How a run stands, by what it wrote and how long ago."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from temper.runs.reader import RunReader
from temper.runs.report.report import make_report, render
from temper.runs.state import DEAD_AFTER_SECONDS, ended_row, read_run_state
from temper.runs.store.run_store import RunStore, open_run


def state_of(folder: Path) -> tuple[str, str]:
    with RunReader(folder) as reader:
        return reader.state.name, reader.state.text


@pytest.mark.parametrize(
    ("meta", "name"),
    [
        ({}, "not finished"),
        ({"heartbeat": "1000.0"}, "running"),
        ({"heartbeat": str(1000 - DEAD_AFTER_SECONDS - 1)}, "dead"),
        (dict([ended_row("failed", "no disk"), ("heartbeat", "1.0")]), "failed"),
        (dict([ended_row("stopped", "Ctrl-C"), ("heartbeat", "999.0")]), "stopped"),
        ({"finished": "1.0", "heartbeat": "1.0"}, "finished"),
    ],
)
def test_the_state_follows_from_three_rows(meta: dict[str, str], name: str) -> None:
    assert read_run_state(meta, now=1000.0).name == name


def test_a_run_lives_while_it_is_written_and_is_dead_a_minute_after_it_was_killed(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.flush()
    assert state_of(store.folder) == ("running", "")
    monkeypatch.setattr("temper.runs.state.time.time", lambda: 4e9)
    name, text = state_of(store.folder)
    assert name == "dead"
    assert "no sign of life since" in text
    assert "dead" in render(make_report(store.folder)).splitlines()[0]


def test_the_heart_beats_while_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait: Callable[[Callable[[], bool]], None]
) -> None:
    monkeypatch.setattr("temper.runs.store.run_store.BEAT_SECONDS", 0.01)
    store = open_run(tmp_path / "run", config="", resume=False)
    try:
        store.flush()
        with RunReader(store.folder) as reader:
            first = reader.state.heartbeat
            wait(lambda: reader.state.heartbeat != first)
    finally:
        store.close()


def test_why_a_run_failed_is_reported_until_it_goes_on(store: RunStore) -> None:
    store.end("failed", "the verifier [b]broke[/b]")
    store.close()
    text = render(make_report(store.folder))
    assert "failed, 0 steps" in text
    assert "the verifier [b]broke[/b]" in text
    again = open_run(store.folder, config="", resume=True)
    again.flush()
    assert state_of(store.folder) == ("running", "")
    again.close()
