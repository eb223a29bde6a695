"""How long a recipe trains until it reaches a held-out score, by staleness and by where the sampler lives.

    python benchmarks/asynchrony.py recipes/demo.toml --staleness 0 1 2 4 8 --place here process --seeds 0 1 2 \
        --score 0.8 --out docs/asynchrony.svg
Stages before the last are trained once a seed; the last then starts from what they left, in a process of its own for
every setting. Seconds are those of its steps (rollouts, updates, publications, canaries), not of loading, the parity
check and evaluations. Settings take turns within a seed, so that a machine that slows down slows them all.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from temper.commands.find import find_model
from temper.config import resolve, to_toml
from temper.runs.reader import RunReader
from temper.runs.report.plot import Line, Panel, chart

NOT_TRAINING = ("evaluate", "parity", "warm_up", "checkpoint")
TOLD = {
    "sampler idle": "sys/sampler_idle",
    "trainer idle": "sys/trainer_idle",
    "age of tokens": "stale/mean",
    "gap": "mismatch/logp_abs_mean",
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    staleness: int
    place: str

    def __str__(self) -> str:
        return f"S={self.staleness} {self.place}"


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Held-out greedy scores of one run."""

    steps: int
    seconds: tuple[float, ...]
    scores: tuple[float, ...]
    means: dict[str, float]
    """Of metrics over all steps, by label."""

    def seconds_to(self, score: float) -> float | None:
        """When the straight line between two evaluations crosses the score; None: never."""
        points = list(zip(self.seconds, self.scores, strict=True))
        for (before, low), (after, high) in itertools.pairwise(points):
            if low < score <= high:
                return before + (after - before) * (score - low) / (high - low)
        return None


def read_curve(folder: Path) -> Curve:
    """The only stage of a finished run."""
    with RunReader(folder) as run:
        spent = dict.fromkeys((step.step for step in run.steps()), 0.0)
        for row in run.query("SELECT step, name, seconds FROM seconds"):
            if row["name"] not in NOT_TRAINING:
                spent[row["step"]] += row["seconds"]
        ends = dict(zip((0, *spent), itertools.accumulate(spent.values(), initial=0.0), strict=True))
        greedy = [result for result in run.evaluations() if result.name == "greedy"]
        values = {label: [point.value for point in run.metric(name)] for label, name in TOLD.items()}
    return Curve(
        steps=max(ends),
        seconds=tuple(ends[result.step] for result in greedy),
        scores=tuple(result.score for result in greedy),
        means={label: fmean(found) for label, found in values.items() if found},
    )


def train(recipe: Path, folder: Path) -> None:
    command = [sys.executable, "-m", "temper", "train", str(recipe), "--run", str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def earlier_stages(recipe: dict[str, Any], seed: int, folder: Path) -> dict[str, Any]:
    """Where the last stage starts: the recipe's model, or what the stages before it left."""
    before = recipe["stage"][:-1]
    if not before:
        return dict(recipe["model"])
    if not (folder / "run").is_dir():
        stages = resolve({**recipe, "seed": seed, "stage": before}, [], where="benchmark")
        folder.mkdir(parents=True)
        (folder / "recipe.toml").write_text(to_toml(stages))
        train(folder / "recipe.toml", folder / "run")
    return {"path": str(find_model(folder / "run"))}


def measure(options: argparse.Namespace, recipe: dict[str, Any], setting: Setting, seed: int) -> Curve:
    folder = options.work / f"S{setting.staleness}-{setting.place}-{seed}"
    if not (folder / "done").is_file():
        model = earlier_stages(recipe, seed, options.work / f"start-{seed}")
        alone = {**recipe, "seed": seed, "model": model, "stage": recipe["stage"][-1:]}
        keys = [f"rollout.max_staleness={setting.staleness}", f'engine.place="{setting.place}"', *options.set]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "recipe.toml").write_text(to_toml(resolve(alone, keys, where="benchmark")))
        train(folder / "recipe.toml", folder / "run")
        (folder / "done").touch()
    return read_curve(folder / "run")


def show(options: argparse.Namespace, curves: dict[tuple[Setting, int], Curve]) -> None:
    console, table = Console(width=150), Table("setting", "seed", "seconds a step", f"s to {options.score:.0%}", "end")
    for label in TOLD:
        table.add_column(label)
    for (setting, seed), curve in curves.items():
        reached = curve.seconds_to(options.score)
        table.add_row(
            str(setting),
            str(seed),
            f"{curve.seconds[-1] / curve.steps:.2f}",
            "never" if reached is None else f"{reached:.0f}",
            f"{curve.scores[-1]:.1%}",
            *(f"{curve.means[label]:.3g}" if label in curve.means else "-" for label in TOLD),
        )
    console.print(table)
    if options.out:
        first = options.seeds[0]
        lines = [
            Line(label=str(setting), xs=curve.seconds, ys=curve.scores, is_dashed=setting.place != "here")
            for (setting, seed), curve in curves.items()
            if seed == first
        ]
        panel = Panel(title=f"held out, greedy, seed {first}", lines=lines, x_label="seconds of training")
        options.out.write_text(chart([panel], width=640, height=380))
        console.print(f"wrote {options.out}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--place", nargs="+", choices=("here", "process"), default=["here", "process"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--score", type=float, default=0.8, help="held-out score to be reached")
    parser.add_argument("--set", action="append", default=[], help="key=value of the last stage, for all settings")
    parser.add_argument(
        "--work", type=Path, default=Path("runs/asynchrony"), help="folder of the runs; kept and reused"
    )
    parser.add_argument("--out", type=Path, help="an SVG of the curves of the first seed")
    options = parser.parse_args()
    recipe = tomllib.loads(options.recipe.read_text())
    curves = {}
    for seed in options.seeds:
        for staleness, place in itertools.product(options.staleness, options.place):
            setting = Setting(staleness=staleness, place=place)
            curve = curves[setting, seed] = measure(options, recipe, setting, seed)
            facts = {"setting": str(setting), "seed": seed, "seconds": curve.seconds, "scores": curve.scores}
            print(json.dumps(facts), flush=True)
    show(options, curves)


if __name__ == "__main__":
    main()
