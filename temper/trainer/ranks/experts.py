"""Experts that stay where they are: each rank holds some of every layer, and tokens travel to them and back.

Owns: which rank holds which experts, and the exchange. Refuses: numbers of experts that do not divide, the products
(models/experts/products.py), and everything of a layer that is not an expert (parts.py).
Every rank makes the same exchanges in the same order, forward and backward, also one that nobody sends anything.
Shapes: N ranks, E experts, S rows of this rank's tokens sorted by expert, R rows that arrive here, _D width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from temper.errors import UserError
from temper.models.experts.routing import expert_layers, has_experts, num_experts_of
from temper.trainer.ranks.exchange import exchange_rows

Say = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(gate and up projections, down projections, rows sorted by expert, their ends) -> what experts say to each row."""
STACKS = ("gate_up_proj", "down_proj")


def hold_own_experts(model: Any, mesh: Any, device: torch.device) -> set[nn.Parameter]:
    """From now on this rank holds its experts alone, an N-th of them in order of ranks, and computes them for all.
    Returns these parameters, which nobody gathers. Of a model without experts nothing changes."""
    from torch.distributed.tensor import DTensor, Shard  # here: it takes more than a second

    if not has_experts(model):
        return set()
    own = experts_of_rank(num_experts_of(model.config), dist.get_rank(), dist.get_world_size())
    held = set()
    for place in expert_layers(model):
        experts = model.get_decoder().layers[place].mlp.experts
        for name in STACKS:
            stack = getattr(experts, name)
            rows = stack.detach()[own].clone()
            rows = rows if rows.is_meta else rows.to(device)
            parameter = nn.Parameter(
                DTensor.from_local(rows, mesh, (Shard(0),), run_check=False), requires_grad=stack.requires_grad
            )
            setattr(experts, name, parameter)
            held.add(parameter)
        experts.temper_exchange = exchange
    return held


def experts_of_rank(num_experts: int, rank: int, world: int) -> slice:
    """UserError where they do not divide."""
    if num_experts % world:
        fitting = [number for number in range(2, num_experts + 1) if num_experts % number == 0]
        raise UserError(
            f"cluster.experts: {num_experts} experts do not divide over {world} trainers. Use cluster.trainers = "
            f"{', '.join(map(str, fitting))}, or cluster.experts = false"
        )
    own = num_experts // world
    return slice(rank * own, (rank + 1) * own)


def exchange(say: Say, experts: Any, rows_SD: Tensor, ends_E: Tensor) -> Tensor:
    """What experts say to the rows of this rank [S, D], each computed by the rank that holds it."""
    world, counts_E = dist.get_world_size(), ends_E.diff(prepend=ends_E.new_zeros(1))
    counts_NO = torch.empty_like(counts_E)
    dist.all_to_all_single(counts_NO, counts_E)
    counts_NO = counts_NO.view(world, -1)  # from each rank, for each expert here
    sent, received = counts_E.view(world, -1).sum(1).tolist(), counts_NO.sum(1).tolist()
    arrived_RD = exchange_rows(rows_SD, sent, received)
    # They come by rank and then by expert; products want them by expert and then by rank.
    expert_R = torch.arange(counts_NO.shape[1], device=rows_SD.device).repeat(world)
    order_R = expert_R.repeat_interleave(counts_NO.flatten()).argsort(stable=True)
    # A row of zeros behind the last: a rank that nobody sends anything still has a way back through its experts.
    padded_RD = torch.cat([arrived_RD.index_select(0, order_R), rows_SD.new_zeros(1, rows_SD.shape[1])])
    own_ends = counts_NO.sum(0).cumsum(0).to(torch.int32)
    own_ends[-1] += 1
    said_RD = say(*(getattr(experts, name).to_local() for name in STACKS), padded_RD, own_ends)[:-1]  # type: ignore[call-arg]
    back_R = torch.empty_like(order_R).scatter_(0, order_R, torch.arange(len(order_R), device=order_R.device))
    return exchange_rows(said_RD.index_select(0, back_R), received, sent)
