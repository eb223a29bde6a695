"""What the long tail of answers costs, with and without controls, simulated: a tenth is eight times as long.

    python benchmarks/long_tail.py                               # whole groups are long: hard prompts; about 2 minutes
    python benchmarks/long_tail.py --lengths tail:200:0.1:8      # single answers are long, whatever their prompt

Each row is one `temper simulate` with other keys, on a GPU that draws and one that trains (in turn where S = 0). Speeds
are given, so that the table is the same everywhere: of the order of a model of 7B parameters on an H200.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from temper.commands.simulate import SimulationRequest, simulate_recipe
from temper.simulate.outcome import SimulatedRun

SPEEDS = {"decode_step": 0.01, "decode_row": 2e-5, "train_token": 1e-4}
SIZES = (
    "model.new.context=4096",
    "sampling.max_new_tokens=2000",
    "engine.max_running=1024",
    "stage.2.rollout.groups_per_step=32",
    "stage.2.rollout.group_size=4",
)
"""Over recipes/demo.toml: 128 answers a step, and room for long ones."""
SETTINGS: tuple[tuple[int, str, str], ...] = (
    (0, "draw", ""),
    (0, "finished", '{name="oversample", factor=1.25}'),
    (0, "finished", '{name="tail", quantile=0.8}'),
    (2, "draw", ""),
    (2, "finished", ""),
    (2, "draw", '"partial"'),
    (2, "finished", '{name="oversample", factor=2.0}'),
    (2, "finished", '"partial", {name="oversample", factor=2.0}'),
    (4, "draw", ""),
    (4, "finished", ""),
    (4, "draw", '"partial"'),
    (4, "finished", '{name="oversample", factor=2.0}'),
    (4, "finished", '"partial", {name="oversample", factor=2.0}'),
)
"""S, rollout.order and rollout.controls."""
COLUMNS = ("s/step", "tokens/s", "draw idle", "train idle", "age", "drawn per trained", "length", "of a step")
HEADER = f"| S | order | controls | {' | '.join(COLUMNS)} |\n|---|---|---|{'---:|' * len(COLUMNS)}"


def simulate(recipe: Path, lengths: str, steps: int, overrides: Sequence[str], staleness: int) -> SimulatedRun:
    asked = SimulationRequest(given=SPEEDS, gpus=(2,), staleness=(staleness,), lengths=lengths, steps=steps)
    (run,) = simulate_recipe(recipe, asked, overrides=overrides).runs
    return run


def keys(staleness: int, order: str, controls: str, *, stage: int = 2) -> list[str]:
    """Of a row of the table, as --set wants them."""
    table = {"max_staleness": str(staleness), "order": f'"{order}"', "controls": f"[{controls}]"}
    return [f"stage.{stage}.rollout.{name}={value}" for name, value in table.items()]


def row(staleness: int, order: str, controls: str, run: SimulatedRun) -> str:
    """`length`: of an epoch and more; the last column: of single steps, lowest to highest."""
    cells = (
        str(staleness), order, f"`{controls}`" if controls else "", f"{run.seconds_per_step:.1f}",
        f"{run.tokens_per_second:,.0f}", f"{run.sampler_idle:.0%}", f"{run.trainer_idle:.0%}", f"{run.stale_mean:.1f}",
        f"{run.drawn_per_trained:.2f}", f"{run.length_ratio:.2f}", f"{run.shortest_step:.1f} to {run.longest_step:.1f}",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=Path("recipes/demo.toml"), help="its second stage is simulated")
    parser.add_argument("--lengths", default="groups:200:0.1:8")
    parser.add_argument("--steps", type=int, default=64, help="that are counted")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="over the keys of all rows")
    parser.add_argument("--only", type=int, nargs="*", help="rows, from 0; default: all")
    options = parser.parse_args()
    print(HEADER)
    for number in range(len(SETTINGS)) if options.only is None else options.only:
        staleness, order, controls = SETTINGS[number]
        overrides = [*SIZES, *keys(staleness, order, controls), *options.set]
        run = simulate(options.recipe, options.lengths, options.steps, overrides, staleness)
        print(row(staleness, order, controls, run), flush=True)


if __name__ == "__main__":
    main()
