"""Mirrors forward what the store holds, and cannot disturb a run: not by failing, not by being slow."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import pickle
import re
import sqlite3
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from temper.errors import UserError, install_line
from temper.runs import mirrors
from temper.runs.mirrors import QUEUE_SIZE, WRITERS, Mirror, open_mirrors
from temper.types import Batch, EvaluationResult, StepReport

MakeStep = Callable[..., tuple[StepReport, Batch]]
ROOT = Path(__file__).parents[2]

PROGRAM = """
import pickle, sys
from pathlib import Path
from temper.runs.mirrors import open_mirrors
reports, evaluation = pickle.loads(Path(sys.argv[1]).read_bytes())
warnings = []
(mirror,) = open_mirrors([sys.argv[2]], Path(sys.argv[3]), [3, 3], warnings.append)
mirror.evaluation(evaluation)
for report in reports:
    mirror.append(report, None)
mirror.close(100.0)
sys.exit("; ".join(warnings) or 0)
"""


class Written:
    """A writer that remembers, and fails or waits where it is told to."""

    def __init__(self, fails_at: int | None = None, gate: threading.Event | None = None) -> None:
        self.lines: list[tuple[dict[str, float], int]] = []
        self.is_closed = False
        self._fails_at, self._gate = fails_at, gate

    def __call__(self, folder: Path, run: str) -> Written:
        assert folder.is_dir()
        return self

    def write(self, scalars: Mapping[str, float], step: int) -> None:
        if self._gate is not None:
            assert self._gate.wait(timeout=60)
        if step == self._fails_at:
            raise RuntimeError("the server is gone")
        self.lines.append((dict(scalars), step))

    def close(self) -> None:
        self.is_closed = True


def started(writer: Written, run: Path) -> tuple[Mirror, list[str]]:
    warnings: list[str] = []
    mirror = Mirror("test", writer, run, [3, 3], warnings.append)
    mirror.start()
    return mirror, warnings


def test_everything_with_a_number_is_forwarded_on_one_axis(
    tmp_path: Path, make_step: MakeStep, make_evaluation: Callable[..., EvaluationResult]
) -> None:
    writer = Written()
    mirror, warnings = started(writer, tmp_path)
    mirror.evaluation(make_evaluation(0, 0.25))
    mirror.append(*make_step(1, **{"policy/lost": math.nan}))
    mirror.append(*make_step(2, stage=1))
    mirror.close()
    assert [step for _, step in writer.lines] == [0, 1, 5]  # stage 1 begins after the 3 steps of stage 0
    assert writer.lines[0][0] == {"heldout/greedy": 0.25, "heldout/greedy/low": 0.2, "heldout/greedy/high": 0.3}
    assert writer.lines[1][0] == {
        "reward/mean": 0.1, "policy/entropy": 1 / 3, "sys/rollout_tok_s": 101.0, "seconds/rollout": 3.0,
        "seconds/train": 1.0, "loss/total": 0.5,
    }  # fmt: skip
    assert writer.is_closed
    assert warnings == []


def test_a_broken_mirror_is_told_once_and_never_raises(tmp_path: Path, make_step: MakeStep) -> None:
    writer = Written(fails_at=2)
    mirror, warnings = started(writer, tmp_path)
    for step in (1, 2, 3):
        mirror.append(*make_step(step))
    mirror._writer.join(timeout=30)
    for step in range(4, 4 + 2 * QUEUE_SIZE):
        mirror.append(*make_step(step))
    mirror.close()
    assert [step for _, step in writer.lines] == [1]
    assert len(warnings) == 1
    assert "RuntimeError: the server is gone" in warnings[0]


def test_a_mirror_that_cannot_open_or_whose_warning_fails_does_not_raise(tmp_path: Path, make_step: MakeStep) -> None:
    def closed_port(folder: Path, run: str) -> Written:
        raise OSError("no route")

    def broken_log(text: str) -> None:
        raise ValueError(text)

    mirror = Mirror("test", closed_port, tmp_path, [3], broken_log)
    mirror.start()
    mirror.append(*make_step(1))
    mirror.close()
    assert not mirror._writer.is_alive()


def test_a_mirror_that_hangs_holds_up_neither_steps_nor_the_end(tmp_path: Path, make_step: MakeStep) -> None:
    gate = threading.Event()
    mirror, warnings = started(Written(gate=gate), tmp_path)
    for step in range(1, QUEUE_SIZE + 20):  # an unbounded wait would never come out of here
        mirror.append(*make_step(step))
    mirror.close(deadline_seconds=0.2)
    assert mirror._writer.is_alive()
    assert len(warnings) == 1
    assert "did not finish within 0.2 s" in warnings[0]
    gate.set()


def test_what_a_slow_mirror_missed_is_counted(tmp_path: Path, make_step: MakeStep) -> None:
    gate, writer = threading.Event(), Written()
    writer._gate = gate
    mirror, warnings = started(writer, tmp_path)
    for step in range(1, QUEUE_SIZE + 20):
        mirror.append(*make_step(step))
    gate.set()
    mirror.close()
    missed = QUEUE_SIZE + 19 - len(writer.lines)
    assert missed > 0
    assert warnings == [f"mirror test was too slow: {missed} steps or evaluations are missing. "
                        f"Training goes on; the run is in {tmp_path}"]  # fmt: skip


def test_unknown_and_missing_mirrors_are_refused_before_any_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r'"graph" is unknown. Choose among tensorboard, trackio, wandb'):
        open_mirrors(["graph"], tmp_path, [1], print)
    monkeypatch.setattr(mirrors.importlib.util, "find_spec", lambda name: None)  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=re.escape(install_line("wandb"))):
        open_mirrors(["wandb"], tmp_path, [1], print)
    assert list(tmp_path.iterdir()) == []


def mirrored(name: str, tmp_path: Path, make_step: MakeStep, evaluation: EvaluationResult) -> Path:
    """Runs the real thing in a process of its own, as it keeps global state; returns where its files are."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    reports = [make_step(step, stage=stage)[0] for stage in (0, 1) for step in (1, 2, 3)]
    (tmp_path / "reports.pkl").write_bytes(pickle.dumps((reports, evaluation)))
    home = tmp_path / "home"
    home.mkdir()
    own = {name: value for name, value in os.environ.items() if not name.startswith(("TRACKIO", "WANDB", "HF_"))}
    run = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "reports.pkl"), name, str(run)],
        env={**own, "HOME": str(home), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return run / "mirrors" / name


REWARDS = {1: 0.1, 2: 0.2, 3: 0.3, 4: 0.1, 5: 0.2, 6: 0.3}
"""By step on the common axis: two stages of three steps."""


def test_tensorboard_can_read_what_was_mirrored(
    tmp_path: Path, make_step: MakeStep, make_evaluation: Callable[..., EvaluationResult]
) -> None:
    folder = mirrored("tensorboard", tmp_path, make_step, make_evaluation(0, 0.25))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events: Any = EventAccumulator(str(folder))
    events.Reload()
    assert {event.step: event.value for event in events.Scalars("reward/mean")} == pytest.approx(REWARDS)
    assert [(event.step, event.value) for event in events.Scalars("heldout/greedy")] == [(0, 0.25)]


def test_trackio_can_read_what_was_mirrored(
    tmp_path: Path, make_step: MakeStep, make_evaluation: Callable[..., EvaluationResult]
) -> None:
    folder = mirrored("trackio", tmp_path, make_step, make_evaluation(0, 0.25))
    (database,) = folder.glob("*.db")
    connection = sqlite3.connect(database)
    try:
        lines = [(step, json.loads(text)) for step, text in connection.execute("SELECT step, metrics FROM metrics")]
    finally:
        connection.close()
    assert {step: line["reward/mean"] for step, line in lines if "reward/mean" in line} == pytest.approx(REWARDS)
    assert [step for step, line in lines if line.get("heldout/greedy") == 0.25] == [0]


def records_of(data: bytes) -> Iterator[bytes]:
    """The records of a file of Weights & Biases: after 7 bytes of its own, a log as LevelDB writes it, in blocks of
    32 KiB of pieces: checksum (4 bytes), length (2), kind (1: whole, 2: first, 3: middle, 4: last)."""
    assert data[:4] == b":W&B"
    place, record = 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:  # too little for a piece: padding
            place += 32768 - place % 32768
            continue
        length, kind = struct.unpack("<HB", data[place + 4 : place + 7])
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


def test_wandb_can_read_what_was_mirrored_offline(
    tmp_path: Path, make_step: MakeStep, make_evaluation: Callable[..., EvaluationResult]
) -> None:
    folder = mirrored("wandb", tmp_path, make_step, make_evaluation(0, 0.25))
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    found: dict[int, dict[str, float]] = {}
    for data in records_of(path.read_bytes()):
        record: Any = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = {("/".join(i.nested_key) or i.key): float(i.value_json) for i in record.history.item}
            found.setdefault(int(items["_step"]), {}).update(items)
    assert {step: line["reward/mean"] for step, line in found.items() if step} == pytest.approx(REWARDS)
    assert found[0]["heldout/greedy"] == 0.25


def test_every_mirror_is_tested_for_real() -> None:
    assert set(WRITERS) == {"tensorboard", "trackio", "wandb"}
