"""What the long tail of answers costs in real runs, with and without controls: a tenth of the prompts asks for answers
eight times as long.

    OMP_NUM_THREADS=1 python benchmarks/long_tail_runs.py --out /tmp/long_tail    # two cores, 6 to 10 minutes

A model of a quarter of a million parameters learns by imitation to go through 100 signs up to the one that is asked
for, so that the prompt decides the length of an answer. It then trains on what it draws with a learning rate of 0,
which keeps lengths what they are: the same recipe for every row of the table but for the bound, the order and the
controls. Each row is compared with what `temper simulate` predicts from the first, synchronous one. Runs that are
there already are kept. Seconds of one process are those that it computes, so that other programs do not count; two
processes wait for each other, and their seconds are those of a clock.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from long_tail import keys
from simulate import START

from temper.commands.find import find_model
from temper.commands.simulate import SimulationRequest, simulate_recipe
from temper.runs.reader import RunReader
from temper.simulate.like import BESIDE
from temper.types import Message, Task

SIGNS = "".join(map(chr, range(0x100, 0x164)))
"""In the order in which they are gone through: letters with strokes and hooks, of which there are enough in a row."""
SHORT, TIMES, SHARE = 12, 8, 0.1
SPREAD = 2
"""A short answer has so many signs more or fewer."""
SKIPPED = 4
"""Steps that are not counted: a run that has just begun waits for its first groups, and knows no limit of a tail."""


def go_through(index: int, seed: int, *, long_share: float = SHARE) -> Task:
    """All signs up to that of the prompt; a share of the prompts asks for nearly all there are."""
    draw = random.Random(f"go_through/{seed}/{index}")
    middle = SHORT * (TIMES if draw.random() < long_share else 1)
    last = middle + draw.randint(-SPREAD, SPREAD)
    answer = SIGNS[:last]
    return Task(id=f"go_through:{seed}:{index}", messages=(Message(role="user", content=answer[-1]),), answer=answer)


RECIPE = f"""
name = "long_tail"
sampling = {{ max_new_tokens = {len(SIGNS) + 4} }}
alarms = {{ readiness = "off", parameters_unchanged = "off" }}

[[train]]
generator = "{Path(__file__).resolve()}:go_through"
seed = 1

[[reward]]
kind = "exact"
"""
IMITATION = f"""
[model.new]
width = 64
layers = 4
heads = 4
kv_heads = 2
mlp_width = 176
context = 128
alphabet = "{SIGNS}"

[[stage]]
kind = "sft"
steps = 200
trainer = {{ examples_per_step = 32 }}
optim = {{ learning_rate = 3e-3, warmup_steps = 20, schedule = "cosine" }}
"""
"""Teaches lengths: half of its prompts ask for long answers."""
PRACTICE = """
[model]
path = "{model}"

[[stage]]
kind = "rl"
optim = {{ learning_rate = 0.0 }}
objective = {{ corrections = ["token_tis"] }}
rollout = {{ groups_per_step = 16, group_size = 4, drop_degenerate = false }}
engine = {{ max_running = 256 }}
checkpoint = {{ every = 1000000 }}
"""
OVERSAMPLE, LESS = '{name="oversample", factor=2.0}', '{name="oversample", factor=1.25}'
SETTINGS: tuple[tuple[int, str, str, str], ...] = (
    (0, "here", "draw", ""),
    (0, "here", "finished", LESS),
    (0, "here", "finished", '{name="tail", quantile=0.8}'),
    (0, "here", "finished", '{name="tail", quantile=0.9}'),
    (2, "process", "draw", ""),
    (2, "process", "finished", OVERSAMPLE),
    (2, "process", "draw", '"partial"'),
    (2, "here", "draw", ""),
    (2, "here", "draw", '"partial"'),
)
"""S, engine.place, rollout.order and rollout.controls; the first is what the others are predicted from."""
HEADER = """
| S | processes | order | controls | s/step | predicted | tokens/s | draw idle | train idle | age | drawn per trained | length | of a step |
|---|---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|
""".strip()  # noqa: E501 the line of a table


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Of the steps that are counted."""

    seconds_per_step: float
    tokens_per_second: float
    """That are trained: tokens that were drawn and cut do not count."""
    sampler_idle: float
    trainer_idle: float
    age: float
    drawn_per_trained: float
    length: float
    """Mean length of the answers that were trained in all steps."""
    lengths: tuple[float, ...]
    """The same of each step."""


