"""One GRPO step of Temper and of TRL 1.16.0: same random model, prompts, lengths and machine, in one run. One table.

    python benchmarks/step.py                        # tiny model, CPU
    python benchmarks/step.py --shape smollm2-135m   # a GPU
    python benchmarks/step.py --only temper --shape qwen2.5-7b --states 8bit --checkpointing --prompts 32 --new 512
    python benchmarks/step.py --only temper --shape qwen2.5-7b --lora 32 --base 4bit --checkpointing --new 2000
    python benchmarks/step.py --only temper --shape qwen3-30b-a3b-6-layers --states 8bit --checkpointing --replay
    python benchmarks/step.py --only temper --shape qwen2.5-1.5b --prompts 2 --group 2 --new 32000 --checkpointing
The first step is printed beside later ones; what is compiled for it is kept, so run it twice to see how a run starts.
Needs `pip install "temper-rl[bench]"` for the TRL column; --only temper leaves it out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from rich.console import Console
from rich.table import Table
from shapes import SHAPE_HELP, configuration, shape_of
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from temper import loop
from temper.build import Listeners, build_stage, make_plan
from temper.config import resolve
from temper.models.tiny import character_tokenizer
from temper.runs.time_split import TRAINING
from temper.types import Batch, EvaluationResult, StepReport

ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 ?.,"


PROMPT_ROOM = 256
"""Tokens of a row beside its answer."""


def make_model(folder: Path, shape: str, dtype: str, context: int = 2048) -> None:
    """Random weights: shapes matter, not quality. The end token is one of thousands, so almost nothing stops early."""
    tokenizer = character_tokenizer(ALPHABET)
    torch.manual_seed(0)
    ids = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None, "pad_token_id": tokenizer.pad_token_id}
    config = configuration(shape, context=max(2048, context), **ids)
    # A CPU would draw seven billion numbers for minutes.
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), trust_remote_code=False)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    del model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def prompts(count: int) -> list[str]:
    return [f"What is the sum of {i} and {i + 3}? Think step by step." for i in range(count)]


PASSES = tuple(name for name in TRAINING if name != "optimizer")
"""Phases in which the trainer goes over rows; all FLOPs that a step counts are of these."""


class Steps:
    """Keeps the reports of the steps."""

    def __init__(self) -> None:
        self.reports: list[StepReport] = []

    def append(self, report: StepReport, batch: Batch) -> None:
        self.reports.append(report)

    def evaluation(self, result: EvaluationResult) -> None:
        """None are made."""


PLAIN = {"checkpointing": False, "lora": 0, "base": "full", "states": "float32", "offload": False, "max_gap": None,
         "replay": False, "engine": "local"}  # fmt: skip
"""Options of recipe_of that benchmarks of other things leave alone."""


def recipe_of(folder: Path, options: argparse.Namespace, dtype: str) -> dict[str, Any]:
    """Temper's side of the comparison."""
    rows = folder / "prompts.jsonl"
    rows.write_text("".join(json.dumps({"prompt": p, "answer": ALPHABET}) + "\n" for p in prompts(512)))
    completions = options.prompts * options.group
    more: dict[str, Any] = {"lora": {"rank": options.lora, "base": options.base}} if options.lora else {}
    more |= {"replay_routes": True} if options.replay else {}
    # The reward grows with the letters of an answer, as in TRL's column: nearly every group has a signal to train on.
    return {
        "steps": options.steps,
        "model": {"path": str(folder), "dtype": dtype, "gradient_checkpointing": options.checkpointing, **more},
        "optim": {"states": options.states, "offload": options.offload},
        "train": [{"path": str(rows)}],
        "reward": [{"kind": "edit"}],
        "sampling": {"max_new_tokens": options.new},
        "rollout": {"groups_per_step": options.prompts, "group_size": options.group},
        "engine": {"kind": options.engine, "max_running": completions, "max_logprob_gap": options.max_gap},
        "trainer": {"tokens_per_microbatch": options.microbatch},
        "checkpoint": {"every": 10**6},
    }


def matrix_rate(model: Any, rows: int, seconds: float = 0.5) -> float:
    """FLOP/s of the model's own largest projection, times so many rows and nothing else: what its passes could reach in
    this process."""
    shape = model.config
    device, dtype = next(model.parameters()).device, next(model.parameters()).dtype
    left = torch.randn(rows, shape.hidden_size, device=device, dtype=dtype)
    right = torch.randn(shape.hidden_size, shape.intermediate_size, device=device, dtype=dtype)
    wait = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    for _ in range(3):
        torch.mm(left, right)
    wait()
    count, start = 0, time.perf_counter()
    while (took := time.perf_counter() - start) < seconds:
        for _ in range(4):
            torch.mm(left, right)
        wait()
        count += 4
    return 2.0 * rows * shape.hidden_size * shape.intermediate_size * count / took


