"""What replaying routes is worth: how far sampler and trainer of a mixture of experts are apart with it and without.

    python benchmarks/routes.py                                                         # a small mixture, CPU
    python benchmarks/routes.py --shape qwen3-30b-a3b-6-layers --taught 80 --engines local vllm    # a GPU
Random weights say nothing, and their routers hardly more: so the model first imitates sentences about sums for --taught
steps. Each engine then draws and is trained on with replay and without, from these weights, on the same prompts. Gaps
are means over the steps; of each batch's two updates the second is what clips.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from shapes import SHAPE_HELP, shape_of
from step import ALPHABET, PROMPT_ROOM, Steps, _run, make_model
from transformers.utils import logging as transformers_logging

from temper.build import build_stage, make_plan
from temper.config import resolve
from temper.models.save import save_model
from temper.types import StepReport

NAMES = ("Tom", "Ada", "Kim", "Bo", "Eve", "Max", "Lia", "Sam")
THINGS = ("apples", "coins", "books", "stones", "cups", "maps")
METRICS = {
    "mean gap": "mismatch/logp_abs_mean",
    "largest gap": "mismatch/logp_abs_max",
    "KL": "mismatch/kl_k3",
    "clipped, %": "",
    "routes moved, %": "route/moved_frac",
}


def sentences(seed: int, letters: int) -> str:
    """About so many letters of text that can be learned, and never quite."""
    draw, text = random.Random(seed), ""
    while len(text) < letters:
        name, thing, a, b = draw.choice(NAMES), draw.choice(THINGS), draw.randrange(2, 99), draw.randrange(2, 99)
        text += f"{name} has {a} {thing} and finds {b} more, so {name} has {a + b} {thing}. "
    return text[:letters]


def base(folder: Path, options: argparse.Namespace, rows: Path, dtype: str) -> dict[str, Any]:
    return {
        "model": {"path": str(folder), "dtype": dtype},
        "optim": {"states": options.states},
        "train": [{"path": str(rows)}],
        "checkpoint": {"every": 10**6},
    }


def teach(folder: Path, taught: Path, options: argparse.Namespace, dtype: str) -> None:
    """Writes the model after imitation, as an ordinary directory."""
    letters, count = options.new + 64, options.taught * options.examples
    rows = folder / "texts.jsonl"
    texts = (json.dumps({"prompt": "Say.", "answer": sentences(seed, letters)}) for seed in range(count))
    rows.write_text("\n".join(texts))
    recipe = base(folder, options, rows, dtype) | {
        "steps": options.taught,
        "trainer": {"examples_per_step": options.examples, "tokens_per_microbatch": options.microbatch},
        "stage": [{"kind": "sft"}],
    }
    recipe["optim"] |= {"learning_rate": options.rate, "warmup_steps": max(1, options.taught // 8)}
    steps = run_stage(recipe, folder, then=lambda stage: save_model(stage.model, stage.data.tokenizer, taught))
    losses = [report.metrics["loss/likelihood"] for report in steps]
    print(f"imitation: loss {losses[0]:.2f}, after {len(losses)} steps {statistics.fmean(losses[-5:]):.2f}", flush=True)


def measure(taught: Path, options: argparse.Namespace, dtype: str, engine: str, replay: bool) -> list[StepReport]:
    rows = taught / "prompts.jsonl"
    asked = (sentences(10**6 + seed, 60) for seed in range(256))
    rows.write_text("".join(json.dumps({"prompt": text, "answer": ALPHABET}) + "\n" for text in asked))
    recipe = base(taught, options, rows, dtype) | {
        "steps": options.steps,
        "reward": [{"kind": "edit"}],
        "sampling": {"max_new_tokens": options.new},
        "rollout": {"groups_per_step": options.prompts, "group_size": options.group},
        "trainer": {"tokens_per_microbatch": options.microbatch, "updates_per_batch": 2},
        "engine": {
            "kind": engine,
            "max_running": options.prompts * options.group,
            "max_logprob_gap": 1.0,
            "graphs": not options.eager,
        },
        "alarms": {"readiness": "off"},
    }
    recipe["model"]["replay_routes"] = True if replay else ("measure" if engine == "local" else False)
    return run_stage(recipe, taught)


def run_stage(recipe: dict[str, Any], folder: Path, then: Any = None) -> list[StepReport]:
    (config,) = resolve(recipe, [], where="benchmark")
    stage = build_stage(config, 0, folder)
    steps = Steps()
    plan = make_plan(stage, first_step=1, recorders=(steps,), checkpoint=lambda step: None)
    asyncio.run(_run(plan, stage.close))
    if then is not None:
        then(stage)
    del stage, plan
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return steps.reports


def cells(reports: list[StepReport]) -> list[str]:
    found = []
    for label, name in METRICS.items():
        if label.startswith("clipped"):
            values = [r.metrics["policy/clip_frac_low"] + r.metrics["policy/clip_frac_high"] for r in reports]
        else:
            values = [r.metrics[name] for r in reports if name in r.metrics]
        if not values:
            found.append("not told")
        else:
            value = max(values) if label.startswith("largest") else statistics.fmean(values)
            found.append(f"{100 * value:.2f}" if label.endswith("%") else f"{value:.3g}")
    return [*found, f"{statistics.median(sum(r.seconds.values()) for r in reports[1:] or reports):.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=shape_of, default="tiny-experts", help=SHAPE_HELP)
    parser.add_argument("--engines", nargs="+", choices=["local", "vllm"], default=["local"])
    parser.add_argument("--taught", type=int, default=20, help="steps of imitation")
    parser.add_argument("--examples", type=int, default=32, help="texts of a step of imitation")
    parser.add_argument("--rate", type=float, default=3e-4, help="of imitation")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--microbatch", type=int, default=16384)
    parser.add_argument("--eager", action="store_true", help="no recorded steps: vLLM starts in less time")
    parser.add_argument("--states", choices=["float32", "bfloat16", "8bit"], default="8bit")
    options = parser.parse_args()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    on_gpu = torch.cuda.is_available()
    dtype = "bfloat16"
    where = torch.cuda.get_device_name(0) if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    table = Table("engine", "replay", *METRICS, "s a step", title=f"{options.shape}, {dtype}, {where}")
    with tempfile.TemporaryDirectory(dir="/dev/shm" if on_gpu else None) as name:
        folder, taught = Path(name) / "random", Path(name) / "taught"
        make_model(folder, options.shape, dtype, context=options.new + PROMPT_ROOM)
        teach(folder, taught, options, dtype)
        for engine in options.engines:
            for replay in (False, True):
                reports = measure(taught, options, dtype, engine, replay)
                table.add_row(engine, "yes" if replay else "no", *cells(reports))
                Console(width=110).print(table)


if __name__ == "__main__":
    main()
