"""Sampler and trainer by turns or at once: seconds of a step and idle shares, for staleness bounds and places.

    python benchmarks/overlap.py                                     # tiny model, CPU: a core each of two
    python benchmarks/overlap.py --shape smollm2-135m --prompts 32 --group 8 --new 256 --microbatch 65536   # a GPU
    python benchmarks/overlap.py --places process --staleness 1 --threads 1
The model is random, as in step.py: speed matters, not what is learned. Rows are trained in `--updates` optimiser steps
for each batch, so that training can be made to take about as long as drawing.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from rich.console import Console
from rich.table import Table
from shapes import SHAPES
from step import PLAIN, PROMPT_ROOM, Steps, make_model, recipe_of

from temper import loop
from temper.build import Listeners, build_stage, make_plan
from temper.config import resolve
from temper.runs.time_split import TRAINING
from temper.types import StepReport

FIRST = 2
"""Steps that are left out: the first fills the queue of a bound above 0."""
COLUMNS: dict[str, Callable[[StepReport], float]] = {
    "s/step": lambda report: sum(report.seconds.values()),
    "trainer idle": lambda report: report.system["sys/trainer_idle"],
    "sampler idle": lambda report: report.system["sys/sampler_idle"],
    "publish s": lambda report: report.system["sys/publish_latency"],
    "train s": lambda report: sum(report.seconds.get(name, 0.0) for name in TRAINING),
    "drawn tokens": lambda report: report.system["sys/rollout_tokens"],
    "oldest": lambda report: float(report.max_staleness),
}


def measure(folder: Path, options: argparse.Namespace, dtype: str, place: str, staleness: int) -> list[float]:
    recipe = recipe_of(folder, options, dtype)
    recipe["rollout"]["max_staleness"] = staleness
    recipe["engine"] |= {"place": place, "max_running": (1 + staleness) * options.prompts * options.group}
    if place == "process" and options.threads:
        recipe["engine"]["threads"] = options.threads
    recipe["trainer"]["updates_per_batch"] = options.updates
    (config,) = resolve(recipe, [], where="benchmark")
    stage, steps = build_stage(config, 0, folder, listeners=Listeners(note=_silent, warn=_silent)), Steps()
    plan = make_plan(stage, first_step=1, recorders=(steps,), checkpoint=lambda step: None)

    async def run() -> None:
        try:
            await loop.run(plan)
        finally:
            await stage.close()

    asyncio.run(run())
    return [statistics.median(map(read, steps.reports[FIRST:])) for read in COLUMNS.values()]


def _silent(text: str) -> None:
    """Facts about a run are not what is measured."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--places", nargs="+", choices=["here", "process"], default=["here", "process"])
    parser.add_argument("--staleness", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=0, help="of a sampler process; 0: half")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--new", type=int, default=48, help="tokens of a completion")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--updates", type=int, default=1)
    parser.add_argument("--microbatch", type=int, default=8192)
    options = parser.parse_args()
    if options.steps <= FIRST:
        parser.error(f"--steps must be above {FIRST}: the first ones are left out")
    options = argparse.Namespace(**{**PLAIN, "max_gap": 1.0, **vars(options)})
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    where = torch.cuda.get_device_name(0) if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    title = f"{options.shape}, {dtype}, {options.prompts} x {options.group} x {options.new} tokens, {where}"
    table = Table("place", "S", *COLUMNS, title=title)
    with tempfile.TemporaryDirectory() as name:
        make_model(Path(name), options.shape, dtype, context=options.new + PROMPT_ROOM)
        for staleness in options.staleness:
            for place in options.places:
                found = measure(Path(name), options, dtype, place, staleness)
                table.add_row(place, str(staleness), *(f"{value:,.3g}" for value in found))
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
