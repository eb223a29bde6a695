"""Events of a run that is being written, and clients that vanish."""

from __future__ import annotations

import asyncio
import json
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from temper.dashboard import queries, stream
from temper.dashboard.database import reading
from temper.dashboard.registry import KnownRun
from temper.dashboard.stream import Feed, State, news
from temper.runs.reader import RunReader
from temper.runs.records import AlarmRecord
from temper.runs.state import DEAD_AFTER_SECONDS, RunState
from temper.runs.store.run_store import RunStore, open_run
from temper.types import Batch, EvaluationResult, StepReport

Serve = Callable[..., Any]
Eventually = Callable[[Callable[[], bool]], None]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunStore]:
    made = open_run(tmp_path / "run", config="steps = 5\n", resume=False)
    made.begin_stage(0, "rl", 50)
    made.flush()
    yield made
    made.close()


def write_step(store: RunStore, step: int) -> None:
    report = StepReport(
        stage=0, step=step, version=step, loss=0.5, metrics={"reward/mean": step / 10}, seconds={"rollout": 1.0},
        system={}, groups_trained=0, groups_dropped=0, max_staleness=0,
    )  # fmt: skip
    store.append(report, Batch(updates=()))


def evaluation(step: int) -> EvaluationResult:
    return EvaluationResult(
        stage=0, step=step, name="greedy", score=0.5, low=0.4, high=0.6, num_prompts=10, samples_per_prompt=1,
        constant_score=0.1, budget={},
    )  # fmt: skip


def alarm(step: int) -> AlarmRecord:
    return AlarmRecord(stage=0, step=step, time=1.0, rule="kl_spike", level="warn", value=2.0, text="a\nb",
                       meaning="", advice="")  # fmt: skip


class Listener:
    """A client in a thread that keeps what it hears."""

    def __init__(self, server: Any, run: str) -> None:
        self.heard: list[tuple[str, Any]] = []
        self._address = f"{server.url}/api/stream?run={run}"
        self._is_done = False
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        kind = ""
        with httpx.stream("GET", self._address, timeout=30.0) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            for line in answer.iter_lines():
                if line.startswith("event: "):
                    kind = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    self.heard.append((kind, json.loads(line.removeprefix("data: "))))
                if self._is_done:
                    return

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.heard]


def id_of(server: Any) -> str:
    return server.run().rpartition("/")[2]


def test_what_is_written_is_told_while_it_is_written(store: RunStore, serve: Serve, eventually: Eventually) -> None:
    server = serve(store.folder)
    listener = Listener(server, id_of(server))
    for step in range(1, 4):
        write_step(store, step)
        eventually(lambda step=step: ("step", {"stage": 0, "step": step}) in listener.heard)  # type: ignore[misc]
    store.evaluation(evaluation(3))
    store.alarm(alarm(3))
    eventually(lambda: {"evaluation", "alarm"} <= set(listener.kinds()))
    told = dict(listener.heard)
    assert told["evaluation"] == {"stage": 0, "step": 3, "name": "greedy", "score": 0.5}
    assert told["alarm"] == {"stage": 0, "step": 3, "rule": "kl_spike", "level": "warn"}
    assert told["state"] == {"state": "running", "text": ""}
    store.end("failed", "the verifier is gone")
    eventually(lambda: ("state", {"state": "failed", "text": "the verifier is gone"}) in listener.heard)
    store.finish()
    eventually(lambda: ("state", {"state": "finished", "text": ""}) in listener.heard)
    with RunReader(store.folder) as reader:
        assert [step.step for step in reader.steps()] == [1, 2, 3], "nothing was lost while it was watched"


def test_writing_is_not_disturbed_by_many_readers(store: RunStore, serve: Serve) -> None:
    server = serve(store.folder)
    run, failures = server.run(), []
    is_over = threading.Event()

    def read() -> None:
        while not is_over.is_set():
            answer = server.ask(f"{run}/overview")
            steps = [curve["steps"] for curve in answer.json().get("series", {}).get("reward/mean", [])]
            losses = [curve["steps"] for curve in answer.json().get("series", {}).get("loss", [])]
            if answer.status_code != 200 or steps != losses:  # one answer, one snapshot
                failures.append(answer.text)

    readers = [threading.Thread(target=read, daemon=True) for _ in range(3)]
    for reader in readers:
        reader.start()
    for step in range(1, 101):
        write_step(store, step)
    store.flush()
    is_over.set()
    for reader in readers:
        reader.join(timeout=30)
    assert failures == []
    with RunReader(store.folder) as checked:
        assert len(checked.steps()) == 100


def test_all_queries_of_an_answer_see_the_same_steps(store: RunStore) -> None:
    write_step(store, 1)
    store.flush()
    with reading(store.folder) as database:
        assert queries.last_step(database) == (0, 1)
        write_step(store, 2)
        store.flush()
        assert queries.metric(database, "reward/mean") == [(0, 1, 0.1)]
    with reading(store.folder) as database:
        assert queries.last_step(database) == (0, 2)


