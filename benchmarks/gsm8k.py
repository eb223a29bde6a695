"""How good a model is after so many seconds of training: GSM8K, GRPO, held-out greedy accuracy, the time split.

    python benchmarks/gsm8k.py --model models/qwen2.5-coder-0.5b --data data/gsm8k --seeds 0 1 2 --out curve.svg
The clock runs while it trains (rollouts, verifiers, updates, publication, canary), not while it loads, opens the gate
before step 1 or evaluates; compiling kernels counts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from rich.console import Console
from rich.table import Table

from temper import loop
from temper.build import build_stage, make_plan
from temper.config import resolve
from temper.runs.report.plot import Line, Panel, chart
from temper.trainer.weights import Weights
from temper.types import Batch, EvaluationResult, Publication, StepReport

TEMPLATE = "{prompt}\nReason step by step, and put your final answer within \\boxed{}."

TOLD = {
    "reward": "reward/mean", "tokens": "gen/len_mean", "cut": "gen/truncation_rate", "no signal": "data/degenerate",
    "entropy": "policy/entropy", "gradient": "policy/grad_norm", "gap": "mismatch/logp_abs_mean",
}  # fmt: skip
NOT_TRAINING = ("evaluate", "parity")


class TimeIsUp(Exception):
    """Ends the run between two steps."""


class Clock:
    """A recorder that ends the run, and keeps what happened when."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._told = 0.0
        self.seconds = 0.0
        self.steps = 0
        self.phases: Counter[str] = Counter()
        self.rewards: list[tuple[float, float]] = []
        self.scores: list[tuple[float, float, float, float]] = []
        self.averaged: EvaluationResult | None = None

    def append(self, report: StepReport, batch: Batch) -> None:
        trained = {phase: seconds for phase, seconds in report.seconds.items() if phase not in NOT_TRAINING}
        self.seconds += sum(trained.values())
        self.steps += 1
        self.phases.update(trained)
        self.rewards.append((self.seconds, report.metrics["reward/mean"]))
        if self.steps % 10 == 0:
            told = [f"{label} {report.metrics[name]:.3g}" for label, name in TOLD.items() if name in report.metrics]
            pace = (self.seconds - self._told) / 10
            print(f"step {self.steps}, {self.seconds:.0f} s, {pace:.2f} s a step, {', '.join(told)}", flush=True)
            self._told = self.seconds
        if self.seconds >= self._limit:
            raise TimeIsUp

    def evaluation(self, result: EvaluationResult) -> None:
        if result.name == "greedy":
            self.scores.append((self.seconds, result.score, result.low, result.high))
            print(
                f"step {self.steps}, {self.seconds:.0f} s, held out {100 * result.score:.1f}%, {self.split}", flush=True
            )

    @property
    def split(self) -> str:
        """Where the time went."""
        return ", ".join(f"{name} {100 * s / self.seconds:.0f}%" for name, s in self.phases.most_common(6))


class MovingAverage:
    """A recorder that keeps the mean of the weights of the last steps, which have less noise than those of the last."""

    def __init__(self, held: torch.nn.Module, decay: float) -> None:
        """held: the weights that the sampler draws with."""
        self._held, self._decay = Weights(held), decay
        self._version = 0
        self._mean: dict[str, torch.Tensor] = {}

    def append(self, report: StepReport, batch: Batch) -> None:
        self._version = report.version
        tensors = {name: tensor.float() for name, tensor in self._held.publication(0).tensors.items()}
        if self._mean:
            torch._foreach_lerp_(list(self._mean.values()), list(tensors.values()), 1 - self._decay)
        else:
            self._mean = {name: tensor.clone() for name, tensor in tensors.items()}

    def evaluation(self, result: EvaluationResult) -> None:
        """Not its business."""

    def publication(self) -> Publication:
        own = self._held.publication(0).tensors
        tensors = {name: mean.to(own[name].dtype) for name, mean in self._mean.items()}
        return Publication(version=self._version, tensors=tensors)


def training_file(path: Path, most_calculations: int, folder: Path) -> Path:
    """GSM8K's training problems, with whole published solutions as answers: rewards read the last number or the way.

    most_calculations: leaves out problems whose solution calculates more often; GSM8K marks them all, <<48/2=24>>. A
    small model fails most of those in all of its attempts.
    """
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    kept = [row for row in rows if not most_calculations or row["answer"].count("<<") <= most_calculations]
    boxed = [{**row, "answer": re.sub(r"#### (.+)", r"\\boxed{\1}", row["answer"])} for row in kept]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in boxed))
    return folder / "train.jsonl"


