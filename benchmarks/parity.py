"""How far apart sampler and trainer are by rounding alone, at any shape; whether the check still sees what is wrong.

    python benchmarks/parity.py                                          # small shapes, a CPU
    python benchmarks/parity.py --dtype bfloat16 --faults                # ... and faults planted at each of them
    python benchmarks/parity.py --shapes tiny 12x256 smollm2-135m qwen2.5-1.5b qwen2.5-7b 40x1024 --faults   # a GPU
    python benchmarks/parity.py --shapes models/smollm2-135m --dtype float16          # trained weights
    python benchmarks/parity.py --weights fp8                            # a sampler whose matrices are float8
A shape is a name of shapes.py, LAYERSxWIDTH, or a checkpoint directory; the first two get random weights. Below the
table: the constants of temper/parity/budgets.py as these shapes would have them.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import math
import os
import re
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import torch
from faults import FAULTS, Pair
from rich.console import Console
from rich.table import Table
from shapes import SHAPES, configuration
from transformers import AutoModelForCausalLM, LlamaConfig

from temper.batching.pack import pack
from temper.engine.local.engine import EngineSettings, LocalEngine
from temper.errors import BackendError
from temper.models.decoder import lay_end_to_end
from temper.models.float8.layers import float8_copy
from temper.models.load import load_model, load_tokenizer, prepare, shape_of
from temper.objectives import PRESETS
from temper.parity.budgets import Budget, DepthAndWidth, budget_of
from temper.parity.check import Canary, Sides, require_float32_heads
from temper.parity.diagnosis import Agreement
from temper.trainer.local import LocalTrainer, TrainerSettings
from temper.trainer.optim import OptimizerSettings
from temper.types import SamplingParams

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = ["2x64", "4x128", "8x128", "6x256", "12x256", "24x192", "6x512"]
LONGEST = 512
TEXT = Path(__file__).parents[1] / "README.md"
"""Prompts of a trained model: on random tokens its distribution would be none that it has in training."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    shape: str
    size: DepthAndWidth
    vocabulary: int
    agreement: Agreement
    budget: Budget


def make_model(shape: str, dtype: torch.dtype, seed: int = 0) -> Any:
    """Random weights as transformers draws them, or a checkpoint's."""
    if Path(shape).is_dir():
        return load_model(Path(shape), dtype, DEVICE)
    torch.manual_seed(seed)
    with DEVICE:
        model = AutoModelForCausalLM.from_config(_configuration(shape), dtype=dtype, trust_remote_code=False)
    model = prepare(model.eval())
    model.config.max_position_embeddings = 1 << 20  # one of the planted faults takes all rows for one
    lay_end_to_end(model)
    return model


