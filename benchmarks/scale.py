"""Scaling on paper: seconds a step of large models on 8 to 512 GPUs, by the planner's sums and the simulator's clock.

    python benchmarks/scale.py --out /tmp/scale                 # all tables of docs/scale.md: two hours on one core
    python benchmarks/scale.py --out /tmp/scale --shape qwen2.5-7b --mean 2048 --gpus 8 64 --staleness 0 1
    python benchmarks/scale.py --out /tmp/scale --again         # shows what is there, simulates nothing
    python benchmarks/scale.py --experts                        # on a GPU: what experts' products reach of its rate
Models are descriptions alone (config.json and a tokenizer): nothing here has weights, and nothing is drawn or trained.
What was simulated is kept in --out, line by line, and not simulated again. The recipes stand there for
`temper plan` and `temper simulate`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from shapes import SHAPES, configuration

from temper.commands.simulate import SimulationRequest, simulate_recipe
from temper.models.tiny import character_tokenizer

ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,?"
GPU_OF = {"qwen2.5-7b": "h100-80", "qwen3-30b-a3b": "h200"}
PROMPT_TOKENS, PROMPTS, LONGEST = 200, 2048, 4
"""Characters of a prompt, each a token; rows of the data; sampling.max_new_tokens over the mean answer."""
SPREAD = 0.6
"""Of lognormal lengths."""
RECIPE = """
steps = 100
model = {{ path = "{model}", dtype = "bfloat16" }}
sampling = {{ max_new_tokens = {longest} }}
rollout = {{ groups_per_step = {groups}, group_size = {group_size}, episode_seconds = 1e6, step_seconds = 1e6 }}
engine = {{ max_running = 1024 }}

[[train]]
path = "{rows}"

[[reward]]
kind = "edit"
"""


@dataclass(frozen=True)
class Case:
    shape: str
    mean: int
    gpus: int
    staleness: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("/tmp/scale"), help="folder for models, recipes and results")
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(GPU_OF))
    parser.add_argument("--mean", type=int, nargs="+", default=[2048, 8192], help="tokens of an answer in the mean")
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 16, 64, 128, 512])
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 4])
    parser.add_argument("--gpu", default="", help="default: h100-80 for 7B, h200 for others")
    parser.add_argument("--groups", type=int, default=512)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument(
        "--steps", type=int, default=0, help="that are counted, after the first ones; 0: 2, or 10 if S > 1"
    )
    parser.add_argument("--again", action="store_true", help="show what is there")
    parser.add_argument("--experts", action="store_true", help="measure products of experts on this machine's GPU")
    options = parser.parse_args()
    if options.experts:
        measure_experts()
        return
    options.out.mkdir(parents=True, exist_ok=True)
    for shape in options.shape:
        for mean in options.mean:
            cases = [Case(shape, mean, gpus, bound) for gpus in options.gpus for bound in options.staleness]
            print(f"\n{shape}, {options.gpu or GPU_OF.get(shape, 'h200')}, answers of {mean} tokens in the mean\n")
            print_table([(case, found) for case in cases if (found := result_of(case, options)) is not None])


def write_recipe(folder: Path, case: Case, options: argparse.Namespace) -> Path:
    """A model's description, rows and a recipe."""
    model, longest = folder / case.shape, LONGEST * case.mean
    tokenizer = character_tokenizer(ALPHABET)
    tokenizer.save_pretrained(model)
    ids = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None, "pad_token_id": tokenizer.pad_token_id}
    configuration(case.shape, context=40960, **ids).save_pretrained(model)
    rows = folder / "prompts.jsonl"
    prompts = [f"What is the sum of {i} and {i + 3}? ".ljust(PROMPT_TOKENS, ".") for i in range(PROMPTS)]
    rows.write_text("".join(json.dumps({"prompt": prompt, "answer": ALPHABET}) + "\n" for prompt in prompts))
    recipe = folder / f"{case.shape}-{case.mean}.toml"
    recipe.write_text(
        RECIPE.format(model=model, longest=longest, rows=rows, groups=options.groups, group_size=options.group_size)
    )
    return recipe