def recipe_of(options: argparse.Namespace, seed: int, train_file: Path) -> dict[str, Any]:
    right = {"kind": "math", "options": {"require_boxed": True}}
    on_the_way = {"kind": "gsm8k_steps:steps", "weight": options.step_credit}
    heldout = {"path": f"{options.data}/test.jsonl", "size": options.heldout, "answer_pattern": "#### (.+)"}
    return {
        "name": "gsm8k",
        "seed": seed,
        "steps": 100_000,
        "model": {"path": options.model},
        "train": [{"path": str(train_file), "prompt_field": "question"}],
        "heldout": {"prompt_field": "question", **heldout},
        "prompt": {"template": TEMPLATE},
        "reward": [right, on_the_way] if options.step_credit else [right],
        "sampling": {"max_new_tokens": options.new},
        "rollout": {"groups_per_step": options.prompts, "group_size": options.group},
        "engine": {"max_running": max(options.prompts * options.group, options.heldout), "tokens_per_step": 16384},
        "trainer": {"tokens_per_microbatch": options.microbatch},
        "objective": {"preset": options.preset},
        "optim": {"learning_rate": options.learning_rate, "warmup_steps": 5},
        "evaluation": {"every": options.every, "reward": [right]},
        "checkpoint": {"every": 10**6},
    }


async def train(options: argparse.Namespace, seed: int, train_file: Path) -> Clock:
    (config,) = resolve(recipe_of(options, seed, train_file), [*options.set], where="benchmark")
    stage = build_stage(config, 0, Path(options.model))
    assert stage.sampler_model is not None, "the local engine holds the weights it draws with"
    clock, average = Clock(options.seconds), MovingAverage(stage.sampler_model, options.average)
    recorders = (average, clock) if options.average else (clock,)
    plan = make_plan(stage, first_step=1, recorders=recorders, checkpoint=lambda step: None)
    try:
        try:
            await loop.run(plan)
        except TimeIsUp:
            for result in await stage.evaluate(clock.steps):
                clock.evaluation(result)
        if options.average:
            await stage.sampler.load(average.publication())
            clock.averaged = next(result for result in await stage.evaluate(clock.steps) if result.name == "greedy")
    finally:
        await stage.close()
    return clock


def show(options: argparse.Namespace, clocks: dict[int, Clock]) -> None:
    table = Table("seed", "steps", "seconds", "start", "end, 95% interval", "averaged weights", "where the time went")
    for seed, clock in clocks.items():
        first, last = clock.scores[0], clock.scores[-1]
        end = f"{100 * last[1]:.1f}% [{100 * last[2]:.1f}, {100 * last[3]:.1f}]"
        averaged = "-" if clock.averaged is None else f"{100 * clock.averaged.score:.1f}%"
        start = f"{100 * first[1]:.1f}%"
        table.add_row(str(seed), str(clock.steps), f"{clock.seconds:.0f}", start, end, averaged, clock.split)
    Console(width=150).print(table)
    if options.out:
        curves = {f"seed {seed}": clock for seed, clock in clocks.items()}
        panels = [
            Panel(
                title="held out, greedy, 95% interval",
                lines=[
                    Line(label=label, xs=xs, ys=ys, low=low, high=high)
                    for label, clock in curves.items()
                    for xs, ys, low, high in [tuple(zip(*clock.scores, strict=True))]
                ],
                x_label="seconds of training",
            ),
            Panel(
                title="reward of a step",
                lines=[
                    Line(label=label, xs=[x for x, _ in clock.rewards], ys=[y for _, y in clock.rewards])
                    for label, clock in curves.items()
                ],
                x_label="seconds of training",
            ),
        ]
        Path(options.out).write_text(chart(panels))
        numbers = {seed: {"scores": c.scores, "rewards": c.rewards, "phases": c.phases} for seed, c in clocks.items()}
        Path(options.out).with_suffix(".json").write_text(json.dumps(numbers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="checkpoint directory")
    parser.add_argument("--data", required=True, help="folder with GSM8K's train.jsonl and test.jsonl")
    parser.add_argument("--seconds", type=float, default=338.0, help="of training")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--new", type=int, default=320)
    parser.add_argument("--heldout", type=int, default=512)
    parser.add_argument("--every", type=int, default=25, help="steps between evaluations")
    parser.add_argument("--calculations", type=int, default=0, help="at most, in a training problem; 0: all problems")
    parser.add_argument("--step-credit", type=float, default=0.0, help="of wrong answers (gsm8k_steps.py), e.g. 0.3")
    parser.add_argument("--preset", default="grpo")
    parser.add_argument("--learning-rate", type=float, default=3e-6)
    parser.add_argument("--microbatch", type=int, default=32768)
    parser.add_argument("--set", action="append", default=[], help="change a key of the recipe")
    parser.add_argument(
        "--average", type=float, default=0.0, help="score averaged weights too; decay a step, e.g. 0.97"
    )
    parser.add_argument("--out", help="SVG of the curves, and their numbers beside it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        train_file = training_file(Path(options.data) / "train.jsonl", options.calculations, Path(folder))
        show(options, {seed: asyncio.run(train(options, seed, train_file)) for seed in options.seeds})


if __name__ == "__main__":
    main()
