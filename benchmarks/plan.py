"""Planned and measured peaks of memory side by side: random weights, one GRPO step or two for each setting, one table.

    python benchmarks/plan.py                      # all settings; each in a process of its own
    python benchmarks/plan.py --only 1.5b-8bit     # one of them; what was measured is kept in --keep and shown again
Needs a GPU; without one it shows what is planned. Within 10%, and never below by more than 3%, is the aim.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from shapes import SHAPE_HELP, shape_of
from step import PLAIN, make_model, measure_temper

GIB = 2**30
LOW, HIGH = 0.97, 1.10


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A step of benchmarks/step.py."""

    shape: str
    new: int
    prompts: int = 32
    group: int = 8
    microbatch: int = 16384
    states: str = "float32"
    offload: bool = False
    checkpointing: bool = False
    lora: int = 0
    """Rank of the adapter; 0: all weights."""
    base: str = "full"
    steps: int = 2

    def options(self) -> argparse.Namespace:
        return argparse.Namespace(**{**PLAIN, **asdict(self), "max_gap": 1.0})


SETTINGS = {
    "135m": Setting(shape="smollm2-135m", new=512, microbatch=65536),
    "135m-small": Setting(shape="smollm2-135m", new=512, microbatch=8192),
    "135m-long": Setting(shape="smollm2-135m", new=8192, prompts=4, group=4, microbatch=33000, checkpointing=True),
    "1.5b": Setting(shape="qwen2.5-1.5b", new=512, microbatch=32768),
    "1.5b-8bit": Setting(shape="qwen2.5-1.5b", new=512, states="8bit"),
    "1.5b-recomputed": Setting(shape="qwen2.5-1.5b", new=512, microbatch=65536, checkpointing=True),
    "1.5b-offload": Setting(shape="qwen2.5-1.5b", new=512, microbatch=8192, offload=True),
    "1.5b-lora": Setting(shape="qwen2.5-1.5b", new=512, lora=32),
    "1.5b-8k": Setting(shape="qwen2.5-1.5b", new=8192, prompts=4, group=4, checkpointing=True),
    "1.5b-32k": Setting(shape="qwen2.5-1.5b", new=32768, prompts=1, group=4, checkpointing=True, steps=1),
    "7b-8bit": Setting(shape="qwen2.5-7b", new=512, states="8bit", checkpointing=True),
    "7b-lora": Setting(shape="qwen2.5-7b", new=512, lora=32, checkpointing=True),
    "7b-4bit": Setting(
        shape="qwen2.5-7b", new=1950, prompts=2, microbatch=4096, lora=32, base="4bit", checkpointing=True
    ),
    "7b-lora-8k": Setting(shape="qwen2.5-7b", new=8192, prompts=2, group=4, lora=32, checkpointing=True),
}


def planned_bytes(folder: Path, setting: Setting) -> float:
    """What temper plan says of the very recipe that is measured."""
    from step import recipe_of

    from temper.build.check import check_stage
    from temper.build.memory import workload_of
    from temper.config import resolve
    from temper.planning.memory import plan_memory
    from temper.stages.kinds import kind_of
    from temper.stages.reading.data import open_data

    (config,) = resolve(recipe_of(folder, setting.options(), "bfloat16"), [], where="benchmark")
    objective = check_stage(config)
    data = open_data(config, objective, kind_of(config).reading, folder)
    return plan_memory(workload_of(config, objective, data, folder)).peak_bytes


def describe_only(folder: Path, setting: Setting) -> None:
    """Configuration and tokenizer without weights: enough for a plan."""
    from shapes import configuration
    from step import ALPHABET

    from temper.models.tiny import character_tokenizer

    tokenizer = character_tokenizer(ALPHABET)
    configuration(setting.shape, context=setting.new + 512).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def run_one(name: str, shape: str | None = None) -> dict[str, Any]:
    setting = replace(SETTINGS[name], shape=shape or SETTINGS[name].shape)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if not torch.cuda.is_available():
            describe_only(folder, setting)
            return {"planned": planned_bytes(folder, setting) / GIB}
        make_model(folder, setting.shape, "bfloat16", context=setting.new + 512)
        planned, start = planned_bytes(folder, setting) / GIB, time.perf_counter()
        found = measure_temper(folder, setting.options(), "bfloat16")
    peak = found["peak memory GiB"]
    return {"planned": planned, "measured": peak, "step": found["step seconds"], "took": time.perf_counter() - start}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SETTINGS, nargs="*", default=[])
    parser.add_argument("--shape", type=shape_of, help=f"measure the settings of --only with it; {SHAPE_HELP}")
    parser.add_argument("--seconds", type=float, default=170, help="begin no further setting after so long")
    parser.add_argument("--keep", type=Path, default=Path("runs/plan-peaks.json"), help="what was measured so far")
    parser.add_argument("--inside", choices=SETTINGS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        print(json.dumps(run_one(options.inside, options.shape)))
        return
    if options.shape and not options.only:
        parser.error("--shape is put into settings: name them with --only")
    others = ["--shape", options.shape] if options.shape else []
    kept: dict[str, dict[str, Any]] = json.loads(options.keep.read_text()) if options.keep.is_file() else {}
    options.keep.parent.mkdir(parents=True, exist_ok=True)
    begun = time.perf_counter()
    for name in options.only or [name for name in SETTINGS if "measured" not in kept.get(name, {})]:
        if time.perf_counter() - begun > options.seconds:
            print(f"{name} and what follows is left for the next call")
            break
        # A process each: what one leaves in the allocator would count for the next.
        done = subprocess.run([sys.executable, __file__, "--inside", name, *others], capture_output=True, text=True)
        key = f"{name}, {options.shape}" if options.shape else name
        if done.returncode:
            kept[key] = {"failed": done.stderr.strip().splitlines()[-1][:160] if done.stderr.strip() else "killed"}
        else:
            kept[key] = json.loads(done.stdout.strip().splitlines()[-1])
        options.keep.write_text(json.dumps(kept, indent=1))
    Console(width=120).print(render(kept))


def render(kept: dict[str, dict[str, Any]]) -> Table:
    table = Table("setting", "planned GiB", "measured GiB", "planned / measured", "verdict", "step seconds")
    for name, row in kept.items():
        if "failed" in row:
            table.add_row(name, "", "", "", row["failed"], "")
            continue
        if "measured" not in row:
            table.add_row(name, f"{row['planned']:.1f}", "", "", "no GPU here", "")
            continue
        ratio = row["planned"] / row["measured"]
        verdict = "ok" if LOW <= ratio <= HIGH else "too low" if ratio < LOW else "too high"
        numbers = (f"{row['planned']:.1f}", f"{row['measured']:.1f}", f"{ratio:.3f}")
        table.add_row(name, *numbers, verdict, f"{row['step']:.1f}")
    return table


if __name__ == "__main__":
    main()
