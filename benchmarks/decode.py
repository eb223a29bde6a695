"""Milliseconds of a decode step far into a context, beside what weights and keys allow at the rate of a bare copy.

    python benchmarks/decode.py tiny --together 2 --context 256                       # a CPU: how it works
    python benchmarks/decode.py qwen2.5-1.5b --together 32 --context 4096 --kernels   # a GPU
The steps are the engine's, log-probabilities and draws included: the time of long answers less that of short ones.
Every weight but the embedding is read once, and every key and value of every row; the rate is that of copying memory in
this process, bytes read and bytes written together.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections import defaultdict
from typing import Any

import torch
from engine import DEVICE, load, make_engine, make_prompts, time_engine
from rich.console import Console
from rich.table import Table
from shapes import shape_of

SHORT = 9
"""Tokens of the short answers: they end one look of the host behind the prompts."""
REPEATS = 6
"""The first compiles kernels, the second records steps."""


def copy_rate(seconds: float = 0.3) -> float:
    """Bytes per second of copying memory that no cache holds."""
    count = 2**31 if DEVICE.type == "cuda" else 2**26
    source = torch.ones(count, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    wait = torch.cuda.synchronize if DEVICE.type == "cuda" else (lambda: None)
    target.copy_(source)
    wait()
    copies, start = 0, time.perf_counter()
    while (took := time.perf_counter() - start) < seconds:
        for _ in range(4):
            target.copy_(source)
        wait()
        copies += 4
    return 2 * count * copies / took


def bytes_of_step(model: Any, together: int, context: float) -> tuple[int, int]:
    """(weights, keys and values) that a step reads, of so many rows of that length."""
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    held = {parameter.data_ptr(): parameter.nbytes for parameter in model.parameters()}
    weights = sum(held.values()) - (0 if head.data_ptr() == embedding.data_ptr() else embedding.nbytes)
    config = model.config.get_text_config()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * size * head.element_size()
    return weights, round(together * context * per_token)


def step_seconds(model: Any, options: argparse.Namespace) -> float:
    """Of one step, at the middle of the longer answers."""
    engine = make_engine(model, "fast", options.together, options.context + options.new + 8)
    vocabulary, seen = model.config.get_text_config().vocab_size, []
    for repeat in range(REPEATS):
        prompts = make_prompts(options.together, options.context - options.new // 2, vocabulary, repeat)
        short = time_engine(engine, prompts, SHORT, f"short {repeat}")
        long = time_engine(engine, prompts, options.new, f"long {repeat}")
        seen.append((long - short) / (options.new - SHORT))
    return statistics.median(seen[2:])


def show_kernels(model: Any, options: argparse.Namespace) -> None:
    """Microseconds of a step by kernel, as the device counts them."""
    engine = make_engine(model, "fast", options.together, options.context + options.new + 8)
    vocabulary = model.config.get_text_config().vocab_size
    prompts = make_prompts(options.together, options.context - options.new // 2, vocabulary, 0)
    for repeat in range(2):
        time_engine(engine, prompts, options.new, f"warm {repeat}")
    seen: list[dict[str, tuple[float, int]]] = []
    for new in (SHORT, options.new):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            time_engine(engine, prompts, new, f"profiled {new}")
        found: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
        for event in profile.key_averages():
            found[event.key] = (event.self_device_time_total, event.count)
        seen.append(found)
    steps = options.new - SHORT
    table = Table("kernel", "a step, us", "launches a step", title="decode step by kernel")
    rows = [(name, us - seen[0][name][0], count - seen[0][name][1]) for name, (us, count) in seen[1].items()]
    for name, us, count in sorted(rows, key=lambda row: -row[1]):
        if us / steps >= 1:
            table.add_row(name[:80], f"{us / steps:,.1f}", f"{count / steps:,.1f}")
    table.add_row("all", f"{sum(us for _, us, _ in rows) / steps:,.1f}", "")
    Console(width=130).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=shape_of, help="a shape, or a directory with config.json")
    parser.add_argument("--random", action="store_true", help="weights by chance, also where the directory has some")
    parser.add_argument("--dtype", default="bfloat16" if DEVICE.type == "cuda" else "float32")
    parser.add_argument("--together", type=int, default=32)
    parser.add_argument("--context", type=int, default=4096, help="tokens of each row in the middle of what is timed")
    parser.add_argument("--new", type=int, default=265, help="tokens of the longer answers")
    parser.add_argument("--kernels", action="store_true", help="a GPU: time by kernel, too")
    options = parser.parse_args()
    if options.new <= SHORT or options.new // 2 >= options.context:
        parser.error(f"--new: more than {SHORT} tokens, and less than twice --context")
    model = load(options)
    rate, seconds = copy_rate(), step_seconds(model, options)
    weights, keys = bytes_of_step(model, options.together, options.context)
    least = (weights + keys) / rate
    where = torch.cuda.get_device_name(0) if DEVICE.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(
        f"{options.model}, {options.dtype}, {options.together} rows of {options.context:,} tokens, {where}: "
        f"{1e3 * seconds:.3g} ms a step; {weights / 1e9:.2f} GB of weights and {keys / 1e9:.2f} GB of keys at "
        f"{rate / 1e12:.3g} TB/s allow {1e3 * least:.3g} ms: {least / seconds:.0%}"
    )
    assert math.isfinite(seconds)
    if options.kernels and DEVICE.type == "cuda":
        show_kernels(model, options)


if __name__ == "__main__":
    main()