def describe_passes(flops: float, rate: float, passes: float, step: float) -> str:
    """Of one step: what its passes reach of the rate of a bare product, and what is left of its seconds."""
    return (
        f"forward and backward: {passes:.3f} s at {flops / passes / rate:.0%} of the matrix rate measured here "
        f"({rate / 1e12:.3g} TFLOP/s); everything else {step - passes:.3f} s"
    )


def measure_temper(folder: Path, options: argparse.Namespace, dtype: str) -> dict[str, float]:
    (config,) = resolve(recipe_of(folder, options, dtype), [], where="benchmark")
    heard: list[str] = []
    stage = build_stage(config, 0, folder, listeners=Listeners(doing=lambda what, how_far: heard.append(how_far)))
    steps, flops = Steps(), list[float]()
    train = stage.trainer.step

    def counted(batch: Batch) -> Any:
        result = train(batch)
        flops.append(result.model_flops)
        return result

    stage.trainer.step = counted  # type: ignore[method-assign]
    plan = make_plan(stage, first_step=1, recorders=(steps,), checkpoint=lambda step: None)
    asyncio.run(_run(plan, stage.close))
    warm = steps.reports[1:] or steps.reports
    print(describe_start(steps.reports))
    print("warm-up:", ", ".join(done for done in heard if is_last_of_its_kind(done)) or "nothing to compile on a CPU")
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        outside = (total - free - torch.cuda.memory_reserved()) / 2**30
        print(f"memory of the GPU outside of tensors (CUDA, libraries, recordings): {outside:.2f} GiB")
    median: Callable[[Callable[[StepReport], float]], float] = lambda f: statistics.median(map(f, warm))  # noqa: E731
    phases = {name: median(lambda r, name=name: r.seconds.get(name, 0.0)) for name in warm[-1].seconds}
    split = sorted(phases.items(), key=lambda item: -item[1])
    with_signal = 1 - median(lambda r: r.metrics["data/degenerate"])
    print(
        f"groups with a signal: {with_signal:.0%}; seconds of a step:",
        ", ".join(f"{name} {value:.3f}" for name, value in split if value > 0.002),
    )
    passes = median(lambda r: sum(r.seconds.get(name, 0.0) for name in PASSES))
    rate = matrix_rate(stage.model, min(options.microbatch, 16384 if torch.cuda.is_available() else 1024))
    whole = median(lambda r: sum(r.seconds.values()))
    print(describe_passes(statistics.median(flops[1:] or flops), rate, passes, whole))
    return {
        "step seconds": median(lambda r: sum(r.seconds.values())),
        "generate tokens/s": median(lambda r: r.system["sys/rollout_tok_s"]),
        "train tokens/s": median(lambda r: r.system["sys/train_tok_s"]),
        "completion tokens": median(lambda r: r.system["sys/rollout_tokens"]),
        "peak memory GiB": warm[-1].system["sys/peak_memory_bytes"] / 2**30,
        "logprob gap": median(lambda r: r.metrics["mismatch/logp_abs_mean"]),
    }


def is_last_of_its_kind(done: str) -> bool:
    """Of "recording 14 of 22 sizes" the last; anything else that was done."""
    words = done.split()
    return bool(words) and (words[0] != "recording" or words[1] == words[3])


BEFORE = ("warm_up", "parity", "evaluate")
"""Phases that are over when the first step begins."""


def describe_start(reports: Sequence[StepReport]) -> str:
    """The first step beside the median of later ones, what came before it, and the phases that were slower in it."""
    first, later = dict(reports[0].seconds), [report.seconds for report in reports[1:] or reports]
    before = {name: first.pop(name) for name in BEFORE if name in first}
    usual = statistics.median(sum(seconds.values()) for seconds in later)
    total = sum(first.values())
    slower = {
        name: (seconds, median)
        for name, seconds in first.items()
        if seconds - (median := statistics.median(other.get(name, 0.0) for other in later)) > 0.02 * usual
    }
    lines = [
        f"first step {total:.2f} s, later {usual:.2f} s ({total / usual:.2f} times)",
        "before it: " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in before.items()),
        "slower in the first: "
        + (
            ", ".join(f"{name} {seconds:.3f} s ({median:.3f} later)" for name, (seconds, median) in slower.items())
            or "-"
        ),
    ]
    return "\n".join(lines)