def _configuration(shape: str) -> Any:
    if shape in SHAPES:
        return configuration(shape)
    if (named := re.fullmatch(r"(\d+)x(\d+)", shape)) is None:
        raise SystemExit(f"{shape} is no shape: use one of {', '.join(SHAPES)}, LAYERSxWIDTH, or a directory")
    layers, width = int(named[1]), int(named[2])
    heads = max(1, width // 64)
    return LlamaConfig(
        hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=heads // 2 if heads % 2 == 0 else heads, vocab_size=4096, tie_word_embeddings=True,
        max_position_embeddings=2048,
    )  # fmt: skip


def make_pair(model: Any, budget: Budget, weights: str = "model") -> Pair:
    settings = EngineSettings(
        seed=0, block_size=16, num_blocks=4096, max_running=64, tokens_per_step=4096, max_length=LONGEST,
        steps_per_sync=8, prefix_cache=False,
    )  # fmt: skip
    trainer = LocalTrainer(
        model,
        None,
        PRESETS["grpo"],
        TrainerSettings(optimizer=OptimizerSettings(learning_rate=0.0), temperature=1.0, total_steps=1),
        pack=partial(pack, tokens_per_microbatch=8192),
    )

    def make_engine(other: Any) -> LocalEngine:
        return LocalEngine(float8_copy(other) if weights == "fp8" else other, settings)

    sides = Sides(sampler=make_engine(model), recompute=trainer.score, params=SamplingParams(), budget=budget, bos_id=0)
    return Pair(model=model, make_engine=make_engine, sides=sides)


def make_prompts(shape: str, vocabulary: int, count: int, longest: int = 128) -> list[tuple[int, ...]]:
    lengths = [16 + (longest - 16) * place // max(1, count - 1) for place in range(count)]
    if not Path(shape).is_dir():
        random = np.random.default_rng(0)
        return [tuple(random.integers(2, vocabulary, size=length).tolist()) for length in lengths]
    ids = load_tokenizer(Path(shape)).encode(TEXT.read_text())
    return [tuple(ids[100 * place : 100 * place + length]) for place, length in enumerate(lengths)]


def measure(shape: str, pair: Pair, count: int) -> Agreement:
    """Eight tokens after each of so many prompts, whatever the gap."""
    open_sides = dataclasses.replace(pair.sides, budget=Budget(mean_gap=math.inf, max_gap=math.inf))
    vocabulary = shape_of(pair.model.config).vocab_size
    agreement = asyncio.run(Canary(open_sides, make_prompts(shape, vocabulary, count), name="measure").check(0))
    assert agreement is not None, "a canary without a pause looks every time"
    return agreement


def catch(shape: str, pair: Pair, fault: str) -> str | None:
    """What the check says about a planted fault; None when it sees nothing."""
    prompts = make_prompts(shape, shape_of(pair.model.config).vocab_size, 4, longest=40)
    plant = FAULTS[fault](pair)
    try:
        asyncio.run(_check(next(plant), prompts))
    except BackendError as error:
        return str(error)
    finally:
        next(plant, None)
    return None


async def _check(sides: Sides, prompts: Sequence[tuple[int, ...]]) -> None:
    """What a run does before its first step, on prompts without a text."""
    await Canary(sides, prompts, name="fault").check(0)
    await require_float32_heads(sides, prompts, name="fault")


def fit(found: Sequence[Found], dtype: str) -> str:
    """gap = unit x sqrt(layers) x (width / 1024)^exponent, by least squares of logarithms."""
    rows = np.array([[1.0, math.log(one.size.width / 1024)] for one in found])
    gaps = np.log([one.agreement.mean_gap / math.sqrt(one.size.num_layers) for one in found])
    (unit, exponent), *_ = np.linalg.lstsq(rows, gaps, rcond=None)
    off = np.exp(np.abs(rows @ np.array([unit, exponent]) - gaps)).max()
    tail = max(one.agreement.max_gap / one.agreement.mean_gap for one in found)
    return (
        f"{dtype}: unit {math.exp(unit):.3g}, exponent {exponent:.2f} (no shape is off by more than {off:.1f} times); "
        f"largest over mean {tail:.0f}"
    )


def show(found: Sequence[Found], options: argparse.Namespace) -> None:
    where = torch.cuda.get_device_name(0) if DEVICE.type == "cuda" else "CPU"
    table = Table(
        "shape", "layers", "width", "vocabulary", "tokens", "mean gap", "budget", "largest", "budget", "mean / budget",
        title=f"|sampled - recomputed| in nats, {options.dtype}, sampler's matrices {options.weights}, {where}",
    )  # fmt: skip
    for one in found:
        agreement, budget = one.agreement, one.budget
        table.add_row(
            one.shape, str(one.size.num_layers), f"{one.size.width:,}", f"{one.vocabulary:,}",
            str(agreement.num_tokens), f"{agreement.mean_gap:.3g}", f"{budget.mean_gap:.3g}",
            f"{agreement.max_gap:.3g}", f"{budget.max_gap:.3g}", f"{agreement.mean_gap / budget.mean_gap:.2f}",
        )  # fmt: skip
    Console(width=130).print(table)


def show_faults(caught: dict[str, dict[str, str | None]]) -> None:
    table = Table("planted", *caught, title="caught by the check before the first step")
    for fault in FAULTS:
        table.add_row(fault, *("missed" if said[fault] is None else "caught" for said in caught.values()))
    Console(width=130).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=SMALL)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--weights", default="model", choices=["model", "fp8"], help="engine.weights")
    parser.add_argument("--prompts", type=int, default=64, help="prompts of a measurement, 8 tokens after each")
    parser.add_argument("--faults", action="store_true", help="plant every fault at every shape")
    options = parser.parse_args()
    coarser = "fp8" if options.weights == "fp8" else options.dtype
    found: list[Found] = []
    caught: dict[str, dict[str, str | None]] = {}
    for shape in options.shapes:
        start = time.perf_counter()
        model = make_model(shape, getattr(torch, options.dtype))
        facts = shape_of(model.config)
        size = DepthAndWidth(num_layers=facts.num_layers, width=facts.width)
        budget = budget_of(facts.family, coarser, "local", "fast", size)
        pair = make_pair(model, budget, options.weights)
        agreement = measure(shape, pair, options.prompts)
        found.append(Found(shape=shape, size=size, vocabulary=facts.vocab_size, agreement=agreement, budget=budget))
        if options.faults:
            caught[shape] = {fault: catch(shape, pair, fault) for fault in FAULTS}
        missed = [fault for fault, said in caught.get(shape, {}).items() if said is None]
        verdict = f", {len(FAULTS) - len(missed)} of {len(FAULTS)} faults caught" if options.faults else ""
        print(f"{shape}: gap {agreement.mean_gap:.3g}{verdict}, {time.perf_counter() - start:.0f} s", flush=True)
        del model, pair
        gc.collect()
        torch.cuda.empty_cache()
    show(found, options)
    if len(found) > 2:
        print(fit(found, coarser))
    if caught:
        show_faults(caught)


if __name__ == "__main__":
    main()
