"""The limit on transcripts: the newest stay, the ledger and all scores stay, a resume ends the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np

from temper.runs.reader import RunReader
from temper.runs.store.run_store import RunStore, open_run
from temper.types import Batch, Event, EventKind, StepReport

StepMaker = Callable[..., tuple[StepReport, Batch]]


def step_bytes(folder: Path, make_step: StepMaker) -> int:
    """What the transcripts of one made-up step take."""
    store = open_run(folder, config="", resume=False)
    store.append(*make_step(1))
    store.close()
    with RunReader(folder) as reader:
        (row,) = reader.query("SELECT bytes FROM transcripts")
    return int(row["bytes"])


def limited(folder: Path, limit: float, resume: bool = False) -> RunStore:
    return open_run(folder, config="", resume=resume, transcript_bytes=limit)


def test_only_the_newest_transcripts_stay_and_everything_else_of_the_old_ones(
    tmp_path: Path, make_step: StepMaker
) -> None:
    limit = 3.5 * step_bytes(tmp_path / "one", make_step)
    for name, bound in (("bounded", limit), ("whole", float("inf"))):
        store = limited(tmp_path / name, bound)
        for step in range(1, 8):
            store.append(*make_step(step))
        store.close()
    with RunReader(tmp_path / "bounded") as bounded, RunReader(tmp_path / "whole") as whole:
        assert bounded.ledger() == whole.ledger()
        assert bounded.steps() == whole.steps()
        assert bounded.failures() == whole.failures()
        for step in range(1, 8):
            kept, all_of_it = bounded.trajectories(0, step), whole.trajectories(0, step)
            assert [t.score for t in kept] == [t.score for t in all_of_it]
            assert [t.num_tokens for t in kept] == [t.num_tokens for t in all_of_it]
            assert [t.parts for t in kept] == [t.parts for t in all_of_it]
            if step > 4:
                assert [t.text for t in kept] == [t.text for t in all_of_it]
                assert all(t.rows for t in kept)
            else:
                assert {(t.text, t.messages, t.events, t.rows) for t in kept} == {(None, (), (), ())}
        assert sum(row["bytes"] for row in bounded.query("SELECT bytes FROM transcripts")) <= limit


def test_what_was_done_to_the_world_outlives_its_transcript(tmp_path: Path, make_step: StepMaker) -> None:
    """Also what stands in no turn: of an attempt that failed and was replaced."""
    wrote = Event(kind=EventKind.SIDE_EFFECT, name="write", detail="done: write(path='a')", cost=0.5)
    refused, called = Event(kind=EventKind.DENIED, name="send"), Event(kind=EventKind.TOOL_CALL, name="look")
    report, batch = make_step(1)
    group = batch.groups[0]
    busy, quiet, *others = group.trajectories
    turn = dataclasses.replace(busy.turns[0], events=(called, wrote, refused))
    busy = dataclasses.replace(busy, turns=(turn,), unplaced_events=(dataclasses.replace(wrote, name="earlier"),))
    quiet = dataclasses.replace(quiet, turns=(dataclasses.replace(quiet.turns[0], events=(called,)),))
    group = dataclasses.replace(group, trajectories=(busy, quiet, *others))
    store = limited(tmp_path / "run", 0.0)
    store.append(report, dataclasses.replace(batch, groups=(group, *batch.groups[1:])))
    store.flush()
    with RunReader(tmp_path / "run") as reader:
        assert [len(t.events) for t in reader.trajectories(0, 1) if t.group_id == group.id] == [4, 1]
    for step in (2, 3):
        store.append(*make_step(step))
    store.close()
    with RunReader(tmp_path / "run") as reader:
        kept = [t for t in reader.trajectories(0, 1) if t.group_id == group.id]
        assert [t.text for t in kept] == [None, None]
        said = [(event["turn"], event["kind"], event["name"]) for event in kept[0].events]
        assert said == [(0, "side_effect", "write"), (0, "denied", "send"), (None, "side_effect", "earlier")]
        assert (kept[0].events[0]["detail"], kept[0].events[0]["cost"]) == (wrote.detail, 0.5)
        assert kept[1].events == ()


def test_the_newest_step_stays_even_when_it_is_larger_than_the_limit(tmp_path: Path, make_step: StepMaker) -> None:
    store = limited(tmp_path / "run", 0.0)
    for step in (1, 2):
        store.append(*make_step(step))
    store.close()
    with RunReader(tmp_path / "run") as reader:
        assert {t.text for t in reader.trajectories(0, 1)} == {None}
        assert None not in {t.text for t in reader.trajectories(0, 2)}


def test_a_run_that_was_killed_and_resumed_ends_with_the_same_transcripts(tmp_path: Path, make_step: StepMaker) -> None:
    limit = 2.5 * step_bytes(tmp_path / "one", make_step)
    whole = limited(tmp_path / "whole", limit)
    killed = limited(tmp_path / "killed", limit)
    for step in range(1, 7):
        whole.append(*make_step(step))
        killed.append(*make_step(step))
    killed.close()
    killed = limited(tmp_path / "killed", limit, resume=True)
    killed.rewind(0, 3)
    for step in range(4, 7):
        killed.append(*make_step(step))
    for store in (whole, killed):
        store.close()
    with RunReader(tmp_path / "whole") as one, RunReader(tmp_path / "killed") as other:
        assert one.fingerprint() == other.fingerprint()


def long_step(make_step: StepMaker, step: int, size: int = 20_000) -> tuple[StepReport, Batch]:
    """A step of long rows whose log-probabilities cannot be compressed."""
    report, batch = make_step(step)
    drawn = -np.random.default_rng(step).random(size, dtype=np.float32)
    columns = {
        "token_ids": np.arange(size), "loss_mask": np.arange(size) > 0, "behavior_logprobs": drawn,
        "versions": np.zeros(size), "advantages": np.ones(size), "weights": np.ones(size), "proximal_logprobs": drawn,
    }  # fmt: skip
    samples = tuple(dataclasses.replace(sample, **columns) for sample in batch.updates[0])
    return report, dataclasses.replace(batch, updates=(samples,))


def test_the_file_stops_growing_when_the_limit_is_met(tmp_path: Path, make_step: StepMaker) -> None:
    store = limited(tmp_path / "run", 2e6)
    sizes = []
    for step in range(1, 31):
        store.append(*long_step(make_step, step))
        if step % 15 == 0:
            store.flush()
            with RunReader(store.folder) as reader:
                sizes.append(reader.query("PRAGMA page_count")[0]["page_count"] * 4096)
    store.close()
    assert 2e6 < sizes[0] < 3e6
    assert sizes[1] < 1.05 * sizes[0]
