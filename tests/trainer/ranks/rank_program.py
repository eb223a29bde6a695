"""One trainer rank of test_sums.py, started by start_ranks.py. Trains every case in turn."""

from __future__ import annotations

import datetime
import pickle
from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from temper.batching.pack import pack, shard
from temper.models.lora.switch import AdapterOff
from temper.models.lora.wrapping import has_adapter, without_adapter
from temper.objectives import POLICY_GRADIENTS, DirectLoss, resolve
from temper.trainer.critic import Critic
from temper.trainer.local import AuxiliaryModels, LocalTrainer, TrainerSettings
from temper.trainer.optim import OptimizerSettings
from temper.trainer.ranks import context, exchange, tensor
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


def train(model: Any, other: Any, rows: list[Sample], preset: str, budget: int, *, how: str) -> dict[str, Any]:
    objective, optimizer = resolve(preset), OptimizerSettings(learning_rate=0.01)
    is_cut = "parts" in how and dist.is_initialized()
    together: Literal["group", "trajectory"] = "group" if isinstance(objective, DirectLoss) else "trajectory"
    critic = None
    if "values" in objective.needs:
        critic = Critic(deepcopy(model), optimizer, total_steps=4, parts_on=torch.device("cpu") if is_cut else None)
    if is_cut:
        for each in (model, other):
            sliced = context.context_of_rank() if "sliced" in how else None
            cut(each, experts="apart" in how, tensor=1 if sliced is None else sliced.size)
    if has_adapter(model):  # compared with what it was before
        other = AdapterOff(model) if is_cut else without_adapter(model)
    trainer = LocalTrainer(
        model,
        None,
        objective,
        TrainerSettings(
            optimizer=optimizer, temperature=1.0, total_steps=4, gradient_checkpointing="recomputed" in how and is_cut
        ),
        pack=partial(pack, tokens_per_microbatch=budget, dtype=torch.float64, together=together),
        shard=shard,
        others=AuxiliaryModels(critic=critic, reference=other, teachers={"": other}),
    )
    recomputed = [0]
    if "recomputed" in how and is_cut:
        count_recomputed(model, recomputed)
    updates = (tuple(rows),) if "epochs" not in how else in_two_epochs(rows)
    results = [trainer.step(Batch(updates=updates)) for _ in range(2)]
    states = {"policy": trainer._optimizer.tensors()}
    if critic is not None:
        states["critic"] = critic.wholes()[1]
    moments = {
        (owner, name): tensors[name] for owner, tensors in states.items() for name in tensors if is_first_moment(name)
    }
    for name, bias in model.named_buffers():  # of routers: updates move them by the tokens of all ranks
        if name.endswith("e_score_correction_bias"):
            moments["policy", name] = bias.clone()
    share = len(trainer._share(rows).microbatches)
    metrics = [dict(result.metrics) for result in results]
    return {"share": share, "metrics": metrics, "moments": moments, "recomputed": recomputed[0]}


def count_recomputed(model: Any, counted: list[int]) -> None:
    """Passes of the first layer that keep nothing but their input."""
    layer = model.get_decoder().layers[0]
    checkpoint = layer._gradient_checkpointing_func

    def checkpoint_counted(*given: Any, **named: Any) -> Any:
        counted[0] += 1
        return checkpoint(*given, **named)

    layer._gradient_checkpointing_func = checkpoint_counted


def is_first_moment(name: str) -> bool:
    return name.startswith("exp_avg.")


def average(tensor: torch.Tensor) -> None:
    """What data-parallel wrappers do with gradients by default."""
    dist.all_reduce(tensor)
    tensor /= dist.get_world_size()


def average_parts(module: Any, factor: float) -> None:
    """What FSDP2 does with gradients by default."""
    sum_parts(module, factor * dist.get_world_size())


def swapped(rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: Any) -> torch.Tensor:
    """Rows that come in another order than they went."""
    return exchanged(rows, sent, received, group).flip(0)


def added_up(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    """Gradients of all that have the same loss, added up: what a gather of torch does."""
    own, *rest = own_gradient(ctx, *grads)
    return own * len(ctx.counts), *rest


def forgotten(whole: torch.Tensor, dim: int, group: Any) -> torch.Tensor:
    """What this rank says, without what others add."""
    return whole.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)].contiguous()


class Averaging:
    """torch.distributed with the planted fault."""

    def __getattr__(self, name: str) -> Any:
        return average if name == "all_reduce" else getattr(dist, name)


exchanged, own_gradient, summed = exchange._exchanged, context._Gather.backward, tensor._added_up
sum_parts = FSDPModule.set_gradient_divide_factor


def main(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    if world > 1:
        store, limit = dist.FileStore(str(folder / "store"), world), datetime.timedelta(seconds=100)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    models, other, rows, cases = pickle.loads((folder / "inputs.pkl").read_bytes())
    reports = {}
    for preset, budget, fault in cases:
        needs = resolve(preset).needs
        kind = "rows" if preset in POLICY_GRADIENTS else "scores" if "scores" in needs else "pairs"
        ranks.dist = Averaging() if fault == "average" else dist  # type: ignore[attr-defined, assignment]
        exchange._exchanged = swapped if "swapped" in fault else exchanged
        context._Gather.backward = staticmethod(added_up if "added" in fault else own_gradient)  # type: ignore[method-assign]
        tensor._added_up = forgotten if "forgotten" in fault else summed
        ranks.is_counted = (lambda: True) if "everyone" in fault else context.is_counted  # type: ignore[attr-defined, assignment]
        if world > 1:
            together = {"together": world, "twos": 2}
            context.go_together(next((together[word] for word in fault.split() if word in together), 1), 100.0)
        FSDPModule.set_gradient_divide_factor = average_parts if "average" in fault else sum_parts  # type: ignore[method-assign]
        own = next((word for word in fault.split() if word in models), "scorer" if kind == "scores" else "policy")
        reports[preset, budget, fault] = train(
            deepcopy(models[own]),
            deepcopy(other),
            rows[next((word for word in fault.split() if word in rows), kind)],
            preset,
            budget,
            how=fault,
        )
    torch.save(reports, folder / f"{rank}of{world}.pt")
    if world > 1:
        dist.destroy_process_group()
