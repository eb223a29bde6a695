"""Predictions of `temper simulate` against real runs on this machine.

    python benchmarks/simulate.py --out /tmp/simulated            # eleven short runs, about 8 minutes on two cores
    python benchmarks/simulate.py --out /tmp/simulated --again    # compares what is there, runs nothing
    python benchmarks/simulate.py --out /tmp/simulated --recipe RECIPE --device cuda --steps 8 --only 1

One synchronous run is measured, and the seconds a step of all others are predicted from it: another bound S, another
group size, more groups, fewer sequences at once. The learning rate is 0, so that lengths stay what they are; nothing is
evaluated and saved. In one process sampler and trainer take turns on one device; in two each has its own.
--clock cpu counts the seconds that the process computes, for a CPU that other programs use too: in one process that
never waits for another these are the seconds of a machine of its own.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch

from temper.commands.simulate import SimulationRequest, measure_run, simulate_recipe

RECIPE = """
name = "measured"
sampling = { max_new_tokens = 48 }
optim = { learning_rate = 0.0 }
objective = { corrections = ["token_tis"] }
alarms = { readiness = "off" }
rollout = { groups_per_step = 16, group_size = 8, drop_degenerate = false }
engine = { max_running = 512 }

[model.new]
width = 128
layers = 4
heads = 4
kv_heads = 2
mlp_width = 528
context = 64
alphabet = "abcdefghijklmnopqrstuvwxyz"

[[train]]
generator = "rearrange"
options = { min_letters = 4, max_letters = 7 }
seed = 1

[[reward]]
kind = "rearranged"
"""


START = {
    "wall": "from temper.cli import main; main()",
    "cpu": "import time; time.monotonic = time.perf_counter = time.process_time; from temper.cli import main; main()",
}
"""What a run is started with, by the clock that it measures itself with."""


@dataclass(frozen=True)
class Setting:
    name: str
    changes: dict[str, str] = field(default_factory=dict)
    devices: int = 1
    """2: sampler and trainer have a process and a core, or a GPU, each; on a single GPU they share it."""


def _apart(staleness: int) -> Setting:
    changes = {"rollout.max_staleness": str(staleness), "engine.place": '"process"'}
    return Setting(f"S = {staleness}, two processes", changes, devices=2 if staleness else 1)


SETTINGS = (
    Setting("S = 0 (measured)"),
    Setting("S = 1", {"rollout.max_staleness": "1"}),
    Setting("S = 4", {"rollout.max_staleness": "4"}),
    Setting("groups of 4", {"rollout.group_size": "4"}),
    Setting("groups of 16", {"rollout.group_size": "16"}),
    Setting("32 groups a step", {"rollout.groups_per_step": "32"}),
    Setting("S = 1, 64 at once", {"rollout.max_staleness": "1", "engine.max_running": "64"}),
    *(_apart(staleness) for staleness in (0, 1, 2, 4)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for recipe and runs")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument(
        "--rounds", type=int, default=1, help="of all settings; each is predicted from its own first run"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--clock", choices=START, default="wall")
    parser.add_argument(
        "--recipe", type=Path, default=None, help="another recipe with one stage of reinforcement learning"
    )
    parser.add_argument("--only", type=int, nargs="+", default=[], help="numbers of settings; 0 is always run")
    parser.add_argument("--again", action="store_true", help="compare the runs that are there")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    recipe = options.recipe or options.out / "recipe.toml"
    if options.recipe is None:
        recipe.write_text(RECIPE)
    assert options.rounds > 0, "at least one round"
    chosen = [number for number in range(len(SETTINGS)) if not options.only or number in (0, *options.only)]
    common = {"steps": str(options.steps), "model.device": f'"{options.device}"', "optim.learning_rate": "0.0",
              "evaluation.every": "0", "checkpoint.every": "1000000"}  # fmt: skip
    for turn in range(options.rounds) if not options.again else ():
        for number in chosen:
            run = options.out / f"round-{turn}" / f"run-{number}"
            train(recipe, run, {**common, **SETTINGS[number].changes}, START[options.clock])
    print("| setting | measured s/step | predicted | predicted / measured | by round |\n|---|---:|---:|---:|---|")
    for number in chosen:
        pairs = [compare(recipe, options.out / f"round-{turn}", number, common) for turn in range(options.rounds)]
        ratios = [predicted / measured for measured, predicted in pairs]
        measured, predicted = (median(values) for values in zip(*pairs, strict=True))
        listed = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        print(
            f"| {SETTINGS[number].name} | {measured:.3f} | {predicted:.3f} | {median(ratios):.2f} | {listed} |",
            flush=True,
        )


def train(recipe: Path, run: Path, changes: dict[str, str], start: str) -> None:
    command = [sys.executable, "-c", start, "train", str(recipe), "--run", str(run)]
    command += [part for key, value in changes.items() for part in ("--set", f"{key}={value}")]
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, env=environment)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)


def compare(recipe: Path, folder: Path, number: int, common: dict[str, str]) -> tuple[float, float]:
    """Seconds a step: measured, and predicted from the first run of the same round."""
    setting = SETTINGS[number]
    measured = measure_run(folder / f"run-{number}").seconds_per_step
    changes = {**common, **setting.changes}
    staleness = int(changes.get("rollout.max_staleness", "0"))
    devices = 1 if torch.cuda.device_count() == 1 else setting.devices
    asked = SimulationRequest(like=folder / "run-0", given={}, gpus=[devices], staleness=[staleness], steps=12)
    overrides = [f"{key}={value}" for key, value in changes.items()]
    predicted = simulate_recipe(recipe, asked, overrides=overrides).runs[0].seconds_per_step
    return measured, predicted


if __name__ == "__main__":
    main()
