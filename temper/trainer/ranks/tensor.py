"""Ranks that compute each layer together, every one with its own heads of attention and columns of feed-forward layers.

Between layers a rank has a stretch of the tokens, as in context.py: norms, embedding, head and loss are of its stretch.
Matrices of layers are not gathered. All tokens come to every rank, each computes with its slices, and what they say is
added up where the tokens came from (tensor and sequence parallelism, arXiv 2205.05198). Where there are several such
groups, ranks with the same slice hold a part of it each, and gather the slice when they compute.
Owns: who holds which slice, and these exchanges. Refuses: models whose slices do not come out even, or that add a bias
behind the sum; who goes together, and the loss (context.py); everything but matrices of layers (parts.py).
Shapes: N ranks together, _T packed tokens, _t an N-th of them, _D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from temper.errors import UserError
from temper.models.attention_interface import Attend
from temper.models.decoder import is_dense, numerics_of
from temper.models.ops import Ops, ops_of
from temper.trainer.ranks.context import context_of_rank

ROWS, COLUMNS = 0, 1
"""Along which dimension a matrix is shared out: what it makes, or what it reads."""
SLICED = {
    "self_attn": {"q_proj": ROWS, "k_proj": ROWS, "v_proj": ROWS, "o_proj": COLUMNS},
    "mlp": {"gate_proj": ROWS, "up_proj": ROWS, "down_proj": COLUMNS},
}


def hold_own_slices(model: Any, size: int, device: torch.device) -> set[nn.Parameter]:
    """From now on this rank holds its slices alone, and computes them for the `size` neighbours that go over rows
    together. Returns these parameters, which nobody else shares out."""
    from torch.distributed.device_mesh import DeviceMesh  # here: they take more than a second
    from torch.distributed.tensor import DTensor, Shard

    world = dist.get_world_size()
    require_slices(model, size, world)
    # By slice first: of a tensor, ranks with the same slice hold neighbouring parts.
    ranks = torch.arange(world).view(-1, size).T.contiguous()
    mesh = DeviceMesh(device.type, ranks, mesh_dim_names=("tensor", "data"))
    held = set()
    for layer in model.get_decoder().layers:
        for block, linears in SLICED.items():
            module = getattr(layer, block)
            module.temper_together = compute_together
            for linear, name, dim in _tensors(module, linears):
                whole = getattr(linear, name)
                own = whole.detach().chunk(world, dim)[place_in(mesh, dist.get_rank())].clone()
                own = own.contiguous() if own.is_meta else own.contiguous().to(device)
                cut = DTensor.from_local(own, mesh, (Shard(dim), Shard(dim)), run_check=False)
                setattr(linear, name, parameter := nn.Parameter(cut, requires_grad=whole.requires_grad))
                linear.temper_slice = slice_of
                held.add(parameter)
    model.temper_sliced = True
    return held


def place_in(mesh: Any, rank: int) -> int:
    """Of a rank among those that share out a tensor over this mesh, in order of what they hold."""
    return int((mesh.mesh.flatten() == rank).nonzero())


def is_sliced(model: nn.Module) -> bool:
    return getattr(model, "temper_sliced", False)


def require_slices(model: Any, size: int, world: int) -> None:
    """UserError where layers cannot be shared out over groups of `size` ranks, `world` in all."""
    if not is_dense(model):
        raise UserError("cluster.tensor: this model has experts. Use cluster.experts = true and cluster.tensor = 1")
    kv_heads = model.get_decoder().config.num_key_value_heads
    if kv_heads % size:
        fitting = [number for number in range(2, kv_heads + 1) if kv_heads % number == 0]
        raise UserError(
            f"cluster.tensor: {kv_heads} heads of keys do not divide over {size} trainers. Use cluster.tensor = "
            f"{', '.join(map(str, fitting)) or 1}, or cluster.context"
        )
    for block, linears in SLICED.items():
        module = getattr(model.get_decoder().layers[0], block)
        if any(getattr(module, name).bias is not None for name, dim in linears.items() if dim == COLUMNS):
            raise UserError("cluster.tensor: layers of this model add a bias behind a sum. Use cluster.tensor = 1")
        for linear, name, dim in _tensors(module, linears):
            if (length := getattr(linear, name).shape[dim]) % world:
                raise UserError(
                    f"cluster.tensor: {length} rows or columns of a layer do not divide over {world} trainers. Change "
                    f"cluster.trainers, or use cluster.tensor = 1"
                )


def _tensors(module: Any, linears: dict[str, int]) -> Iterator[tuple[Any, str, int]]:
    for each, dim in linears.items():
        linear = getattr(module, each)
        yield linear, "weight", dim
        if linear.bias is not None:
            yield linear, "bias", ROWS


def slice_of(cut: Any) -> Tensor:
    """What this rank computes with: its slice of a matrix, gathered from all that hold a part of it."""
    group = cut.device_mesh.get_group("data")
    return _Gather.apply(cut.to_local(), cut.placements[0].dim, group, torch.float32)  # type: ignore[no-any-return, no-untyped-call]


def gather_slices(part: Tensor, like: Any) -> Tensor:
    """The whole tensor, from what all ranks hold of it."""
    for name in ("data", "tensor"):  # parts of a slice first
        part = _gathered(part, like.placements[0].dim, like.device_mesh.get_group(name))
    return part


def compute_together(compute: Callable[[Tensor], Tensor], own_tD: Tensor) -> Tensor:
    """What a block of a layer adds to the tokens of this rank. compute: what slices of this rank say of all tokens."""
    context = context_of_rank()
    assert context is not None, "a sliced model is computed by ranks that go together"
    whole_TD = _Gather.apply(own_tD, ROWS, context.group, None)  # type: ignore[no-untyped-call]
    return _AddUp.apply(compute(whole_TD), context.group)  # type: ignore[no-any-return, no-untyped-call]


class WholeAttention:
    """Attention of all tokens over some heads, where the pass around it knows rotations of this rank's tokens alone."""

    def __init__(self, model: Any, attend: Attend, positions_T: Tensor) -> None:
        decoder = model.get_decoder()
        like = decoder.norm.weight  # for its dtype and device
        cos, sin = decoder.rotary_emb(like, positions_T.unsqueeze(0))
        self._rotation = cos[0], sin[0]
        self._attend = attend
        self._ops: Ops = ops_of(positions_T.device, numerics_of(model))

    def rotating(self, layer: int, query: Tensor, key: Tensor, value: Tensor, _own: Any, **options: Any) -> Tensor:
        query, key = self._ops.rotate(query, key, *self._rotation)
        return self._attend(layer, query, key, value, **options)


