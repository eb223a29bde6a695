"""A checkpoint is whole and verified or it is not there; every damage is named."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from temper.errors import UserError
from temper.trainer.checkpoint import (
    latest_checkpoint,
    list_checkpoints,
    prune,
    read_checkpoint,
    remove_unfinished,
    write_checkpoint,
)

STATE = {"step": 40, "draws": [3, 1, 2], "name": "é"}


def write_model(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 10)
    (folder / "trainer").mkdir()
    (folder / "trainer" / "optimizer.safetensors").write_bytes(b"moments")


def write(parent: Path, name: str, **more: Callable[[Path], None]) -> Path:
    return write_checkpoint(parent, name, {"model": write_model, **more}, STATE)


def parts_of(checkpoint: Path) -> list[Path]:
    return [path for path in sorted(checkpoint.rglob("*")) if path.is_file()]


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "checkpoints", "step-40")
    assert checkpoint == tmp_path / "checkpoints" / "step-40"
    assert read_checkpoint(checkpoint) == STATE
    names = {path.relative_to(checkpoint).as_posix() for path in parts_of(checkpoint)}
    assert names == {"manifest.json", "state.json", "model.safetensors", "trainer/optimizer.safetensors"}
    assert [path.name for path in checkpoint.parent.iterdir()] == ["step-40"]


def test_equal_states_give_equal_bytes(tmp_path: Path) -> None:
    first, second = (write(tmp_path / name, "step-1") for name in "ab")
    assert [path.read_bytes() for path in parts_of(first)] == [path.read_bytes() for path in parts_of(second)]


@pytest.mark.parametrize("number", range(4))
def test_each_deleted_part_is_named(tmp_path: Path, number: int) -> None:
    checkpoint = write(tmp_path, "step-40")
    part = parts_of(checkpoint)[number]
    part.unlink()
    with pytest.raises(UserError, match=rf"{part.name} is missing.*older checkpoint"):
        read_checkpoint(checkpoint)


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("place", [0.0, 0.3, 0.7, 0.99])
def test_each_part_with_one_flipped_byte_is_named(tmp_path: Path, number: int, place: float) -> None:
    checkpoint = write(tmp_path, "step-40")
    part = parts_of(checkpoint)[number]
    content = bytearray(part.read_bytes())
    content[int(place * len(content))] ^= 1
    part.write_bytes(content)
    with pytest.raises(UserError, match=rf"{part.name} is damaged.*older checkpoint"):
        read_checkpoint(checkpoint)


def test_a_part_that_was_cut_short_is_named_with_its_sizes(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, "step-40")
    (checkpoint / "model.safetensors").write_bytes(b"short")
    with pytest.raises(UserError, match=r"model.safetensors has 5 bytes instead of 2560"):
        read_checkpoint(checkpoint)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_leaves_the_previous_checkpoint_and_nothing_else(tmp_path: Path, error: Exception) -> None:
    def fill_disk(folder: Path) -> None:
        (folder / "half").write_bytes(b"x" * 1000)
        raise error

    write(tmp_path, "step-40")
    with pytest.raises(
        UserError, match=r"disk full while saving trainer .*step-50; the previous checkpoint step-40 is"
    ):
        write(tmp_path, "step-50", trainer=fill_disk)
    assert [path.name for path in tmp_path.iterdir()] == ["step-40"]
    assert read_checkpoint(tmp_path / "step-40") == STATE


def test_a_full_disk_at_the_first_checkpoint_says_that_there_is_none(tmp_path: Path) -> None:
    def fill_disk(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(UserError, match=r"disk full while saving .*; there is no earlier checkpoint"):
        write(tmp_path, "step-50", trainer=fill_disk)


def test_a_failure_that_is_not_the_disks_keeps_its_own_error(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        raise KeyError("a bug")

    with pytest.raises(KeyError, match="a bug"):
        write(tmp_path, "step-50", trainer=fail)
    assert list(tmp_path.iterdir()) == []


def test_checkpoints_are_ordered_by_number_and_pruned_from_the_oldest(tmp_path: Path) -> None:
    for number in (9, 100, 10):
        write(tmp_path, f"step-{number}")
    (tmp_path / "merged-step-9-012345678901").mkdir()  # the merged copy of one
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-9", "step-10", "step-100"]
    assert latest_checkpoint(tmp_path) == tmp_path / "step-100"
    assert [path.name for path in prune(tmp_path, keep=2)] == ["step-9"]
    assert prune(tmp_path, keep=2) == []
    assert latest_checkpoint(tmp_path / "nowhere") is None


def test_writing_a_name_again_replaces_it(tmp_path: Path) -> None:
    write(tmp_path, "step-40")
    write_checkpoint(tmp_path, "step-40", {}, {"step": 41})
    assert read_checkpoint(tmp_path / "step-40") == {"step": 41}
    assert [path.name for path in tmp_path.iterdir()] == ["step-40"]


KILLED = """
import sys, time
from pathlib import Path
from temper.trainer.checkpoint import write_checkpoint
def slow(folder):
    (folder / "model.safetensors").write_bytes(b"x" * 100_000)
    print("writing", flush=True)
    time.sleep(60)
write_checkpoint(Path(sys.argv[1]), "step-50", {"model": slow}, {})
"""


def test_a_run_killed_while_saving_leaves_the_previous_checkpoint_and_a_leftover_to_clear(tmp_path: Path) -> None:
    write(tmp_path, "step-40")
    with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        os.kill(process.pid, signal.SIGKILL)
        process.wait(timeout=30)
    assert latest_checkpoint(tmp_path) == tmp_path / "step-40"
    assert [path.name for path in remove_unfinished(tmp_path)] == [".tmp-step-50"]
    assert [path.name for path in tmp_path.iterdir()] == ["step-40"]
    assert read_checkpoint(tmp_path / "step-40") == STATE


def test_a_checkpoint_without_its_manifest_is_named_and_not_skipped(tmp_path: Path) -> None:
    for number in (9, 10):
        write(tmp_path, f"step-{number}")
    (tmp_path / "step-10" / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"step-10 is not a complete checkpoint: manifest\.json is missing"):
        latest_checkpoint(tmp_path)