async def _run(plan: loop.Plan, close: Callable[[], Any]) -> None:
    await loop.run(plan)
    await close()


def measure_trl(folder: Path, options: argparse.Namespace, dtype: str) -> dict[str, float]:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    completions, on_cpu = options.prompts * options.group, not torch.cuda.is_available()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left", trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), trust_remote_code=False)
    model.generation_config.eos_token_id = None
    per_device = min(options.trl_batch, completions)
    arguments = GRPOConfig(
        output_dir=str(folder / "trl"), per_device_train_batch_size=per_device,
        gradient_accumulation_steps=completions // per_device, num_generations=options.group,
        max_completion_length=options.new, logging_steps=1,
        max_steps=options.trl_steps or options.steps, bf16=not on_cpu, use_cpu=on_cpu,
        report_to=[], save_strategy="no", beta=0.0, learning_rate=1e-6, temperature=1.0, gradient_checkpointing=False,
        disable_tqdm=True,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": prompts(512)}),
        reward_funcs=lambda completions, **_: [len(text) / len(ALPHABET) for text in completions],
        args=arguments,
    )
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    seconds = [row["step_time"] for row in trainer.state.log_history if "step_time" in row]
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else float("nan")
    return {"step seconds": statistics.median(seconds[1:]), "peak memory GiB": peak}


def measure_generate(folder: Path, options: argparse.Namespace, dtype: str) -> dict[str, float]:
    """Hugging Face generate alone, which is what TRL samples with when it has no vLLM."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), trust_remote_code=False)
        .to(device)
        .eval()
    )
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left", trust_remote_code=False)
    texts = [text for text in prompts(options.prompts) for _ in range(options.group)]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False).to(device)
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    with torch.inference_mode():
        model.generate(**inputs, max_new_tokens=4, min_new_tokens=4, **sampling)
        start = time.perf_counter()
        model.generate(**inputs, max_new_tokens=options.new, min_new_tokens=options.new, **sampling)
        if device == "cuda":
            torch.cuda.synchronize()
    return {"generate tokens/s": len(texts) * options.new / (time.perf_counter() - start)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=shape_of, default="tiny", help=SHAPE_HELP)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--steps", type=int, default=4, help="the first is warm-up; the median of the others counts")
    parser.add_argument("--microbatch", type=int, default=16384, help="Temper: packed tokens per forward pass")
    parser.add_argument("--states", choices=["float32", "bfloat16", "8bit"], default="float32", help="Temper: moments")
    parser.add_argument("--offload", action="store_true", help="Temper: moments and masters in the host's memory")
    parser.add_argument("--max-gap", type=float, help="Temper: engine.max_logprob_gap, for shapes above its budget")
    parser.add_argument(
        "--checkpointing", nargs="?", const=True, default=False, choices=["offload"],
        help="Temper: recompute activations; offload: from inputs that wait in the host's memory",
    )  # fmt: skip
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="Temper: train adapters of this rank")
    parser.add_argument("--base", choices=["full", "4bit"], default="full", help="Temper: the model under adapters")
    parser.add_argument("--engine", choices=["local", "vllm"], default="local", help="Temper: who draws")
    parser.add_argument("--replay", action="store_true", help="Temper, experts: model.replay_routes")
    parser.add_argument("--trl-batch", type=int, default=64, help="TRL: sequences per forward pass")
    parser.add_argument("--trl-steps", type=int, help="TRL: as many as --steps unless given; its steps vary little")
    parser.add_argument("--only", choices=["temper", "trl"])
    options = parser.parse_args()
    if options.base != "full" and not options.lora:
        parser.error("--base is about the model under adapters: give --lora too")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    columns: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder, options.shape, dtype, context=options.new + PROMPT_ROOM)
        if options.only != "trl":
            columns["temper"] = measure_temper(folder, options, dtype)
        if options.only != "temper":
            columns["trl"] = measure_trl(folder, options, dtype)
            columns["trl"] |= measure_generate(folder, options, dtype)
    where = torch.cuda.get_device_name(0) if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    title = f"{options.shape}, {dtype}, {options.prompts} x {options.group} x {options.new} tokens, {where}"
    table = Table("", *columns, *(["ratio"] if len(columns) == 2 else []), title=title)
    for row in dict.fromkeys(name for column in columns.values() for name in column):
        values = [column.get(row, float("nan")) for column in columns.values()]
        ratio = [f"{values[0] / values[1]:.2f}"] if len(columns) == 2 else []
        table.add_row(row, *(f"{value:,.4g}" for value in values), *ratio)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
