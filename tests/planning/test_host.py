"""What is free of this machine's memory is what Linux says, or what a container's limit leaves."""

from __future__ import annotations

from pathlib import Path

from temper.planning.host import free_host_bytes

KIB = 1024


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal:  4000 kB\nMemFree:  100 kB\nMemAvailable:   2000 kB\n"}


def test_what_is_available_is_free(tmp_path: Path) -> None:
    assert free_host_bytes(write(tmp_path, MEMINFO)) == 2000 * KIB
    group = {"sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/memory.current": "1000\n"}
    assert free_host_bytes(write(tmp_path, group)) == 2000 * KIB, "no limit"


def test_a_limit_that_leaves_less_counts_and_cached_files_give_way(tmp_path: Path) -> None:
    group = {
        "sys/fs/cgroup/memory.max": f"{1000 * KIB}\n",
        "sys/fs/cgroup/memory.current": f"{900 * KIB}\n",
        "sys/fs/cgroup/memory.stat": f"anon 5\ninactive_file {50 * KIB}\n",
    }
    assert free_host_bytes(write(tmp_path, {**MEMINFO, **group})) == 150 * KIB


def test_version_1_of_control_groups_is_read_too(tmp_path: Path) -> None:
    group = {
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{700 * KIB}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{600 * KIB}\n",
        "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 0\n",
    }
    assert free_host_bytes(write(tmp_path, {**MEMINFO, **group})) == 100 * KIB


def test_where_nobody_says_nothing_is_known(tmp_path: Path) -> None:
    assert free_host_bytes(tmp_path) is None
