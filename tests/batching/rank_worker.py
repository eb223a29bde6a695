"""The ranks of test_ranks.py: each trains a tiny model on its share and writes gradients and metrics as JSON.

Usage: rank_worker.py FOLDER CASE ... where a case is WORLD:TOKENS_PER_MICROBATCH:MODE and a mode one of
sum (as it should be), mean (bug: gradients averaged over ranks), local (bug: each rank measures its own share).
Ranks are forks of one process, before autograd or gloo has run in it: a start takes longer than all a rank does.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import multiprocessing
import random
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from temper.batching import CreditRules, make_batch, pack, shard, with_column
from temper.objectives import (
    POLICY_GRADIENTS,
    MetricSums,
    Objective,
    Scored,
    Tokens,
    join,
    measure_batch,
    measures_batch,
    objective_loss,
)
from temper.objectives.policy.corrections import token_tis
from temper.objectives.policy.regularizers import entropy_bonus, kl, kl_cov
from temper.objectives.policy.selections import clip_cov, top_entropy
from temper.types import Completion, Finish, Group, Message, Sample, Score, Status, Task, Trajectory, Turn

VOCABULARY, TOP = 24, 20
SHIFTS = {"policy": 0.05, "reference": -0.2, "teacher": 0.1, "critic": 0.3}
ACTIVE: dict[str, Any] = {
    "top_entropy": top_entropy(share=0.5),
    "clip_cov": clip_cov(share=0.2, low=0.0),
    "kl_cov": kl_cov(share=0.2),
}
"""Settings under which rules made for thousands of tokens do something to eighty."""
COLUMNS = {"proximal_logprobs": "policy", "reference_logprobs": "reference", "teacher_logprobs": "teacher"}


class TinyModel(nn.Module):
    """Scores each token from its predecessor and its position. No attention, so nothing to leak between rows."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 4)
        self.positions = nn.Embedding(64, 4)
        self.head = nn.Linear(4, VOCABULARY)

    def forward(self, microbatch) -> Scored:
        hidden = torch.tanh(self.tokens(microbatch.token_ids) + self.positions(microbatch.positions))
        places = microbatch.loss_mask.nonzero()[:, 0]
        logprobs = torch.log_softmax(self.head(hidden[places - 1]), -1)
        drawn = microbatch.token_ids[places]
        return Scored(
            logprobs=logprobs.gather(1, drawn[:, None]).squeeze(1),
            entropy=-(logprobs.exp() * logprobs).sum(-1),
            top_logprobs=logprobs.gather(1, microbatch.top_ids[places]),
            router_shift=0.01 * drawn.double(),
        )


@functools.cache
def make_groups() -> list[Group]:
    """Everything that any objective may ask of a rollout: greedy attempts, step values, parts, likely tokens."""
    rng = random.Random(0)
    groups = []
    for draw in range(4):
        members = [make_trajectory(rng, f"g{draw}", index) for index in range(4)]
        groups.append(
            Group(
                id=f"g{draw}",
                draw=draw,
                task=Task(id="t", messages=(Message(role="user", content=""),)),
                trajectories=tuple(members[:3]),
                greedy=members[3],
            )
        )
    return groups


def make_trajectory(rng: random.Random, group_id: str, index: int) -> Trajectory:
    prompt = [rng.randrange(VOCABULARY) for _ in range(3)]
    turns = []
    for _ in range(rng.randint(1, 2)):
        completion = make_completion(rng, prompt)
        turns.append(Turn(completion=completion, message=Message(role="assistant", content="")))
        kept = prompt if rng.random() < 0.5 else prompt[1:]  # half of the second turns fork a row
        prompt = [*kept, *completion.token_ids, rng.randrange(VOCABULARY)]
    total = sum(len(turn.completion.token_ids) for turn in turns)
    starts = (0,) if total == 1 else (0, total // 2)
    return Trajectory(
        task_id="t",
        group_id=group_id,
        index=index,
        turns=tuple(turns),
        status=Status.COMPLETED,
        score=Score.of(float(index == 0 or rng.random() < 0.3)),
        weighted_parts={"answer": Score.of(rng.random()), "format": Score.of(rng.random())},
        step_starts=starts,
        step_values=tuple(rng.random() for _ in starts),
    )


def make_completion(rng: random.Random, prompt: list[int]) -> Completion:
    drawn = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 9))]
    likely = [torch.tensor([rng.random() for _ in range(VOCABULARY)]).log_softmax(0).topk(TOP) for _ in drawn]
    return Completion(
        prompt_ids=tuple(prompt),
        token_ids=drawn,
        logprobs=[-3 * rng.random() for _ in drawn],
        versions=[rng.randrange(3) for _ in drawn],
        finish=Finish.STOP,
        top_ids=[entry.indices.tolist() for entry in likely],
        top_logprobs=[entry.values.tolist() for entry in likely],
    )


def noisy_score(rows, scorer) -> list[list[float]]:
    shift = SHIFTS[scorer]
    return [[(b + shift) * m for b, m in zip(row.behavior_logprobs, row.loss_mask, strict=True)] for row in rows]


