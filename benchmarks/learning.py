"""Do the objectives learn? The problem of `make demo` for many presets, several seeds each; one table, one picture.

    python benchmarks/learning.py --jobs 2 --out docs
    python benchmarks/learning.py --presets grpo,ppo --seeds 1 --steps 10
Every preset starts from the same supervised checkpoint of its seed and draws the same number of tasks with the recipe's
settings: none was tuned to its preset, except where SETTINGS says so. What a finished run achieved is kept beside it
(NAME.json) and not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from temper.config import RunConfig, load_recipe, merge, to_toml
from temper.runs.reader import RunReader
from temper.runs.report.plot import Line, Panel, chart

RECIPE = Path(__file__).parent.parent / "recipes" / "demo.toml"
FAMILIES = {
    "policy gradient": ("reinforce", "rloo", "reinforce_pp", "remax", "opo"),
    "groups": ("grpo", "dr_grpo", "dapo", "maxrl", "kl_cov", "simko"),
    "trust regions": ("gspo", "cispo", "sapo", "dppo_tv", "gmpo", "vespo"),
    "inside an answer": ("ppo", "vapo", "vineppo", "trpo", "opd"),
}
SETTINGS: dict[str, dict[str, Any]] = {
    # Answers of at most nine letters without lines: a step is four letters. Nine rollouts from each would take an hour.
    "vineppo": {"objective": {"advantage": {"tokens": 4, "samples": 2}}},
    # The paper's 50 steps for the critic alone would be the whole run, and its lambda is 0 below 20 tokens.
    "vapo": {"objective": {"critic": {"pretraining_steps": 6}, "advantage": {"alpha": 1.0}}},
    # Without a trust region the second update of a batch has nothing to hold it: one update per batch, as published.
    **{preset: {"trainer": {"updates_per_batch": 1}} for preset in ("reinforce", "remax", "opo")},
    # A constrained step uses the whole batch at once and passes over it a dozen times: an eighth of the tasks.
    "trpo": {
        "trainer": {"updates_per_batch": 1},
        "rollout": {"groups_per_step": 16},
        "objective": {"step": {"iterations": 5}},
    },
}
NOTES = {
    "remax": ". Its baseline, the greedy answer, scores four times what samples do here, so almost every answer is "
    "pushed down; with four updates per batch it fell to 0%",
    "vapo": ". With the paper's alpha of 0.05, greedy fell to 33%",
    "trpo": ". It draws an eighth of the others' tokens",
}
SLOW = ("vineppo", "trpo", "vapo", "ppo", "simko")
"""Started first, so that no core waits for them at the end."""
TEACHER = "grpo"
"""Whose trained model teaches the student of opd."""
T_INTERVAL = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""97.5% quantile of Student's t by number of seeds."""


@dataclass(frozen=True)
class Outcome:
    """One finished run."""

    tokens: list[int]
    """Drawn so far, by step."""
    rewards: list[float]
    start: dict[str, float]
    """Held-out score before the first step, by way of decoding."""
    end: dict[str, float]


def main() -> None:
    options = parse()
    options.runs.mkdir(parents=True, exist_ok=True)
    supervised, practice = load_recipe(RECIPE)
    console = Console()
    with Progress(console=console) as progress:
        bar = progress.add_task("supervised", total=len(options.seeds))
        starts = [(f"sft-{seed}", changed(supervised, {"seed": seed})) for seed in options.seeds]
        run_all(starts, options, lambda: progress.advance(bar))
        for name, wanted in (("presets", without_opd(options.presets)), ("opd", only_opd(options.presets))):
            jobs = [
                (f"{preset}-{seed}", config_of(practice, preset, seed, options))
                for preset in wanted
                for seed in options.seeds
            ]
            bar = progress.add_task(name, total=len(jobs))
            run_all(jobs, options, lambda bar=bar: progress.advance(bar))  # type: ignore[misc]
    outcomes = {
        preset: [Outcome(**json.loads((options.runs / f"{preset}-{seed}.json").read_text())) for seed in options.seeds]
        for preset in options.presets
    }
    console.print(table(outcomes))
    if options.out is not None:
        (options.out / "learning.svg").write_text(picture(outcomes))
        (options.out / "learning.md").write_text(page(outcomes, options))