def measure(folder: Path) -> Measured:
    with RunReader(folder) as run:
        numbers = [step.step for step in run.steps()][SKIPPED:]
        every = [run.metrics_at(0, number) for number in numbers]
        seconds = dict.fromkeys(numbers, 0.0)
        for row in run.query("SELECT step, name, seconds FROM seconds"):
            if row["name"] not in BESIDE and row["step"] in seconds:
                seconds[row["step"]] += row["seconds"]
        answers: dict[int, list[int]] = {}
        for row in run.query("SELECT step, num_tokens FROM trajectories"):
            answers.setdefault(row["step"], []).append(row["num_tokens"])
    wall, counted = sum(seconds.values()), [answers[number] for number in numbers]
    trained = sum(map(sum, counted))

    def share(name: str) -> float:
        pairs = zip(numbers, every, strict=True)
        return sum((metrics[name] or 0.0) * seconds[number] for number, metrics in pairs) / wall

    # The first token of an answer comes with its prompt, and is not counted among those of decode steps.
    decoded = sum(metrics["sys/decode_tokens"] or 0.0 for metrics in every)
    return Measured(
        seconds_per_step=wall / len(numbers),
        tokens_per_second=trained / wall,
        sampler_idle=share("sys/sampler_idle"),
        trainer_idle=share("sys/trainer_idle"),
        age=fmean(metrics["stale/mean"] or 0.0 for metrics in every),
        drawn_per_trained=decoded / (trained - sum(map(len, counted))),
        length=fmean(length for step in answers.values() for length in step),
        lengths=tuple(fmean(step) for step in counted),
    )


def train(recipe: Path, run: Path, changes: tuple[str, ...] = (), *, clock: str = "cpu") -> None:
    if (run / "run.db").is_file():
        return
    command = [sys.executable, "-c", START[clock], "train", str(recipe), "--run", str(run)]
    command += [part for change in changes for part in ("--set", change)]
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, env=environment)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)


def changes_of(number: int, steps: int) -> tuple[str, ...]:
    staleness, place, order, controls = SETTINGS[number]
    return (f"stage.1.steps={steps}", f'engine.place="{place}"', *keys(staleness, order, controls, stage=1))


def predict(recipe: Path, out: Path, number: int, steps: int) -> float:
    """Seconds a step, from the synchronous run."""
    staleness, place, *_ = SETTINGS[number]
    devices = 2 if staleness and place == "process" else 1
    asked = SimulationRequest(like=out / "run-0", given={}, gpus=[devices], staleness=[staleness], steps=48)
    return simulate_recipe(recipe, asked, overrides=changes_of(number, steps)).runs[0].seconds_per_step


def row(number: int, measured: Measured, predicted: float, offered: float) -> str:
    staleness, place, order, controls = SETTINGS[number]
    lengths = measured.lengths
    cells = (
        str(staleness), {"here": "one", "process": "two"}[place], order, f"`{controls}`" if controls else "",
        f"{measured.seconds_per_step:.2f}", f"{predicted:.2f}", f"{measured.tokens_per_second:,.0f}",
        f"{measured.sampler_idle:.0%}", f"{measured.trainer_idle:.0%}", f"{measured.age:.1f}",
        f"{measured.drawn_per_trained:.2f}", f"{measured.length / offered:.2f}",
        f"{min(lengths) / fmean(lengths):.1f} to {max(lengths) / fmean(lengths):.1f}",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for recipes and runs")
    parser.add_argument("--steps", type=int, default=52, help=f"of each run; the first {SKIPPED} are not counted")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="over the keys of all rows")
    parser.add_argument("--only", type=int, nargs="*", help="rows, from 0, which is always run; default: all")
    options = parser.parse_args()
    assert options.steps > SKIPPED, f"more than {SKIPPED} steps"
    options.out.mkdir(parents=True, exist_ok=True)
    recipe = options.out / "practice.toml"
    half_long = RECIPE.replace("seed = 1", "seed = 2\noptions = { long_share = 0.5 }")
    (options.out / "imitation.toml").write_text(half_long + IMITATION)
    train(options.out / "imitation.toml", options.out / "imitation")
    recipe.write_text(RECIPE + PRACTICE.format(model=find_model(options.out / "imitation")))
    print(HEADER)
    offered = 0.0
    for number in range(len(SETTINGS)) if options.only is None else sorted({0, *options.only}):
        folder = options.out / f"run-{number}"
        clock = "cpu" if SETTINGS[number][1] == "here" else "wall"
        train(recipe, folder, (*changes_of(number, options.steps), *options.set), clock=clock)
        measured = measure(folder)
        offered = offered or measured.length
        print(row(number, measured, predict(recipe, options.out, number, options.steps), offered), flush=True)


if __name__ == "__main__":
    main()
