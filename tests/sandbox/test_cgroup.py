"""Where control groups are made. The folders here are plain ones laid out like the kernel's."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from temper.sandbox import cgroup
from temper.sandbox.cgroup import ControlGroup, Homes, find_homes
from temper.sandbox.program import Limits


@pytest.fixture(autouse=True)
def plain_folders_are_not_removed_with_their_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "REMOVE_SECONDS", 0.0)


def version_2(root: Path, delegated: dict[str, str]) -> None:
    for path, controllers in delegated.items():
        (root / path).mkdir(parents=True, exist_ok=True)
        (root / path / "cgroup.subtree_control").write_text(controllers)


def test_version_2_uses_the_nearest_group_that_hands_on_both_controllers(tmp_path: Path) -> None:
    version_2(tmp_path, {"": "cpu memory pids", "user": "memory pids", "user/session": "memory", "user/session/me": ""})
    assert find_homes(tmp_path, "0::/user/session/me\n") == Homes(tmp_path / "user", tmp_path / "user", True)


def test_version_2_without_delegation_is_not_used(tmp_path: Path) -> None:
    version_2(tmp_path, {"": "cpu", "me": ""})
    assert find_homes(tmp_path, "0::/me\n") is None


def test_version_1_uses_one_folder_per_controller(tmp_path: Path) -> None:
    for path in ("memory/me", "pids"):
        (tmp_path / path).mkdir(parents=True)
    membership = "9:name=systemd:/\n8:pids:/on/the/host\n4:cpu,memory:/me\n0::/\n"
    assert find_homes(tmp_path, membership) == Homes(tmp_path / "memory" / "me", tmp_path / "pids", False)


@pytest.mark.parametrize("membership", ["", "0::/\n", "4:memory:/\n8:pids:/\n"])
def test_where_there_is_no_tree_there_is_no_group(tmp_path: Path, membership: str) -> None:
    assert find_homes(tmp_path / "absent", membership) is None


def test_limits_and_members_are_written_and_a_kill_is_read(tmp_path: Path) -> None:
    group = ControlGroup(Homes(tmp_path, tmp_path, is_version_2=True))
    group.limit(Limits(memory_bytes=1 << 20, processes=4))
    group.add(77)
    (folder,) = tmp_path.iterdir()
    written = {file.name: file.read_text() for file in folder.iterdir()}
    assert written == {"memory.max": str(1 << 20), "pids.max": "5", "cgroup.procs": "77"}
    (folder / "memory.events").write_text("low 0\noom 3\noom_kill 0\n")
    assert not group.has_run_out_of_memory()
    (folder / "memory.events").write_text("low 0\noom 3\noom_kill 1\n")
    assert group.has_run_out_of_memory()


def test_groups_of_dead_processes_are_swept_and_those_of_the_living_stay(tmp_path: Path) -> None:
    dead = subprocess.Popen(["/bin/true"])
    dead.wait(timeout=30)
    version_2(tmp_path, {"": "memory pids"})
    for pid in (dead.pid, os.getppid()):
        (tmp_path / f"temper-sandbox-{pid}-0").mkdir()
    assert find_homes(tmp_path, "0::/\n")
    assert not (tmp_path / f"temper-sandbox-{dead.pid}-0").exists()
    assert (tmp_path / f"temper-sandbox-{os.getppid()}-0").exists()