def parse() -> argparse.Namespace:
    everything = [preset for family in FAMILIES.values() for preset in family]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", type=lambda text: text.split(","), default=everything)
    parser.add_argument("--seeds", type=lambda text: list(range(int(text))), default=[0, 1, 2], help="how many")
    parser.add_argument("--steps", type=int, default=46)
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--runs", type=Path, default=Path("runs/learning"))
    parser.add_argument("--out", type=Path, help="folder for learning.md and learning.svg")
    return parser.parse_args()


def without_opd(presets: Sequence[str]) -> list[str]:
    needs_teacher = [TEACHER] if "opd" in presets and TEACHER not in presets else []
    return [preset for preset in presets if preset != "opd"] + needs_teacher


def only_opd(presets: Sequence[str]) -> list[str]:
    return [preset for preset in presets if preset == "opd"]


def changed(config: RunConfig, change: dict[str, Any]) -> RunConfig:
    return RunConfig.model_validate(merge(config.model_dump(exclude_none=True), change))


def config_of(practice: RunConfig, preset: str, seed: int, options: argparse.Namespace) -> RunConfig:
    table = practice.model_dump(exclude_none=True)
    table["model"] = {"path": str(last_checkpoint(options.runs / f"sft-{seed}"))}
    table["objective"] = {"preset": preset}
    if preset == "opd":
        table["model"]["teacher"] = str(last_checkpoint(options.runs / f"{TEACHER}-{seed}"))
    common = {"seed": seed, "steps": options.steps, "evaluation": {"every": 0}, "checkpoint": {"every": 10, "keep": 1}}
    change = merge(common, SETTINGS.get(preset, {}))
    return RunConfig.model_validate(merge(table, change))


def last_checkpoint(run: Path) -> Path:
    """Where a run's only stage ends; the folder need not be there yet."""
    stage = tomllib.loads((run.parent / f"{run.name}.toml").read_text())["stage"][0]
    return run.resolve() / "checkpoints" / f"0-{stage['kind']}" / f"step-{stage['steps']}"


def run_all(jobs: Sequence[tuple[str, RunConfig]], options: argparse.Namespace, done: Any) -> None:
    threads = max(1, (os.cpu_count() or 1) // options.jobs)
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}

    def run(job: tuple[str, RunConfig]) -> None:
        name, config = job
        folder, recipe = options.runs / name, options.runs / f"{name}.toml"
        recipe.write_text(to_toml([config]))
        command = [sys.executable, "-m", "temper", "train", str(recipe), "--run", str(folder)]
        command += ["--resume"] if folder.exists() else []
        achieved = options.runs / f"{name}.json"
        if not achieved.exists():
            result = subprocess.run(command, env=environment, capture_output=True, text=True)
            if result.returncode:
                raise SystemExit(f"{name} failed:\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}")
            achieved.write_text(json.dumps(asdict(read(folder))))
        done()

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(run, sorted(jobs, key=lambda job: not job[0].startswith(SLOW))))


def read(folder: Path) -> Outcome:
    with RunReader(folder) as reader:
        drawn = [step.tokens_drawn for step in reader.steps()]
        rewards = [point.value for point in reader.metric("reward/mean")]
        scores = reader.evaluations()
    last = max(score.step for score in scores)
    return Outcome(
        tokens=[sum(drawn[: place + 1]) for place in range(len(drawn))],
        rewards=[reward for reward in rewards if reward is not None],
        start={score.name: score.score for score in scores if score.step == 0},
        end={score.name: score.score for score in scores if score.step == last},
    )


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean, and its 95% t-interval over the seeds."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, mean, mean
    half = T_INTERVAL[min(5, len(values))] * statistics.stdev(values) / len(values) ** 0.5
    return mean, mean - half, mean + half


