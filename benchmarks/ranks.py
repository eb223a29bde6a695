"""One recipe with one trainer and with several, as copies and as parts: do they agree, and what does a step take?

    python benchmarks/ranks.py                                                     # tiny model, CPU: gloo
    python benchmarks/ranks.py --shape smollm2-135m --prompts 16 --new 256         # a GPU: NCCL, ranks share it
    python benchmarks/ranks.py --shape qwen2.5-0.5b --layouts 1 2-context 2-tensor --dtype float32   # to rounding
    python benchmarks/ranks.py --shape qwen2.5-7b --layouts 2-parts --prompts 8 --new 256 --checkpointing
Each layout is a `temper train` of its own. Rows of step 1 are the same in all, so the norm of its gradient must agree
but for rounding; the gap between sampler and trainer in later steps shows that what was published is what was trained.
Ranks that share a GPU or a CPU are not faster than one: this is about agreement, exchange and memory.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from rich.console import Console
from rich.table import Table
from shapes import SHAPES
from step import PLAIN, PROMPT_ROOM, make_model, recipe_of

from temper.config import resolve, to_toml
from temper.runs.reader import RunReader

LAYOUTS = {
    "1": {"trainers": 1},
    "2": {"trainers": 2},
    "2-parts": {"trainers": 2, "parts": True},
    "4-parts": {"trainers": 4, "parts": True},
    "2-context": {"trainers": 2, "parts": True, "context": 2},
    "2-experts": {"trainers": 2, "parts": True, "experts": True},
    "2-tensor": {"trainers": 2, "parts": True, "tensor": 2},
}


def train(folder: Path, run: Path, options: argparse.Namespace, dtype: str, layout: str) -> str:
    """What went wrong; empty: nothing."""
    recipe = recipe_of(folder, options, dtype)
    recipe["engine"] |= {"place": "process"}
    recipe["cluster"] = LAYOUTS[layout]
    path = run.with_suffix(".toml")
    path.write_text(to_toml(resolve(recipe, [], where="benchmark")))
    command = [sys.executable, "-m", "temper", "train", str(path), "--run", str(run)]
    log = run.with_suffix(".log")
    with log.open("w") as said:
        try:
            code = subprocess.run(command, stdout=said, stderr=said, timeout=options.seconds, check=False).returncode
        except subprocess.TimeoutExpired:
            code = f"none within {options.seconds} s"
    return f"{layout}: temper train ended with code {code}\n{log.read_text()}" if code else ""


def row_of(run: Path) -> list[str]:
    with RunReader(run) as reader:
        first = reader.metrics_at(0, 1)
        numbers = {
            name: [point.value for point in reader.metric(name) if point.value is not None]
            for name in ("sys/step_time", "sys/publish_latency", "mismatch/logp_abs_mean", "sys/peak_memory_bytes")
        }
    steps, publications, gaps, peaks = numbers.values()
    return [
        f"{statistics.median(steps[1:] or steps):.2f}",
        f"{statistics.median(publications):.3f}",
        f"{first['policy/grad_norm']:.6f}",
        f"{max(gaps):.5f}",
        f"{max(peaks) / 2**30:.2f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=["1", "2", "2-parts"])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--microbatch", type=int, default=4096)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--dtype", default="", help="default: bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--seconds", type=int, default=1800, help="for one run")
    options = parser.parse_args()
    options = argparse.Namespace(**{**PLAIN, **vars(options)})
    dtype = options.dtype or ("bfloat16" if torch.cuda.is_available() else "float32")
    where = torch.cuda.get_device_name(0) if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    title = f"{options.shape}, {dtype}, {options.prompts} x {options.group} x {options.new} tokens, {where}"
    columns = ("s/step", "publish s", "gradient norm of step 1", "largest gap", "peak GiB of rank 0")
    table = Table("trainers", *columns, title=title)
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        make_model(Path(name), options.shape, dtype, context=options.new + PROMPT_ROOM)
        for layout in options.layouts:
            run = Path(name) / f"run-{layout}"
            if wrong := train(Path(name), run, options, dtype, layout):
                failed.append(wrong)
                continue
            row = row_of(run)
            print(layout, *row, flush=True)
            table.add_row(layout, *row)
    Console(width=130).print(table)
    if failed:
        raise SystemExit("\n".join(failed))


if __name__ == "__main__":
    main()
