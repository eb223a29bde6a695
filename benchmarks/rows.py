"""Training alone, on rows of a given length: seconds of a step, share of the GPU's peak (MFU), peak memory.

    python benchmarks/rows.py                                                              # tiny model, CPU
    python benchmarks/rows.py --shape qwen2.5-1.5b --tokens 8192 --rows 16 --microbatch 65536 --states 8bit     # a GPU
    python benchmarks/rows.py --shape qwen2.5-1.5b --tokens 32768 --rows 2 --checkpointing --states 8bit
    python benchmarks/rows.py --shape qwen2.5-7b --tokens 32768 --rows 2 --checkpointing offload --lora 32
Texts of random letters are imitated (kind = "sft"), so that nothing is drawn; the passes are those of every objective.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
from pathlib import Path

import torch
from shapes import SHAPE_HELP, shape_of
from step import ALPHABET, PROMPT_ROOM, Steps, make_model
from transformers.utils import logging as transformers_logging

from temper import loop
from temper.build import build_stage, make_plan
from temper.config import resolve


def measure(folder: Path, options: argparse.Namespace, dtype: str) -> dict[str, float]:
    """Medians over all steps but the first."""
    draw = random.Random(0)
    answers = ("".join(draw.choices(ALPHABET, k=options.tokens - 16)) for _ in range(options.rows * options.steps))
    texts = folder / "texts.jsonl"
    texts.write_text("".join(json.dumps({"prompt": "Write.", "answer": answer}) + "\n" for answer in answers))
    lora = {"lora": {"rank": options.lora, "base": options.base}} if options.lora else {}
    recipe = {
        "steps": options.steps,
        "model": {"path": str(folder), "dtype": dtype, "gradient_checkpointing": options.checkpointing, **lora},
        "optim": {"states": options.states, "offload": options.offload},
        "train": [{"path": str(texts)}],
        "trainer": {
            "examples_per_step": options.rows,
            "tokens_per_microbatch": options.microbatch,
            "reproducible": not options.fast,
        },
        "checkpoint": {"every": 10**6},
        "stage": [{"kind": "sft"}],
    }
    (config,) = resolve(recipe, [], where="benchmark")
    stage = build_stage(config, 0, folder)
    steps = Steps()
    asyncio.run(run(make_plan(stage, first_step=1, recorders=(steps,), checkpoint=lambda step: None), stage.close))
    warm = steps.reports[1:]
    phases = {name: statistics.median(report.seconds.get(name, 0.0) for report in warm) for name in warm[-1].seconds}
    print("seconds of a step:", ", ".join(f"{name} {value:.3f}" for name, value in phases.items() if value > 0.002))
    return {
        "tokens": statistics.median(report.system["sys/train_tokens"] for report in warm),
        "seconds": statistics.median(sum(report.seconds.values()) for report in warm),
        "tokens/s": statistics.median(report.system["sys/train_tok_s"] for report in warm),
        "MFU": statistics.median(report.system.get("sys/mfu", float("nan")) for report in warm),
        "peak GiB": warm[-1].system["sys/peak_memory_bytes"] / 2**30,
    }


async def run(plan: loop.Plan, close: object) -> None:
    await loop.run(plan)
    await close()  # type: ignore[operator]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=shape_of, default="tiny", help=SHAPE_HELP)
    parser.add_argument("--tokens", type=int, default=2048, help="of each row, prompt included")
    parser.add_argument("--rows", type=int, default=2, help="of one step")
    parser.add_argument("--steps", type=int, default=3, help="the first is warm-up; the median of the others counts")
    parser.add_argument("--microbatch", type=int, default=0, help="packed tokens of a pass; 0: one row")
    parser.add_argument("--states", choices=["float32", "bfloat16", "8bit"], default="float32")
    parser.add_argument("--offload", action="store_true", help="moments and masters in the host's memory")
    parser.add_argument("--checkpointing", nargs="?", const=True, default=False, choices=["offload"])
    parser.add_argument("--fast", action="store_true", help="trainer.reproducible = false")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK")
    parser.add_argument("--base", choices=["full", "4bit"], default="full")
    options = parser.parse_args()
    options.microbatch = options.microbatch or options.tokens + PROMPT_ROOM
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder, options.shape, dtype, context=options.tokens + PROMPT_ROOM)
        figures = measure(folder, options, dtype)
    print(f"{options.shape}, {dtype}, {options.rows} rows of {options.tokens} tokens:", end=" ")
    print(", ".join(f"{name} {value:,.3f}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
