"""What README and the docs tell people to type, typed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
VERBS = re.compile(r"^temper (\w+)", flags=re.MULTILINE)


def run(*command: str, cwd: Path = ROOT) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=cwd, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_grpo_in_one_file_runs() -> None:
    out = run(sys.executable, "recipes/grpo_in_one_file.py", "--sft-steps", "2", "--rl-steps", "1", "--heldout", "20")
    assert "gain" in out


def test_the_demo_passes_its_dry_run() -> None:
    out = run(sys.executable, "-m", "temper", "train", "recipes/demo.toml", "--dry-run")
    assert "reward of gold answers   mean 1" in out


@pytest.mark.heavy
def test_the_demo_recipe_trains(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "temper", "train", "recipes/demo.toml", "--run", str(tmp_path / "run")]
    small = ["steps=1", "optim.warmup_steps=1", "heldout.size=8", "rollout.groups_per_step=4", "engine.max_running=32"]
    small += ['alarms.readiness="note"']  # after one step of imitation it is not ready for RL, and the gate says so
    out = run(*command, *(part for key in small for part in ("--set", key)))
    assert "held-out score, 95% interval" in out
    assert "temper report" in out


@pytest.mark.parametrize("verb", sorted(set(VERBS.findall((ROOT / "README.md").read_text()))))
def test_every_verb_in_the_readme_exists(verb: str) -> None:
    assert "Usage" in run(sys.executable, "-m", "temper", verb, "--help")