class _Gather(torch.autograd.Function):
    """Equal parts of all ranks of a group side by side. Gradients are added up, and each keeps that of its part."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, dim: int, group: Any, wide: torch.dtype | None) -> Tensor:
        """wide: gradients are added up in no narrower type than this."""
        ctx.dim, ctx.group, ctx.wide = dim, group, wide
        return _gathered(own, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (grad,) = grads
        wide = grad.dtype if ctx.wide is None else torch.promote_types(grad.dtype, ctx.wide)
        return _added_up(grad.to(wide), ctx.dim, ctx.group).to(grad.dtype), None, None, None


class _AddUp(torch.autograd.Function):
    """Of rows that all ranks of a group have said something about: the sum, of each rank's own stretch."""

    @staticmethod
    def forward(ctx: Any, said_TD: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _added_up(said_TD, ROWS, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _gathered(grads[0], ROWS, ctx.group), None


# Before torch 2.13 they have other names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _gathered(own: Tensor, dim: int, group: Any) -> Tensor:
    size = dist.get_world_size(group)
    if size == 1:
        return own
    everyone = own.new_empty(size * len(own), *own.shape[1:])
    _all_gather(everyone, own.contiguous(), group=group)
    return everyone if dim == ROWS else torch.cat(everyone.chunk(size), dim)


def _added_up(whole: Tensor, dim: int, group: Any) -> Tensor:
    size = dist.get_world_size(group)
    if size == 1:
        return whole
    by_rank = whole.contiguous() if dim == ROWS else torch.cat(whole.chunk(size, dim))
    own = whole.new_empty(len(by_rank) // size, *by_rank.shape[1:])
    _reduce_scatter(own, by_rank, group=group)
    return own
