"""The benchmark that throws faults at a run, with two of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.heavy
@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_after_two_faults_a_run_ends_with_the_bits_of_one_left_alone() -> None:
    command = [sys.executable, "benchmarks/chaos.py", "--faults", "2", "--seed", "7"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "2 faults; weights the same to the bit" in " ".join(done.stdout.split())