def result_of(case: Case, options: argparse.Namespace) -> dict[str, Any] | None:
    """Simulated, or as it was kept; None: it is not there and shall not be simulated."""
    gpu = options.gpu or GPU_OF.get(case.shape, "h200")
    key = {**asdict(case), "gpu": gpu, "groups": options.groups, "group_size": options.group_size}
    kept = options.out / f"{case.shape}-{case.mean}.jsonl"
    for line in kept.read_text().splitlines() if kept.exists() else ():
        if (found := json.loads(line))["case"] == key:
            return found
    if options.again:
        return None
    found = {"case": key, **simulate_case(write_recipe(options.out, case, options), case, gpu, options.steps)}
    with kept.open("a") as file:
        file.write(json.dumps(found) + "\n")
    return found


def simulate_case(recipe: Path, case: Case, gpu: str, steps: int) -> dict[str, Any]:
    asked = SimulationRequest(
        gpu=gpu, given={}, gpus=[case.gpus], staleness=[case.staleness], lengths=f"lognormal:{case.mean}:{SPREAD}",
        steps=steps or (2 if case.staleness < 2 else 10),  # a run that is far ahead is long in settling
    )  # fmt: skip
    result = simulate_recipe(recipe, asked)
    (run,), (plan,) = result.runs, result.plans
    assert plan is not None
    return {
        "run": asdict(run),
        "layout": str(plan.layout),
        "choice": asdict(plan.work.choice),
        "seconds": dict(plan.time.seconds),
        "planned": plan.time.total,
        "slowest": plan.time.slowest,
        "reason": plan.time.reasons[plan.time.slowest],
        "needed_gib": {kind: round(memory.needed_bytes / 2**30, 1) for kind, memory in plan.memories.items()},
    }


def print_table(found: Sequence[tuple[Case, dict[str, Any]]]) -> None:
    print(
        "| GPUs | S | train + draw | s/step | tokens/s | draw idle | train idle | exchange s | GiB a GPU | dominates |"
    )
    print("|---:|---:|---|---:|---:|---:|---:|---:|---:|---|")
    for case, result in found:
        run, fullest = result["run"], max(result["needed_gib"].values())
        print(
            f"| {case.gpus} | {case.staleness} | {result['layout']} | {run['seconds_per_step']:.1f} "
            f"| {run['tokens_per_second']:,.0f} | {run['sampler_idle']:.0%} | {run['trainer_idle']:.0%} "
            f"| {result['seconds'].get('exchange', 0.0):.2f} | {fullest:.0f} | {result['slowest']} |",
            flush=True,
        )


def measure_experts() -> None:
    """Forward and backward through four layers of Qwen3-30B-A3B's shape by transformers' grouped products."""
    from transformers import AutoModel

    assert torch.cuda.is_available(), "this needs a GPU"
    _, numbers = SHAPES["qwen3-30b-a3b"]
    layers, width, heads = 4, numbers["hidden_size"], numbers["num_attention_heads"] * numbers["head_dim"]
    keys = numbers["num_key_value_heads"] * numbers["head_dim"]
    expert = 3 * width * numbers["moe_intermediate_size"] * numbers["num_experts_per_tok"]
    config = configuration("qwen3-30b-a3b", num_hidden_layers=layers)
    config._attn_implementation, config._experts_implementation = "sdpa", "grouped_mm"
    with torch.device("cuda"):
        model = AutoModel.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)
    for rows, length in ((8, 2048), (16, 2048), (2, 8192), (4, 8192)):
        ids = torch.randint(0, 1000, (rows, length), device="cuda")
        for _ in range(3):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            model(ids).last_hidden_state.float().mean().backward()
            torch.cuda.synchronize()
            seconds = time.perf_counter() - begin
            model.zero_grad(set_to_none=True)
        active = layers * (2 * width * (heads + keys) + expert)
        flops = 6 * active * rows * length + 12 * heads * layers * rows * length * length / 2
        print(f"{rows} x {length}: {seconds:.3f} s, {flops / seconds / 989e12:.3f} of an H200's rate", flush=True)


if __name__ == "__main__":
    main()
