"""The trainer's update alone, on a random model of a real shape: seconds, peak memory and bytes per parameter for each
way to hold the optimiser's state. One table.

    python benchmarks/optimizer.py                        # tiny model, CPU
    python benchmarks/optimizer.py --shape qwen2.5-7b     # a GPU; offloaded float32 needs 80 GB of memory of the host
    python benchmarks/optimizer.py --shape qwen2.5-7b --states 8bit bfloat16 --resident   # in a minute
Every setting has a process of its own: pinned memory that one has let go of would still be taken when the next begins.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from rich.console import Console
from rich.table import Table
from shapes import SHAPES, configuration
from torch import nn
from transformers import AutoModelForCausalLM

from temper.trainer.adamw.buckets import has_kernels
from temper.trainer.adamw.footprint import bytes_per_parameter
from temper.trainer.memory import PeakMemory
from temper.trainer.optim import MasterAdamW, OptimizerSettings

STATES = ("float32", "bfloat16", "8bit")
RATE = 1e-4
"""Large enough to move bfloat16 weights of 0.02: equal bits shall mean something."""
TIMEOUT = 900
GIB = 2**30


def make_weights(shape: str, device: torch.device) -> nn.Module:
    """Parameters in bfloat16, as a GPU trains them. They are never used in a forward pass, so that nothing but the
    parameters is filled."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(configuration(shape), dtype=torch.bfloat16, trust_remote_code=False)
    model = model.to_empty(device=device)
    model.tie_weights()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.02)
    return model  # type: ignore[no-any-return]


def measure(shape: str, settings: OptimizerSettings, steps: int, device: torch.device) -> dict[str, Any]:
    """measure_once(), and the same update spelled in torch beside it where a kernel makes it: seconds and checksum."""
    found = measure_once(shape, settings, steps, device)
    if settings.states == "float32" or not has_kernels(device.type):
        return found
    gc.collect()  # a model holds itself in circles, and two do not fit
    if device.type == "cuda":
        torch.cuda.empty_cache()
    spelled = measure_once(shape, replace(settings, kernels=False), steps, device)
    return {**found, "spelled_seconds": spelled["seconds"], "spelled_checksum": spelled["checksum"]}


def measure_once(shape: str, settings: OptimizerSettings, steps: int, device: torch.device) -> dict[str, Any]:
    """`steps` updates with random gradients, the same for all settings; the first makes the state and is not timed."""
    torch.manual_seed(0)
    torch.zeros(1, device=device)  # a GPU counts nothing before its first use
    peak = PeakMemory(device)
    model = make_weights(shape, device)
    optimizer = MasterAdamW(model, settings)
    seconds = []
    for _ in range(steps):
        gradients = list(optimizer.gradients().values())
        for gradient in gradients:
            gradient.normal_(0.0, 1e-3)
        norm = nn.utils.get_total_norm(gradients)
        del gradient, gradients  # one that is held would be beside those of the next step
        _wait(device)
        start = time.perf_counter()
        norms = optimizer.step(RATE, norm)
        _wait(device)
        seconds.append(time.perf_counter() - start)
    assert bool(torch.isfinite(norms).all()), f"an update that is not finite: {norms.tolist()}"
    planned = bytes_per_parameter(settings.states, offload=settings.offload)
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seconds": statistics.median(seconds[1:]),
        "first_seconds": seconds[0],
        "peak_bytes": peak.bytes(),
        "planned_device": planned.device,
        "planned_host": planned.host,
        "update_norm_ratio": float(norms[1]),
        "checksum": checksum(model),
    }


def checksum(model: nn.Module) -> int:
    """A sum over the bits of all weights, each times its place: equal for equal bits."""
    total = 0
    for parameter in model.parameters():
        for piece in parameter.detach().view(-1).view(torch.int16).split(1 << 24):
            places = torch.arange(1, len(piece) + 1, device=piece.device)
            total = (31 * total + int((piece.long() * places).sum())) % (1 << 61)
    return total


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_apart(options: argparse.Namespace, states: str, offload: bool) -> dict[str, Any]:
    """measure() in a process of its own; {"error": ...} when it failed, as one that does not fit does."""
    command = [sys.executable, __file__, "--shape", options.shape, "--steps", str(options.steps)]
    command += ["--device", options.device, "--one", states, *(["--offload"] if offload else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]
    lines = done.stderr.strip().splitlines() or [f"ended with {done.returncode}"]
    return {"error": next((line for line in lines if "out of memory" in line), lines[-1])[:100]}


def row_of(found: dict[str, Any]) -> list[str]:
    if "error" in found:
        return ["", "", "", "", "", found["error"]]
    count = found["parameters"]
    return [
        f"{found['peak_bytes'] / GIB:.2f}",
        f"{found['peak_bytes'] / count:.2f}",
        f"{found['planned_device']:.2f} + {found['planned_host']:.2f}",
        f"{found['seconds']:.3f}",
        f"{found['spelled_seconds']:.3f}" if "spelled_seconds" in found else "",
        f"{count / found['seconds'] / 1e9:.2f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--steps", type=int, default=4, help="the first is warm-up; the median of the others counts")
    parser.add_argument("--states", nargs="+", choices=STATES, default=list(STATES))
    parser.add_argument(
        "--resident", action="store_true", help="on the GPU alone: pinning the host's memory takes time"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--one", choices=STATES, help="measure this one alone, in this process, and print JSON")
    parser.add_argument("--offload", action="store_true", help="with --one: offloaded")
    options = parser.parse_args()
    if options.steps < 2:
        parser.error("--steps must be at least 2: the first is warm-up")
    if options.one:
        settings = OptimizerSettings(learning_rate=RATE, states=options.one, offload=options.offload)
        print(json.dumps(measure(options.shape, settings, options.steps, torch.device(options.device))))
        return
    where = torch.cuda.get_device_name(0) if options.device == "cuda" else "CPU: the peak is that of the process"
    table = Table(title=f"{options.shape}, bfloat16 weights, {where}")
    planned = "planned: GPU + host"
    for column in ("states", "peak GiB", "bytes/parameter", planned, "seconds/update", "in torch", "10^9 values/s"):
        table.add_column(column)
    for states in options.states:
        checksums = []
        for offload in (False,) if options.resident else (False, True):
            found = measure_apart(options, states, offload)
            print(json.dumps({"states": states, "offload": offload, **found}), flush=True)
            table.add_row(f"{states}, offloaded" if offload else states, *row_of(found))
            checksums += [found[key] for key in ("checksum", "spelled_checksum") if key in found]
        if len(checksums) > 1:
            are = "the same" if len(set(checksums)) == 1 else "NOT the same"
            print(f"{states}: the weights after {len(checksums)} runs (kernel or torch, offloaded or not) are {are}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
