"""One trainer rank of test_ranks.py, started by start_ranks.py. Trains every case in turn."""

from __future__ import annotations

import datetime
import pickle
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from temper.batching.pack import pack, shard
from temper.objectives import POLICY_GRADIENTS, DirectLoss, resolve
from temper.trainer.critic import Critic
from temper.trainer.local import AuxiliaryModels, LocalTrainer, TrainerSettings
from temper.trainer.optim import OptimizerSettings
from temper.trainer.ranks import sums as ranks
from temper.trainer.ranks.parts import cut
from temper.types import Batch, Sample


def in_two_epochs(rows: list[Sample]) -> tuple[tuple[Sample, ...], ...]:
    """Two updates in each epoch, with other groups: a rank gets rows in the second that another passed in the first."""
    last = max(row.group_id for row in rows)
    first = min(row.group_id for row in rows)
    parts = [
        [row for row in rows if (row.group_id == odd) == is_odd] for odd in (last, first) for is_odd in (True, False)
    ]
    return tuple(tuple(part) for part in parts)


def train(
    model: Any, other: Any, rows: list[Sample], preset: str, budget: int, *, epochs: int, parts: bool
) -> dict[str, Any]:
    if parts and dist.is_initialized():
        for each in (model, other):
            cut(each)
    objective, optimizer = resolve(preset), OptimizerSettings(learning_rate=0.01)
    together: Literal["group", "trajectory"] = "group" if isinstance(objective, DirectLoss) else "trajectory"
    critic = Critic(deepcopy(model), optimizer, total_steps=4) if "values" in objective.needs else None
    trainer = LocalTrainer(
        model,
        None,
        objective,
        TrainerSettings(optimizer=optimizer, temperature=1.0, total_steps=4),
        pack=partial(pack, tokens_per_microbatch=budget, dtype=torch.float64, together=together),
        shard=shard,
        others=AuxiliaryModels(critic=critic, reference=other, teachers={"": other}),
    )
    updates = (tuple(rows),) if epochs == 1 else in_two_epochs(rows)
    results = [trainer.step(Batch(updates=updates)) for _ in range(2)]
    moments = {name: t for name, t in trainer._optimizer.tensors().items() if name.startswith("exp_avg.")}
    share = len(trainer._share(rows).microbatches)
    return {"share": share, "metrics": [dict(r.metrics) for r in results], "moments": moments}


def average(tensor: torch.Tensor) -> None:
    """What data-parallel wrappers do with gradients by default."""
    dist.all_reduce(tensor)
    tensor /= dist.get_world_size()


class Averaging:
    """torch.distributed with the planted fault."""

    def __getattr__(self, name: str) -> Any:
        return average if name == "all_reduce" else getattr(dist, name)


def main(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    if world > 1:
        store, limit = dist.FileStore(str(folder / "store"), world), datetime.timedelta(seconds=100)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    model, other, rows, pairs, cases = pickle.loads((folder / "inputs.pkl").read_bytes())
    reports = {}
    for preset, budget, fault in cases:
        is_policy_gradient = preset in POLICY_GRADIENTS
        ranks.dist = Averaging() if fault == "average" else dist  # type: ignore[attr-defined, assignment]
        reports[preset, budget, fault] = train(
            deepcopy(model),
            deepcopy(other),
            rows if is_policy_gradient else pairs,
            preset,
            budget,
            epochs=1 + (fault == "epochs"),
            parts=fault == "parts",
        )
    torch.save(reports, folder / f"{rank}of{world}.pt")
    if world > 1:
        dist.destroy_process_group()
