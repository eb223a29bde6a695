"""The benchmark that throws faults at a run, with two of them."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


class ForgetfulRun:
    """Takes the place of Driven: makes steps whenever somebody looks, and a fault takes some of them back for good."""

    is_over = False

    def __init__(self, victim: subprocess.Popen[bytes], forgets: set[Any]) -> None:
        self._victim, self._forgets, self._done = victim, forgets, 0

    def steps(self) -> int:
        self._done += 1
        return self._done

    def rows(self) -> set[Any]:
        rows = {(0, step, "") for step in range(self._done)}
        return rows - (self._forgets if self._victim.poll() is not None else set())

    def find(self, role: str) -> int:
        return self._victim.pid


@pytest.mark.parametrize("forgets", [set(), {(0, 0, ""), (0, 1, "")}])
def test_what_a_fault_takes_back_is_counted_though_the_run_has_gone_further(
    forgets: set[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import chaos

    with subprocess.Popen(["sleep", "600"]) as victim:
        run: Any = ForgetfulRun(victim, forgets)
        seen = chaos.hit(run, "sampler", signal.SIGKILL, "a step", random.Random(0))
    assert seen is not None
    assert (seen.outcome, seen.lost) == ("went on", len(forgets))


@pytest.mark.heavy
@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_after_two_faults_a_run_ends_with_the_bits_of_one_left_alone() -> None:
    command = [sys.executable, "benchmarks/chaos.py", "--faults", "2", "--seed", "7"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "2 faults; weights the same to the bit" in " ".join(done.stdout.split())
