"""What the host does in a step beside models: rows, credit, metrics, packing, traces, and writing the run store.

    python benchmarks/host.py                                      # 64 completions of 2,048 tokens
    python benchmarks/host.py --completions 1024 --tokens 8192     # a large step
    python benchmarks/host.py --completions 1024 --tokens 8192 --keep 50
Groups are made up as the local engine delivers them, in arrays; --lists delivers lists of Python numbers, as an engine
behind HTTP does. Seconds are those that a core computes: a clock would count other programs too. The run store is
written by a thread of its own, which training does not wait for.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from temper.batching import CreditRules, assign_credit, pack, rows_of_groups
from temper.batching.measure import measure_groups
from temper.objectives import PRESETS
from temper.runs.store.run_store import open_run
from temper.trainer.traces import keys_of, traces_of
from temper.types import (
    Completion,
    Finish,
    Group,
    Message,
    SamplingParams,
    Score,
    Status,
    StepReport,
    Task,
    Trajectory,
    Turn,
)

VOCABULARY = 150_000
GROUP, PROMPT = 8, 256
TOKENS_PER_MICROBATCH = 65_536


def make_completion(draw: np.random.Generator, options: argparse.Namespace, prompt: tuple[int, ...]) -> Completion:
    """Common tokens are common, so that 4-grams repeat as in text; log-probabilities are any."""
    size = options.tokens
    ids = (draw.zipf(1.3, size) % VOCABULARY).astype(np.int32)
    columns: dict[str, Any] = {
        "token_ids": ids,
        "logprobs": -draw.exponential(0.4, size).astype(np.float32),
        "versions": np.full(size, 3, dtype=np.int32),
    }
    if options.keep:
        first = draw.integers(1, VOCABULARY - 1, size, dtype=np.int32)
        columns["keep_ids"] = (ids[:, None] + np.arange(options.keep, dtype=np.int32) * first[:, None]) % VOCABULARY
        columns["keep_ids"][:, 1:][columns["keep_ids"][:, 1:] == ids[:, None]] += 1
    if options.top:
        columns["top_ids"] = (ids[:, None] + np.arange(options.top, dtype=np.int32)) % VOCABULARY
        columns["top_logprobs"] = -draw.random((size, options.top), dtype=np.float32)
    if options.lists:
        columns = {name: column.tolist() for name, column in columns.items()}
    params = SamplingParams(max_new_tokens=size, top_k=options.keep, top_logprobs=options.top)
    return Completion(prompt_ids=prompt, finish=Finish.STOP, params=params, **columns)


def make_groups(options: argparse.Namespace) -> list[Group]:
    draw, groups = np.random.default_rng(0), []
    for number in range(options.completions // GROUP):
        prompt = tuple(draw.integers(0, VOCABULARY, PROMPT).tolist())
        task = Task(id=f"made:{number}", messages=(Message(role="user", content="?" * 4 * PROMPT),))
        members = []
        for index in range(GROUP):
            said = Message(role="assistant", content="word" * options.tokens)
            turn = Turn(completion=make_completion(draw, options, prompt), message=said)
            members.append(
                Trajectory(
                    task_id=task.id,
                    group_id=f"{task.id}#{number}",
                    index=index,
                    turns=(turn,),
                    status=Status.COMPLETED,
                    score=Score.of(float(index % 2)),
                )
            )
        groups.append(Group(id=f"{task.id}#{number}", draw=number, task=task, trajectories=tuple(members)))
    return groups


def run(options: argparse.Namespace) -> dict[str, float]:
    """Seconds by part, and what else is to be told."""
    seconds: dict[str, float] = {}

    def timed(part: str, call: Callable[[], Any]) -> Any:
        start = time.thread_time()
        result = call()
        seconds[part] = seconds.get(part, 0.0) + time.thread_time() - start
        return result

    groups = timed("delivery", lambda: make_groups(options)) if options.lists else make_groups(options)
    rules = CreditRules(objective=PRESETS["grpo"], max_new_tokens=options.tokens)
    rows = timed("rows", lambda: rows_of_groups(groups))
    batch = timed("credit", lambda: assign_credit(rows, groups, rules, version=3))
    timed("metrics", lambda: measure_groups(groups, (), 3))
    seconds["credit"] -= seconds["metrics"]  # it holds them
    (update,) = batch.updates
    packed = timed("packing", lambda: pack(update, TOKENS_PER_MICROBATCH))
    keys, traces = keys_of(update), {}
    for microbatch in packed:
        seen = torch.rand(2, int(microbatch.loss_mask.sum()))
        traces |= timed("traces", lambda m=microbatch, s=seen: traces_of(m, s, keys))
    report = StepReport(
        stage=0, step=1, version=4, loss=0.0, metrics=batch.metrics, seconds={}, system={},
        groups_trained=len(groups), groups_dropped=0, max_staleness=0, traces=traces,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        store = open_run(Path(folder) / "run", config="", resume=False)
        timed("handing over", lambda: store.append(report, batch))
        start = time.process_time()
        store.flush()
        behind = time.process_time() - start
        store.close()
        size = sum(path.stat().st_size for path in Path(folder).rglob("run.db*"))
    return {**seconds, "behind": behind, "store_bytes": float(size)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--completions", type=int, default=64, help=f"a multiple of {GROUP}")
    parser.add_argument("--tokens", type=int, default=2048, help="of each completion")
    parser.add_argument("--keep", type=int, default=0, help="tokens of each keep-set (top_k, top_p, min_p); 0: none")
    parser.add_argument("--top", type=int, default=0, help="most likely tokens of each position; 0: none")
    parser.add_argument("--lists", action="store_true", help="deliver lists of Python numbers")
    options = parser.parse_args()
    torch.set_num_threads(1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = run(options)
    behind, size = found.pop("behind"), found.pop("store_bytes")
    made = found.pop("delivery", None)
    print(f"{options.completions} completions of {options.tokens} tokens, keep {options.keep}, top {options.top}")
    for part, seconds in found.items():
        print(f"  {part:24}{seconds:8.2f} s")
    print(f"  {'together':24}{sum(found.values()):8.2f} s")
    if made is not None:
        print(f"  {'made and delivered':24}{made:8.2f} s")
    print(f"  {'written behind the step':24}{behind:8.2f} s, {size / 1e6:.1f} MB")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"  {'peak memory':24}{peak / 1e6:8.2f} GB, of which {before / 1e6:.2f} GB before the step")


if __name__ == "__main__":
    main()
