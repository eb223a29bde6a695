"""One rank of the test in test_ranks.py: trains a tiny model on its share and prints gradients and metrics as JSON.

Usage: rank_worker.py RANK WORLD STORE_FILE TOKENS_PER_MICROBATCH REDUCTION
"""

from __future__ import annotations

import json
import random
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from temper.batching import CreditRules, make_batch, pack, shard, with_logprobs
from temper.objectives import PRESETS, MetricSums, Tokens, objective_loss, resolve
from temper.types import Completion, Finish, Group, Message, Score, Status, Task, Trajectory, Turn

VOCABULARY = 11
EXTRAS = [{"name": "kl", "coefficient": 0.3}, {"name": "entropy_bonus", "coefficient": 0.2}]


class TinyModel(nn.Module):
    """Scores each token from its predecessor and its position. No attention, so nothing to leak between rows."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 6)
        self.positions = nn.Embedding(64, 6)
        self.head = nn.Linear(6, VOCABULARY)

    def forward(self, microbatch) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.tokens(microbatch.token_ids) + self.positions(microbatch.positions))
        before = microbatch.loss_mask.bool().nonzero().flatten() - 1
        logprobs = torch.log_softmax(self.head(hidden[before]), -1)
        drawn = microbatch.token_ids[before + 1]
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(1, drawn[:, None]).squeeze(1), entropy


def make_groups() -> list[Group]:
    rng = random.Random(0)
    return [
        Group(
            id=f"g{draw}",
            draw=draw,
            task=Task(id="t", messages=(Message(role="user", content=""),)),
            trajectories=tuple(make_trajectory(rng, f"g{draw}", index) for index in range(3)),
        )
        for draw in range(4)
    ]


def make_trajectory(rng: random.Random, group_id: str, index: int) -> Trajectory:
    prompt = [rng.randrange(VOCABULARY) for _ in range(3)]
    turns = []
    for _ in range(rng.randint(1, 2)):
        drawn = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 9))]
        completion = Completion(
            prompt_ids=tuple(prompt),
            token_ids=drawn,
            logprobs=[-3 * rng.random() for _ in drawn],
            versions=[0] * len(drawn),
            finish=Finish.STOP,
        )
        turns.append(Turn(completion=completion, message=Message(role="assistant", content="")))
        kept = prompt if rng.random() < 0.5 else prompt[1:]  # half of the second turns fork a row
        prompt = [*kept, *drawn, rng.randrange(VOCABULARY)]
    score = Score.of(rng.random())
    parts = {"task_id": "t", "group_id": group_id, "index": index, "turns": tuple(turns)}
    return Trajectory(**parts, status=Status.COMPLETED, score=score)


def noisy_logprobs(rows, policy) -> list[list[float]]:
    shift = {"policy": 0.05, "reference": -0.2}[policy]
    return [[(b + shift) * m for b, m in zip(r.behavior_logprobs, r.loss_mask, strict=True)] for r in rows]


def gradients_and_metrics(name: str, rank: int, world: int, budget: int, reduction: str) -> dict:
    torch.manual_seed(0)
    model = TinyModel().double()
    objective = resolve(name, {"regularizers": EXTRAS, "corrections": ["token_tis"]})
    rules = CreditRules(objective=objective, max_new_tokens=18)
    (rows,) = make_batch(make_groups(), rules, logprobs=noisy_logprobs, version=0).updates
    rows = with_logprobs(rows, reference=noisy_logprobs(rows, "reference"))
    num_batch_tokens = sum(row.num_actions for row in rows)
    merged = MetricSums()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    share = shard(pack(rows, budget, torch.float64), rank, world)
    for microbatch in share:
        policy, entropy = model(microbatch)
        tokens = Tokens.of(microbatch, policy, num_batch_tokens=num_batch_tokens, entropy=entropy)
        loss, sums = objective_loss(objective, tokens)
        loss.backward()
        merged = merged.merge(sums)
    if world > 1:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            if reduction == "mean":
                parameter.grad /= world
        everyone: list = [None] * world
        dist.all_gather_object(everyone, merged)
        merged = MetricSums()
        for sums in everyone:
            merged = merged.merge(sums)
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    return {"gradient": gradient.tolist(), "metrics": merged.finish(), "share": len(share)}


def main() -> None:
    rank, world, budget = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[4])
    torch.set_num_threads(1)
    if world > 1:
        limit = timedelta(seconds=60)
        dist.init_process_group("gloo", f"file://{sys.argv[3]}", rank=rank, world_size=world, timeout=limit)
    print(json.dumps({name: gradients_and_metrics(name, rank, world, budget, sys.argv[5]) for name in PRESETS}))
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