def gain(runs: Sequence[Outcome], way: str) -> tuple[float, float, float]:
    """Seed by seed: each run against the checkpoint it started from."""
    return interval([run.end[way] - run.start[way] for run in runs])


def rows(outcomes: dict[str, list[Outcome]]) -> list[tuple[str, ...]]:
    found = []
    for preset, runs in outcomes.items():
        cells = [preset]
        for way in ("sampled", "greedy"):
            start, end = (statistics.fmean(getattr(run, when)[way] for run in runs) for when in ("start", "end"))
            mean, low, high = (100 * value for value in gain(runs, way))
            seeds = " ".join(f"{100 * run.end[way]:.0f}" for run in runs)
            cells += [f"{start:.1%}", f"{end:.1%} ({seeds})", f"{mean:+.1f} [{low:.1f}, {high:.1f}]"]
        cells.append(f"{statistics.fmean(run.tokens[-1] for run in runs) / 1000:.0f}k")
        found.append(tuple(cells))
    return found


HEADER = ("preset", "sampled, start", "end (seeds)", "gain", "greedy, start", "end (seeds)", "gain", "tokens drawn")


def table(outcomes: dict[str, list[Outcome]]) -> Table:
    printed = Table(*HEADER, title="held-out score")
    for row in rows(outcomes):
        printed.add_row(*row)
    return printed


def picture(outcomes: dict[str, list[Outcome]]) -> str:
    panels = []
    for family, presets in FAMILIES.items():
        lines = [line(preset, outcomes[preset]) for preset in presets if preset in outcomes]
        if lines:
            panels.append(Panel(title=family, lines=lines, x_label="tokens drawn", y_label="reward", y_range=(0, 0.7)))
    return chart(panels, width=300, height=260, legend="each")


def line(preset: str, runs: Sequence[Outcome]) -> Line:
    """Mean over the seeds, smoothed over five steps, with the range of the seeds as a band."""
    steps = min(len(run.rewards) for run in runs)
    smooth = [[statistics.fmean(run.rewards[max(0, s - 4) : s + 1]) for s in range(steps)] for run in runs]
    return Line(
        label=preset,
        xs=[statistics.fmean(run.tokens[step] for run in runs) for step in range(steps)],
        ys=[statistics.fmean(run[step] for run in smooth) for step in range(steps)],
        low=[min(run[step] for run in smooth) for step in range(steps)],
        high=[max(run[step] for run in smooth) for step in range(steps)],
    )


def page(outcomes: dict[str, list[Outcome]], options: argparse.Namespace) -> str:
    changes = [f"- `{p}`: `{change}`{NOTES.get(p, '')}" for p, change in SETTINGS.items() if p in outcomes]
    if "opd" in outcomes:
        changes.append(f"- `opd`: its teacher is what `{TEACHER}` made of the same checkpoint; it sees no reward.")
    unsure = [p for p, runs in outcomes.items() if min(gain(runs, way)[1] for way in ("sampled", "greedy")) <= 0]
    lines = [
        "# Do the objectives learn?",
        "",
        f"Written by `python benchmarks/{Path(__file__).name} --out docs`.",
        "",
        "The problem of `make demo`: a million parameters, 100 supervised steps, then reinforcement learning with one",
        f"preset: {options.steps} steps of 128 tasks x 8 answers, {len(options.seeds)} seeds, learning rate 4e-4, four",
        "updates per batch. Nothing was tuned to a preset but what is listed below. It shows that they learn and how",
        "they differ on one small problem, not which is best. Scores are of 512 held-out words; gains are seed by",
        "seed, in points, with Student's t interval over the seeds.",
        "",
        *changes,
        "",
        f"Presets with an interval that holds 0: {', '.join(f'`{preset}`' for preset in unsure) or 'none'}.",
        "",
        "![reward against tokens drawn](learning.svg)",
        "",
        "Mean over the seeds, five-step average; band: range of the seeds.",
        "",
        "| " + " | ".join(HEADER) + " |",
        "|" + "---|" * len(HEADER),
        *("| " + " | ".join(row) + " |" for row in rows(outcomes)),
    ]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
