"""Tokens per second of the local engine, and what it could be compared with, in one run. One table.

    python benchmarks/engine.py models/smollm2-135m                      # 64 together, fast and exact
    python benchmarks/engine.py models/smollm2-135m --random --together 64 1024 --with bare generate   # a GPU
    python benchmarks/engine.py qwen2.5-7b --together 64 256 --with --weights model fp8   # random weights of a shape
    python benchmarks/engine.py qwen3-30b-a3b-6-layers --together 64 256 --with generate --routes   # experts
    python benchmarks/engine.py models/smollm2-135m --grow docs/engine.svg   # cost against length, batch and groups
Every request draws exactly --new tokens at temperature 1 with log-probabilities, through the public engine.
`bare` is a hand-written decode step, compiled, replayed without scheduler, sampling parameters or host: the limit.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from shapes import SHAPES, configuration, shape_of
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from temper.engine.local.engine import EngineSettings, LocalEngine
from temper.models.decoder import lay_end_to_end, set_numerics
from temper.models.float8.layers import float8_copy
from temper.models.load import prepare
from temper.runs.report.plot import Line, Panel, chart
from temper.types import Completion, Request, SamplingParams

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load(options: argparse.Namespace) -> Any:
    dtype = getattr(torch, options.dtype)
    has_weights = any(Path(options.model).glob("*.safetensors")) and options.model not in SHAPES
    if has_weights and not options.random:
        return (
            AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype, trust_remote_code=False).to(DEVICE).eval()
        )
    torch.manual_seed(0)
    if options.model in SHAPES:
        config = configuration(options.model)
    else:  # with the context that it says
        config = AutoConfig.from_pretrained(options.model, trust_remote_code=False)
    with DEVICE:
        return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False).eval()


REPEATS = 4
"""The last one counts: on a GPU the second of a size records it."""


def make_engine(model: Any, numerics: Any, together: int, length: int, *, routes: bool = False) -> LocalEngine:
    model = prepare(model)
    lay_end_to_end(model)
    set_numerics(model, numerics)
    blocks = -(-length // 16) + 1
    return LocalEngine(
        model,
        EngineSettings(
            seed=0,
            block_size=16,
            num_blocks=together * blocks + 2,
            max_running=together,
            tokens_per_step=16384,
            max_length=length,
            steps_per_sync=8,
            prefix_cache=False,
            routes=routes,
        ),
    )


def make_prompts(count: int, length: int, vocabulary: int, seed: int) -> list[tuple[int, ...]]:
    random = np.random.default_rng(seed)
    return [tuple(random.integers(10, vocabulary - 10, size=length).tolist()) for _ in range(count)]


def time_engine(engine: LocalEngine, prompts: list[tuple[int, ...]], new: int, name: str) -> float:
    """Seconds for all prompts together. No stop ids: every request draws all its tokens."""
    params = SamplingParams(max_new_tokens=new)

    async def run() -> list[Completion]:
        requests = [Request(id=f"{name}/{i}", prompt_ids=p, params=params) for i, p in enumerate(prompts)]
        return await asyncio.gather(*(engine.generate(request) for request in requests))

    gc.collect()  # or it comes while the clock runs, for what others left
    start = time.perf_counter()
    completions = asyncio.run(run())
    seconds = time.perf_counter() - start
    assert all(len(completion.token_ids) == new for completion in completions)
    return seconds


def measure_engine(
    model: Any, options: argparse.Namespace, numerics: str, together: int, weights: str = "model", routes: bool = False
) -> float:
    model = float8_copy(prepare(model)) if weights == "fp8" else model
    engine = make_engine(model, numerics, together, options.prompt + options.new + 8, routes=routes)
    vocabulary = model.config.get_text_config().vocab_size
    for repeat in range(3):  # the first compiles kernels, the second records graphs
        prompts = make_prompts(together, options.prompt, vocabulary, repeat)
        seconds = time_engine(engine, prompts, options.new, f"{numerics} {weights} {together} {repeat}")
    return together * options.new / seconds


def measure_generate(model: Any, options: argparse.Namespace, together: int) -> float:
    """Hugging Face generate."""
    model.set_attn_implementation("sdpa")
    ids = torch.randint(10, model.config.get_text_config().vocab_size - 10, (together, options.prompt), device=DEVICE)
    sampling = {"attention_mask": torch.ones_like(ids), "do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    with torch.inference_mode():
        model.generate(ids, max_new_tokens=4, min_new_tokens=4, **sampling)
        start = time.perf_counter()
        model.generate(ids, max_new_tokens=options.new, min_new_tokens=options.new, **sampling).cpu()
    return together * options.new / (time.perf_counter() - start)


def measure_bare(model: Any, options: argparse.Namespace, together: int) -> float:
    """The decode step of a Llama-like model by hand, at the middle of the completion."""
    step = bare_step(model, together, options.prompt + options.new)
    tokens = torch.full((together,), 11, device=DEVICE)
    position = torch.full((1,), options.prompt + options.new // 2, device=DEVICE)
    with torch.inference_mode():
        for _ in range(3):
            step(tokens, position)
        if DEVICE.type != "cuda":
            start = time.perf_counter()
            for _ in range(10):
                step(tokens, position)
            return together * 10 / (time.perf_counter() - start)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step(tokens, position)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(100):
            graph.replay()
        torch.cuda.synchronize()
    return together * 100 / (time.perf_counter() - start)


def bare_step(model: Any, together: int, length: int) -> Callable[[Tensor, Tensor], Tensor]:
    decoder, config = model.get_decoder(), model.config
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    size = config.hidden_size // heads
    norm, linear = torch.nn.functional.rms_norm, torch.nn.functional.linear
    layers = []
    for layer in decoder.layers:
        attention, mlp = layer.self_attn, layer.mlp
        qkv = torch.cat([p.weight for p in (attention.q_proj, attention.k_proj, attention.v_proj)]).detach()
        gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).detach()
        norms = (layer.input_layernorm.weight.detach(), layer.post_attention_layernorm.weight.detach())
        cache = torch.zeros(2, together, kv_heads, length, size, dtype=qkv.dtype, device=DEVICE)
        layers.append((qkv, attention.o_proj.weight.detach(), gate_up, mlp.down_proj.weight.detach(), norms, cache))
    embedding, last = decoder.embed_tokens.weight.detach(), decoder.norm.weight.detach()
    table = torch.outer(torch.arange(length, device=DEVICE).float(), decoder.rotary_emb.inv_freq.to(DEVICE).float())
    cos, sin = (torch.cat((f(table), f(table)), -1).to(embedding.dtype) for f in (torch.cos, torch.sin))
    keys_seen = torch.arange(length, device=DEVICE)

    def rotated(x: Tensor, position: Tensor) -> Tensor:
        half = torch.cat((-x[..., size // 2 :], x[..., : size // 2]), -1)
        return x * cos[position] + half * sin[position]

    # Compiled by layer: all share one compilation, and additions still meet the norms that follow them.
    @torch.compile(dynamic=False)
    def one_layer(x: Tensor, more: Tensor, position: Tensor, *parts: Tensor) -> tuple[Tensor, Tensor]:
        qkv, out, gate_up, down, first_norm, second_norm, keys, values = parts
        x = x + more
        projected = linear(norm(x, (x.shape[-1],), first_norm, 1e-5), qkv).view(together, -1, size)
        q, k, v = projected.split((heads, kv_heads, kv_heads), 1)
        keys.index_copy_(2, position, rotated(k, position).unsqueeze(2))
        values.index_copy_(2, position, v.unsqueeze(2))
        folded = rotated(q, position).view(together, kv_heads, heads // kv_heads, size)
        mask = (keys_seen <= position)[None, None, None, :]
        attended = torch.nn.functional.scaled_dot_product_attention(folded, keys, values, attn_mask=mask)
        x = x + linear(attended.reshape(together, -1), out)
        gate, up = linear(norm(x, (x.shape[-1],), second_norm, 1e-5), gate_up).chunk(2, -1)
        return x, linear(torch.nn.functional.silu(gate) * up, down)

    @torch.compile(dynamic=False)
    def finish(x: Tensor, more: Tensor) -> Tensor:
        return linear(norm(x + more, (x.shape[-1],), last, 1e-5), embedding).argmax(-1)

    def step(tokens: Tensor, position: Tensor) -> Tensor:
        x = embedding[tokens]
        more = torch.zeros_like(x)
        for qkv, out, gate_up, down, norms, cache in layers:
            x, more = one_layer(x, more, position, qkv, out, gate_up, down, *norms, cache[0], cache[1])
        return finish(x, more)

    return step


def grow(model: Any, options: argparse.Namespace) -> None:
    """Milliseconds of a decode step against context and batch, and of a prefill against the size of its group."""
    vocabulary, together = model.config.get_text_config().vocab_size, options.together[0]
    rows: dict[str, list[tuple[float, float]]] = {"context": [], "batch": [], "group": []}
    for length in options.lengths:
        engine = make_engine(model, "fast", 16, length + 40)
        for repeat in range(REPEATS):
            one = time_engine(engine, make_prompts(16, length, vocabulary, repeat), 1, f"one {repeat}")
            many = time_engine(engine, make_prompts(16, length, vocabulary, repeat), 33, f"many {repeat}")
        rows["context"].append((length, 1000 * (many - one) / 32))
    count = 1
    while count <= together:
        engine = make_engine(model, "fast", count, 128)
        for repeat in range(REPEATS):
            seconds = time_engine(engine, make_prompts(count, 64, vocabulary, repeat), 32, f"batch {repeat}")
        rows["batch"].append((count, 1000 * seconds / 32))
        count *= 4
    length = options.lengths[-1]
    for size in (1, 4, 16):
        engine = make_engine(model, "fast", 16, length + 40)
        for repeat in range(REPEATS):
            prompts = make_prompts(1, length, vocabulary, repeat) * size
            seconds = time_engine(engine, prompts, 1, f"group {size} {repeat}")
        rows["group"].append((size, 1000 * seconds))
    engine = make_engine(model, "fast", 16, length + 40)
    for repeat in range(REPEATS):
        apart = time_engine(engine, make_prompts(16, length, vocabulary, repeat), 1, f"apart {repeat}")
    show_growth(rows, 1000 * apart, length, Path(options.grow))


def show_growth(rows: dict[str, list[tuple[float, float]]], apart: float, length: int, path: Path) -> None:
    """Table and chart. `apart`: milliseconds of 16 different prompts of that length, beside groups of one."""
    table = Table("", "against", "milliseconds")
    units = {"context": "tokens of context, a decode step of 16", "batch": "sequences, a step", "group": "in the group"}
    for name, points in rows.items():
        for x, y in points:
            table.add_row(name, f"{x:,.0f} {units[name]}", f"{y:,.2f}")
    table.add_row("group", f"16 prompts of {length:,} apart", f"{apart:,.2f}")
    Console(width=110).print(table)
    members = f"members of one group, {length:,} tokens"
    labels = {"context": "tokens of context", "batch": "sequences together", "group": members}
    panels = []
    for name, points in rows.items():
        # By powers of four: sizes of a batch and of a group are far apart.
        is_log = name != "context"
        places = [math.log(x, 4) if is_log else x for x, _ in points]
        lines = [Line(label="a decode step" if name != "group" else "one group", xs=places, ys=[y for _, y in points])]
        if name == "group":
            lines.append(Line(label="16 prompts apart", xs=[0, places[-1]], ys=[apart, apart], is_dashed=True))
        top = 1.1 * max(y for line in lines for y in line.ys)
        names = {place: f"{x:,.0f}" for place, (x, _) in zip(places, points, strict=True)} if is_log else {}
        scale: dict[str, Any] = {"y_label": "milliseconds", "y_range": (0.0, top), "x_names": names}
        panels.append(Panel(title=name, lines=lines, x_label=labels[name], **scale))
    path.write_text(chart(panels, legend="each"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shapes = f"checkpoint directory, or one with config.json alone, or a shape: {', '.join(SHAPES)}"
    parser.add_argument("model", type=shape_of, help=shapes)
    parser.add_argument("--random", action="store_true", help="weights by chance: for the shape only")
    parser.add_argument("--dtype", default="bfloat16" if DEVICE.type == "cuda" else "float32")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--together", type=int, nargs="+", default=[64])
    parser.add_argument("--with", dest="others", nargs="*", choices=["bare", "generate"], default=["generate"])
    parser.add_argument("--weights", nargs="+", choices=["model", "fp8"], default=["model"], help="fp8: beside bf16")
    parser.add_argument("--routes", action="store_true", help="experts: in place of exact, with every route recorded")
    parser.add_argument("--grow", help="write a chart of how cost grows to this file, instead of the table")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 2000])
    options = parser.parse_args()
    model = load(options)
    if options.grow:
        return grow(model, options)
    where = torch.cuda.get_device_name(0) if DEVICE.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    columns: dict[str, Callable[[int], float]] = {
        "temper": lambda together: measure_engine(model, options, "fast", together),
        "temper exact": lambda together: measure_engine(model, options, "exact", together),
    }
    if options.routes:
        columns = {
            "temper": columns["temper"],
            "temper routes": lambda together: measure_engine(model, options, "fast", together, routes=True),
        }
    if "fp8" in options.weights:
        columns = {
            "temper": columns["temper"],
            "temper fp8": lambda together: measure_engine(model, options, "fast", together, "fp8"),
        }
    if "bare" in options.others:
        columns["bare step"] = lambda together: measure_bare(model, options, together)
    if "generate" in options.others:
        columns["generate"] = lambda together: measure_generate(model, options, together)
    title = f"tokens/s, {options.dtype}, prompt {options.prompt}, {options.new} new, {where}"
    table = Table("together", *columns, *(f"temper / {name}" for name in list(columns)[1:]), title=title)
    for together in options.together:
        speeds = [measure(together) for measure in columns.values()]
        ratios = (f"{speeds[0] / speed:.2f}" for speed in speeds[1:])
        table.add_row(f"{together:,}", *(f"{speed:,.0f}" for speed in speeds), *ratios)
    Console(width=130).print(table)
    return None


if __name__ == "__main__":
    main()
