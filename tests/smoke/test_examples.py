"""Every file in examples/ is short and runs as it stands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
LONGEST = 40


def run(name: str, *arguments: str, folder: Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_short(path: Path) -> None:
    assert path.read_text().count("\n") <= LONGEST


@pytest.mark.heavy
def test_a_model_is_trained_on_own_rows_and_then_answers(tmp_path: Path) -> None:
    assert "best checkpoint: runs/example-train/checkpoints/1-rl/step-10" in run("train.py", folder=tmp_path)
    assert run("chat.py", "runs/example-train", folder=tmp_path).count("sampled:") == 4


@pytest.mark.heavy
def test_an_own_reward_is_learned(tmp_path: Path) -> None:
    out = run("reward.py", folder=tmp_path)
    assert "finished, 20 steps" in out


@pytest.mark.heavy
def test_an_own_environment_is_played(tmp_path: Path) -> None:
    assert "finished, 10 steps" in run("environment.py", folder=tmp_path)


@pytest.mark.heavy
def test_an_own_objective_trains(tmp_path: Path) -> None:
    out = run("objective.py", folder=tmp_path)
    assert [line.split()[0] for line in out.splitlines() if line.split()[0] in ("dapo", "mine")] == ["dapo", "mine"]


def test_every_example_is_run_here() -> None:
    """A new file needs a line of its own in this one."""
    mine = Path(__file__).read_text()
    assert [path.name for path in EXAMPLES if f'run("{path.name}"' not in mine] == []