@functools.cache
def objective_of(name: str) -> Objective:
    """The preset with a reference, an entropy bonus and, where that is allowed, a sampler correction."""
    preset = POLICY_GRADIENTS[name]
    own = {factor.name for factor in (*preset.regularizers, *preset.corrections)}
    terms = [term for term in (kl(0.3), entropy_bonus(0.2)) if term.name not in own]
    rules = [] if preset.proximal.name == "behavior" or "token_tis" in own else [token_tis()]
    return dataclasses.replace(
        preset,
        regularizers=tuple(ACTIVE.get(term.name, term) for term in (*preset.regularizers, *terms)),
        corrections=tuple(ACTIVE.get(rule.name, rule) for rule in (*preset.corrections, *rules)),
    )


@functools.cache
def rows_for(name: str) -> list[Sample]:
    rules = CreditRules(objective=objective_of(name), max_new_tokens=18)
    batch = make_batch(make_groups(), rules, score=noisy_score, version=3)
    rows: list[Sample] = list(batch.updates[0])
    for column, scorer in COLUMNS.items():
        rows = with_column(rows, column, noisy_score(rows, scorer))
    return rows


def gathered(mine: object, world: int) -> list:
    if world == 1:
        return [mine]
    everyone: list = [None] * world
    dist.all_gather_object(everyone, mine)
    return everyone


def measures(objective: Objective, parts: dict[int, Tokens], world: int, mode: str) -> dict[int, dict[str, Tensor]]:
    """By number of microbatch, what the objective takes from the whole batch: from the parts of all ranks."""
    everyone = [parts] if mode == "local" else gathered({number: part.cpu() for number, part in parts.items()}, world)
    numbered = {number: part for share in everyone for number, part in share.items()}
    if not numbered:
        return {}
    columns = measure_batch(objective, join([numbered[number] for number in sorted(numbered)]))
    sizes = [len(numbered[number]) for number in sorted(numbered)]
    split = {name: column.split(sizes) for name, column in columns.items()}
    return {
        number: {name: pieces[place] for name, pieces in split.items()} for place, number in enumerate(sorted(numbered))
    }


def gradients_and_metrics(name: str, rank: int, world: int, budget: int, mode: str) -> dict:
    torch.manual_seed(0)
    model = TinyModel().double()
    objective, rows = objective_of(name), rows_for(name)
    microbatches = pack(rows, budget, torch.float64)
    numbers = shard(microbatches, rank, world)
    share = [microbatches[number] for number in numbers]
    facts = {"num_batch_tokens": sum(row.num_actions for row in rows), "version": 3, "seed": 7}
    measured: dict[int, dict[str, Tensor]] = {number: {} for number in numbers}
    if measures_batch(objective):
        with torch.no_grad():
            parts = {n: Tokens.of(microbatches[n], model(microbatches[n]), **facts) for n in numbers}
        measured = measures(objective, parts, world, mode)
    merged = MetricSums()
    for number in numbers:
        scored = model(microbatches[number])
        loss, sums = objective_loss(
            objective, Tokens.of(microbatches[number], scored, measured=measured[number], **facts)
        )
        loss.backward()
        merged = merged.merge(sums)
    zeros = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    gradient = torch.cat([part.flatten() for part in zeros])
    if world > 1:
        dist.all_reduce(gradient)
        gradient = gradient / world if mode == "mean" else gradient
    everything = MetricSums()
    for sums in gathered(merged, world):
        everything = everything.merge(sums)
    return {"gradient": gradient.tolist(), "metrics": everything.finish(), "share": len(share)}


def presets_for(mode: str) -> list[str]:
    """All, or those that a planted bug concerns."""
    if mode == "mean":
        return ["reinforce", "grpo", "gspo"]
    return [name for name in POLICY_GRADIENTS if mode == "sum" or measures_batch(objective_of(name))]


def run_rank(folder: Path, rank: int, world: int, cases: list[str]) -> None:
    if world > 1:
        limit, store = timedelta(seconds=100), f"file://{folder}/store-{world}"
        dist.init_process_group("gloo", store, rank=rank, world_size=world, timeout=limit)
    results = {}
    for case in cases:
        _, budget, mode = case.split(":")
        results[case] = {n: gradients_and_metrics(n, rank, world, int(budget), mode) for n in presets_for(mode)}
    (folder / f"{world}-{rank}.json").write_text(json.dumps(results))
    if world > 1:
        dist.destroy_process_group()


def run_world(folder: Path, world: int, cases: list[str]) -> None:
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=run_rank, args=(folder, rank, world, cases), daemon=True) for rank in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=150)
    if any(process.exitcode != 0 for process in ranks):
        sys.exit(f"world {world}: exit codes {[process.exitcode for process in ranks]}")


def main() -> None:
    torch.set_num_threads(1)
    folder, cases = Path(sys.argv[1]), sys.argv[2:]
    for name in POLICY_GRADIENTS:
        rows_for(name)  # once, and inherited by all ranks
    for world in sorted({int(case.split(":")[0]) for case in cases}):
        run_world(folder, world, [case for case in cases if case.startswith(f"{world}:")])


if __name__ == "__main__":
    main()
