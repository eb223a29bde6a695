"""Peak memory is counted from when it is asked to, or says that it was not."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from temper.trainer.memory import PeakMemory

CPU = torch.device("cpu")
MIB = 2**20


def hold_for_a_moment(size: int) -> None:
    """From the system itself: an allocator may keep what it was given back."""
    with mmap.mmap(-1, size) as memory:
        memory.write(bytes(size // 2))
        memory.write(bytes(size // 2))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux can start its count anew")
def test_a_count_begins_where_it_is_started() -> None:
    first = PeakMemory(CPU)
    if first.is_since_start:
        pytest.skip("this system does not let a process start its count anew")
    hold_for_a_moment(64 * MIB)
    high = first.bytes()
    second = PeakMemory(CPU)
    assert second.bytes() < high - 32 * MIB
    hold_for_a_moment(64 * MIB)
    assert second.bytes() > high - 16 * MIB


def test_a_system_that_cannot_says_so(tmp_path: Path) -> None:
    memory = PeakMemory(CPU, process=tmp_path / "missing")
    assert memory.is_since_start
    assert memory.bytes() > 10 * MIB