def test_clients_that_vanish_leave_nothing_behind(store: RunStore, serve: Serve, eventually: Eventually) -> None:
    write_step(store, 1)
    store.flush()
    server = serve(store.folder)
    run = id_of(server)
    eventually(lambda: server.num_tasks() <= 2)
    before = server.num_tasks()
    address = urlsplit(server.url)
    wires = [socket.create_connection((address.hostname, address.port), timeout=20) for _ in range(5)]
    for wire in wires:
        wire.sendall(f"GET /api/stream?run={run} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
    eventually(lambda: run in server.streams.feeds and len(server.streams.feeds[run].listeners) == 5)
    assert server.num_tasks() > before
    for wire in wires:
        wire.close()
    eventually(lambda: not server.streams.feeds)
    eventually(lambda: server.num_tasks() <= before)


def test_all_clients_of_a_run_share_one_look(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    original = stream.signature
    monkeypatch.setattr(stream, "signature", lambda folder: looks.append(1) or original(folder))
    monkeypatch.setattr(stream, "LOOK_EVERY_SECONDS", 3600.0)
    write_step(store, 1)
    store.flush()
    feed = Feed(KnownRun(id="x", name="x", folder=store.folder))
    heard = [feed.listener() for _ in range(6)]

    async def look_all() -> None:
        await asyncio.gather(*(feed.look() for _ in heard))

    asyncio.run(look_all())
    assert len(looks) == 1
    told = [("step", {"stage": 0, "step": 1}), ("state", {"state": "running", "text": ""})]
    assert [list(one) for one in heard] == [told] * 6
    assert list(feed.listener()) == list(heard[0]), "who comes later is told where the run is"


def test_a_stream_ends_when_the_server_does(store: RunStore, serve: Serve, eventually: Eventually) -> None:
    write_step(store, 1)
    store.flush()
    server = serve(store.folder)
    listener = Listener(server, id_of(server))
    eventually(lambda: "step" in listener.kinds())
    server.stop()  # asserts that it ends
    eventually(lambda: not listener._thread.is_alive())


def test_a_run_that_vanishes_and_comes_back_is_told_of(tmp_path: Path, store: RunStore) -> None:
    feed = Feed(KnownRun(id="x", name="x", folder=store.folder))
    write_step(store, 1)
    store.flush()
    first = feed._read_if_changed()
    assert first is not None
    assert feed._read_if_changed() is None, "nothing has changed"
    elsewhere = Feed(KnownRun(id="y", name="y", folder=tmp_path / "nowhere"))
    assert elsewhere._read_if_changed() is None
    (tmp_path / "nowhere").mkdir()
    with sqlite3.connect(tmp_path / "nowhere" / "run.db") as connection:
        connection.execute("VACUUM INTO ?", (str(tmp_path / "unused"),))
    connection.close()
    assert elsewhere._read_if_changed() is None, "a file without tables is no run yet"
    (store.folder / "run.db").rename(tmp_path / "away")
    assert feed._read_if_changed() is None
    (tmp_path / "away").rename(store.folder / "run.db")
    write_step(store, 2)
    store.flush()
    again = feed._read_if_changed()
    assert again is not None
    assert again.step == 2


def test_news_are_what_changed() -> None:
    def state(step: int | None, *scores: float, name: str = "running") -> State:
        found = frozenset((0, k, "greedy", score) for k, score in enumerate(scores))
        return State(stage=None if step is None else 0, step=step, run=RunState(name=name), evaluations=found,
                     alarms=frozenset())  # fmt: skip

    assert news(None, state(None)) == [("state", {"state": "running", "text": ""})]
    assert [kind for kind, _ in news(None, state(3, 0.1, 0.2))] == ["step", "state"], "no history"
    assert news(state(3, 0.1), state(3, 0.1)) == []
    assert [content["score"] for _, content in news(state(3, 0.1), state(3, 0.1, 0.2))] == [0.2]
    assert news(state(9), state(4)) == [("step", {"stage": 0, "step": 4})], "a rewind is news"
    assert news(state(4), state(4, name="finished")) == [("state", {"state": "finished", "text": ""})]
    assert news(state(4, name="finished"), state(4, name="finished")) == []


def test_a_run_that_falls_silent_is_told_to_be_dead_though_no_file_changes(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = Feed(KnownRun(id="x", name="x", folder=store.folder))
    store.flush()
    feed._state = feed._read_if_changed()
    assert feed._state is not None
    assert feed._state.run.name == "running"
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 2 * DEAD_AFTER_SECONDS)
    found = feed._read_if_changed()
    assert found is not None
    assert [content["state"] for kind, content in news(feed._state, found)] == ["dead"]
