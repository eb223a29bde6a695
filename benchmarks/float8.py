"""Microseconds of what a decoder layer in float8 consists of, on a GPU: its four products, and what quantises rows.

    python benchmarks/float8.py --shape qwen2.5-7b --rows 64 256
Products in bfloat16, by the library in float8, by the choice of float8/tiles.py, and in other cuts (rows x outputs of a
tile, parts, stages, warps) while there is time. Every figure is of recorded passes over several layers' weights, too
many for the cache. TB/s are those of the weights alone.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from shapes import SHAPES, configuration
from torch.nn import functional

from temper.models.float8.tiles import Tiles, tiles_of
from temper.models.kernels.float8 import quantize_rows
from temper.models.kernels.float8_products import few_rows_product
from temper.models.kernels.norms import add_rms_norm, add_rms_norm_float8
from temper.models.kernels.swiglu import silu_mul, silu_mul_float8

REPLAYS = 20
LEAST_BYTES = 400e6  # of float8 weights that one recorded pass reads: eight times the cache of an H200
BF16, DEVICE = torch.bfloat16, "cuda"
THIN, SMALL, MIDDLE = (Tiles(rows=64, outputs=outputs, parts=1, stages=4, warps=4) for outputs in (32, 64, 128))
CUTS = {
    64: [replace(MIDDLE, stages=3), MIDDLE, replace(MIDDLE, outputs=256, warps=8), SMALL, replace(THIN, stages=6)],
    256: [replace(MIDDLE, rows=128, stages=3, warps=8), replace(SMALL, rows=128), replace(MIDDLE, stages=3)],
}  # by the most rows


def sizes_of(shape: str) -> dict[str, tuple[int, int]]:
    config = configuration(shape)
    width, inner = config.hidden_size, config.intermediate_size
    joined = width // config.num_attention_heads * (config.num_attention_heads + 2 * config.num_key_value_heads)
    return {"qkv": (joined, width), "o": (width, width), "down": (width, inner), "gate_up": (2 * inner, width)}


def microseconds(calls: Sequence[Callable[[], object]]) -> float:
    """Of one call, on average over all of them: recorded once, replayed often."""
    calls[0]()  # compiles, outside the recording
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(REPLAYS):
        graph.replay()
    torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - start) / REPLAYS / len(calls)


class Product:
    """rows [rows, width] times weights [outputs, width] of several layers."""

    def __init__(self, rows: int, outputs: int, width: int) -> None:
        self.rows, self.outputs, self.width = rows, outputs, width
        self.states = torch.randn(rows, width, device=DEVICE, dtype=BF16)
        self.codes, self.scale = quantize_rows(self.states)
        self.channels = torch.rand(outputs, device=DEVICE)
        layers = max(4, round(LEAST_BYTES / (outputs * width)))
        self.wide = [torch.randn(outputs, width, device=DEVICE, dtype=BF16) for _ in range(layers)]
        self.weights = [weight.to(torch.float8_e4m3fn) for weight in self.wide]

    def in_bf16(self) -> float:
        return microseconds([partial(functional.linear, self.states, weight) for weight in self.wide])

    def by_the_library(self) -> float:
        scales = {"scale_a": self.scale, "scale_b": self.channels.view(1, -1), "use_fast_accum": True}
        multiply = partial(torch._scaled_mm, self.codes, out_dtype=BF16, **scales)
        return microseconds([partial(multiply, weight.t()) for weight in self.weights])

    def cut(self, tiles: Tiles) -> float:
        rest = (self.channels, None, BF16, tiles)
        return microseconds([partial(few_rows_product, self.codes, self.scale, w, *rest) for w in self.weights])

    def candidates(self) -> list[Tiles]:
        """Each tile with as many parts as give one and two programs a multiprocessor."""
        found = []
        for tiles in CUTS[64 if self.rows <= 64 else 256]:
            programs = -(-self.rows // tiles.rows) * -(-self.outputs // tiles.outputs)
            counts = {max(1, min(count // programs, self.width // 256)) for count in (132, 264)}
            found += [replace(tiles, parts=parts) for parts in sorted(counts) if programs < 600]
        return found


def written(tiles: Tiles) -> str:
    """Parts, stages and warps by their letter."""
    return f"{tiles.rows}x{tiles.outputs} p{tiles.parts} s{tiles.stages} w{tiles.warps}"


def time_rows(shape: str, rows: int) -> dict[str, list[float]]:
    """What makes rows for products: in bfloat16, with a kernel that quantises them, and in float8 at once."""
    sizes = sizes_of(shape)
    x, weight = (torch.randn(count, sizes["o"][1], device=DEVICE, dtype=BF16) for count in (rows, 1))
    gate_up = torch.randn(rows, sizes["gate_up"][0], device=DEVICE, dtype=BF16)
    norm, silu = partial(add_rms_norm, x, x, weight[0], 1e-6), partial(silu_mul, gate_up)
    quantised = microseconds([partial(quantize_rows, x)] * 40)
    kernels: dict[str, list[Callable[[], object]]] = {
        "norm": [norm, lambda: quantize_rows(norm()[0]), partial(add_rms_norm_float8, x, x, weight[0], 1e-6)],
        "silu": [silu, lambda: quantize_rows(silu()), partial(silu_mul_float8, gate_up)],
    }
    found = {name: [microseconds([kernel] * 40) for kernel in forms] for name, forms in kernels.items()}
    return {**found, "attention's output": [0.0, quantised, quantised]}


def show(shape: str, rows: int, deadline: float) -> None:
    table = Table("us", "bf16", "library", "rule", "rule's cut", "other cuts, best first", title=f"{rows} rows")
    made = time_rows(shape, rows)
    total = [sum(times) + twice for *times, twice in zip(*made.values(), made["norm"], strict=True)]
    for name, times in made.items():
        table.add_row(name, *(f"{one:.1f}" for one in times), "", "")
    for index, (name, (outputs, width)) in enumerate(sizes_of(shape).items()):
        product, chosen = Product(rows, outputs, width), tiles_of(rows, outputs, width)
        library = product.by_the_library()
        times = [product.in_bf16(), library, library if chosen is None else product.cut(chosen)]
        until = time.monotonic() + (deadline - time.monotonic()) / (4 - index)
        others = [(product.cut(tiles), written(tiles)) for tiles in product.candidates() if time.monotonic() < until]
        total = [before + one for before, one in zip(total, times, strict=True)]
        sizes = [outputs * width * size for size in (2, 1, 1)]
        shown = [f"{one:.1f} ({size / one / 1e6:.1f} TB/s)" for one, size in zip(times, sizes, strict=True)]
        best = "\n".join(f"{one:.1f}: {cut}" for one, cut in sorted(others)[:5])
        table.add_row(name, *shown, "library" if chosen is None else written(chosen), best)
    table.add_row("a layer, but attention", *(f"{one:.1f}" for one in total), "", "")
    Console(width=130).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen2.5-7b")
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256], help="sequences decoded together")
    parser.add_argument("--seconds", type=float, default=30, help="for other cuts than the rule's, and compiling them")
    options = parser.parse_args()
    with torch.inference_mode():
        for rows in options.rows:
            show(options.shape, rows, time.monotonic() + options.seconds / len(options.rows))


if __name__ == "__main__":
    main()
