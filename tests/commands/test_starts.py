"""A start that fails leaves the name of its run free; whatever was computed stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from temper.commands.starts import has_begun, undo_failed_start
from temper.errors import UserError
from temper.runs.store.run_store import open_run
from temper.types import Batch, StepReport

REPORT = StepReport(
    stage=0, step=1, version=1, loss=0.0, metrics={}, seconds={}, system={}, groups_trained=0, groups_dropped=0,
    max_staleness=0,
)  # fmt: skip


def start(folder: Path, end: BaseException, *, records: bool = False) -> None:
    """What a training does that makes its directory and then ends."""
    with undo_failed_start(folder):
        store = open_run(folder, config="", resume=folder.exists())
        if records:
            store.begin_stage(0, "rl", 2)
            store.append(REPORT, Batch(updates=()))
        store.close()
        raise end


def fail(folder: Path, *, records: bool = False) -> None:
    with pytest.raises(UserError):
        start(folder, UserError("no such file"), records=records)


def test_a_directory_that_was_made_for_nothing_is_removed(tmp_path: Path) -> None:
    fail(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_was_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    fail(tmp_path / "run")
    assert (tmp_path / "run" / "run.db").is_file()


def test_a_run_that_recorded_a_step_is_kept(tmp_path: Path) -> None:
    fail(tmp_path / "run", records=True)
    assert has_begun(tmp_path / "run")


def test_a_checkpoint_alone_counts_as_begun(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints" / "0-sft" / "step-1").mkdir(parents=True)
    assert has_begun(tmp_path / "run")
    assert not has_begun(tmp_path / "elsewhere")


def test_a_signal_leaves_the_run_that_its_message_says_to_resume(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path / "run", KeyboardInterrupt())
    assert (tmp_path / "run").is_dir()
