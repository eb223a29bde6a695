"""Weights from a trainer into a sampler process: seconds, bytes, and whether exactly these arrived.

    python benchmarks/publication.py                                  # SmolLM2-135M's shape, CPU: shared memory and TCP
    python benchmarks/publication.py --shape qwen2.5-7b --ways shared # a GPU: CUDA IPC
Seconds are those of a whole transaction: requests under way are held, tensors go over, the engine takes all of them
or none, and says so. Weights change before each, and after the last one the process must draw, with the same
log-probabilities, what an engine of this process draws with them. "proof" is what it takes besides for both sides to
add up all tensors (engine/digests.py), as a fleet does at every publication. A bucket is what is on its way at once: a
piece of 16 MiB over TCP, and elsewhere all, for memory is shared.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from rich.console import Console
from rich.table import Table
from shapes import SHAPES
from step import make_model
from torch import Tensor

from temper.build.policy import size_engine
from temper.cluster.remote import Callback
from temper.cluster.samplers import start_sampler
from temper.engine.digests import digested
from temper.engine.local.engine import LocalEngine
from temper.engine.process.client import ProcessSampler
from temper.engine.process.order import LocalOrder
from temper.engine.process.sent_weights import PIECE_BYTES, SentWeights
from temper.engine.process.weights import SharedWeights, anonymous_file
from temper.models.load import load_model
from temper.trainer.weights import publish
from temper.types import Publication, Request, SamplingParams

NEW = 16
SILENT_SECONDS = 120.0
PROMPT = tuple(range(5, 21))


class CalledBack:
    """A sampler process of this machine that is asked over TCP, as one of another machine is."""

    name = "the sampler process"

    def __init__(self, callback: Callback) -> None:
        told = f"'127.0.0.1', {callback.port}, '{callback.token}', {SILENT_SECONDS}"
        program = f"from temper.cluster.remote import serve_caller; serve_caller({told})"
        self._process = subprocess.Popen([sys.executable, "-c", program])

    def wait(self, seconds: float) -> str | None:
        return None if self._process.poll() is None else f"it ended with code {self._process.returncode}"

    def kill(self) -> None:
        self._process.kill()


def open_way(way: str, order: LocalOrder) -> ProcessSampler:
    if way == "shared":
        return start_sampler(order.to_json(), SharedWeights(anonymous_file()))
    callback = Callback(SILENT_SECONDS)
    return ProcessSampler(callback, SentWeights(), CalledBack(callback), order=order.to_json())


async def measure(way: str, model: Any, order: LocalOrder, repeats: int) -> tuple[list[float], list[float], bool]:
    """Seconds of each publication and of each proof, and whether the process draws what is drawn here with the last
    one."""
    sampler = open_way(way, order)
    own = LocalEngine(model, order.settings)
    seconds, proofs = [], []
    try:
        await sampler.opened()
        for number in range(1, repeats + 1):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.0009765625)
            publication = publish(model, number)
            start = time.perf_counter()
            await sampler.load(publication)
            seconds.append(time.perf_counter() - start)
            proofs.append(await prove(sampler, publication))
        await own.load(publication)
        request = Request(id="0", prompt_ids=PROMPT, params=SamplingParams(max_new_tokens=NEW))
        theirs, ours = [await each.generate(request) for each in (sampler, own)]
        is_same = list(theirs.token_ids) == list(ours.token_ids) and list(theirs.logprobs) == list(ours.logprobs)
    finally:
        await sampler.close()
        await own.close()
    return seconds, proofs, is_same


async def prove(sampler: ProcessSampler, publication: Publication) -> float:
    """Seconds for both sides, one after the other."""
    start = time.perf_counter()
    summed, digests = digested(publication)
    for name in summed.tensors:
        summed.tensors[name]
    assert await sampler.differences(digests, SILENT_SECONDS) == [], "other numbers arrived"
    return time.perf_counter() - start


def num_buckets(way: str, tensors: Mapping[str, Tensor]) -> int:
    if way == "shared":
        return 1
    return sum(-(-tensor.nbytes // PIECE_BYTES) for tensor in tensors.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--ways", nargs="+", choices=["shared", "sent"], default=["shared", "sent"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--step-seconds", type=float, help="of a step of training, to print the share of it")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    where = torch.cuda.get_device_name(0) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    with tempfile.TemporaryDirectory() as name:
        make_model(Path(name), options.shape, dtype)
        model: Any = load_model(Path(name), getattr(torch, dtype), device)
        tensors = publish(model, 0).tensors
        size = sum(tensor.nbytes for tensor in tensors.values())
        title = f"{options.shape}, {dtype}, {size:,} bytes ({size / 2**30:.2f} GiB) in {len(tensors)} tensors, {where}"
        columns = ["way", "buckets", "first s", "later s", "GiB/s", "proof s", "arrived"]
        table = Table(*columns, *(["of a step"] if options.step_seconds else []), title=title)
        settings = size_engine(seed=0, max_running=8, max_length=2048, kv_tokens=4096, tokens_per_step=512)
        order = LocalOrder(
            folder=name, dtype=dtype, device=str(device), numerics="fast", weights="model", settings=settings
        )
        for way in options.ways:
            (first, *later), proofs, is_same = asyncio.run(measure(way, model, order, options.repeats))
            usual = statistics.median(later)
            said = "the same, to the bit" if is_same else "OTHER NUMBERS"
            named = {"shared": "CUDA IPC" if device.type == "cuda" else "shared memory", "sent": "TCP, loopback"}[way]
            proof, buckets = statistics.median(proofs), str(num_buckets(way, tensors))
            row = [named, buckets, f"{first:.3f}", f"{usual:.3f}", f"{size / 2**30 / usual:.1f}", f"{proof:.3f}", said]
            share = [f"{(usual + proof) / options.step_seconds:.1%}"] if options.step_seconds else []
            table.add_row(*row, *share)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
