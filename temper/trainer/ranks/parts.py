"""Models cut into parts: a trainer rank holds a part of every layer, and gathers a layer when it computes it (FSDP2).

Owns: the cut, how a pass goes through a cut model, whole tensors from parts and parts from whole tensors. Refuses:
families that are not walked (models/decoder.py), sums of anything but gradients (sums.py).
A pass happens inside the forward call of the model, and each layer inside its own: that is where torch gathers and
frees. All ranks make the same passes in the same order, or they wait for each other for ever.
"""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from temper.errors import UserError
from temper.models.decoder import WALKED_FAMILIES, can_walk, layer_forward
from temper.trainer.ranks.experts import hold_own_experts
from temper.trainer.ranks.tensor import gather_slices, hold_own_slices, place_in

Result = TypeVar("Result")
GATHERED_BYTES = 256 << 20
"""Of whole tensors that are on their way to one sampler. Several that read at the same time hold as many each, on the
device of rank 0; a larger tensor goes alone."""


def cut(
    model: Any,
    *,
    device: torch.device | None = None,
    apart: Sequence[nn.Module] = (),
    experts: bool = False,
    tensor: int = 1,
) -> None:
    """From now on this rank holds its part alone. Rows of every tensor are shared out in order of ranks; of a tensor
    with fewer rows than ranks the last get none.

    device: where parts live; layers of a model that lies elsewhere are brought there one by one. None: where it is.
    apart: heads of another precision, which torch gathers by themselves. experts: whether each rank computes its own
    experts for all (experts.py); otherwise they are gathered as the rest is. tensor: ranks that compute matrices of
    layers together, with slices that stay (tensor.py); they go over rows together.
    """
    from torch.distributed.device_mesh import init_device_mesh  # here: they take more than a second
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    world, parameter = dist.get_world_size(), next(model.parameters())
    require_walked(model)
    mesh = init_device_mesh((device or parameter.device).type, (world,))
    # Gradients of a microbatch are added up over ranks in float32, and then rounded to what the weights are.
    narrow = parameter.dtype in (torch.bfloat16, torch.float16)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32 if narrow else None, cast_forward_inputs=False)
    held = hold_own_experts(model, mesh, device or parameter.device) if experts else set()
    if tensor > 1:
        held = hold_own_slices(model, tensor, device or parameter.device)
    for layer in model.get_decoder().layers:
        layer.temper_cut, layer.forward = True, MethodType(layer_forward, layer)
        fully_shard(layer, mesh=mesh, mp_policy=policy, ignored_params=held)
    for head in apart:
        fully_shard(head, mesh=mesh, mp_policy=policy)
    model.temper_cut, model.forward = True, _call
    fully_shard(model, mesh=mesh, mp_policy=policy)
    # It warns of views that a layer returns; nothing here changes one in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # A sum, not a mean: weights of tokens already hold the denominator of the whole batch.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def require_walked(model: Any) -> None:
    """UserError for a family whose layers are not called one by one."""
    if not can_walk(model):
        raise UserError(
            f"cluster.parts is made for the families {', '.join(WALKED_FAMILIES)}, and this is a "
            f"{model.get_decoder().config.model_type}. Use cluster.parts = false: each trainer then holds a copy"
        )


def _call(compute: Callable[[], Result]) -> Result:
    return compute()


def is_cut(model: nn.Module) -> bool:
    return getattr(model, "temper_cut", False)


def within(model: nn.Module, compute: Callable[[], Result]) -> Result:
    """What `compute` returns, which goes through the model; of a cut one, while embedding, head and last norm are
    gathered. With gradient: until the backward pass from a tensor that it returns is over."""
    if not is_cut(model):
        return compute()
    result: Result = model(compute)
    if not torch.is_grad_enabled():
        model.reshard()  # type: ignore[operator]  # or an update would not be seen by what stays gathered
    return result


def own_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, sharing its memory; all of one that is not cut."""
    return tensor.to_local() if _is_cut_tensor(tensor) else tensor  # type: ignore[attr-defined, no-any-return]


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """What this rank holds of `like`, of a whole tensor: rows, or columns."""
    if not _is_cut_tensor(like):
        return whole
    cut = cut_of(like, dist.get_rank())
    start, end = cut.own(whole.shape[cut.dim])
    return whole[start:end] if cut.dim == 0 else whole[:, start:end]


def whole_of(part: Tensor, like: Tensor) -> Tensor:
    """The whole tensor from the parts of all ranks, each of which calls this. like: a parameter cut in the same way."""
    if not _is_cut_tensor(like):
        return part
    from torch.distributed.tensor import DTensor

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    part = part.to(like.device)
    if mesh.ndim > 1:
        return gather_slices(part, like)
    return DTensor.from_local(part, mesh, placements, shape=like.shape, stride=like.stride()).full_tensor()


class Cut(NamedTuple):
    """How a tensor is shared out, seen from one rank."""

    dim: int
    place: int
    """Of the rank's part."""
    size: int
    """Parts in all."""

    def own(self, length: int) -> tuple[int, int]:
        """Where the rank's part begins and ends, of so many rows or columns."""
        part = -(-length // self.size)
        return min(self.place * part, length), min((self.place + 1) * part, length)


def cut_of(tensor: Any, rank: int) -> Cut:
    mesh = tensor.device_mesh
    return Cut(tensor.placements[0].dim, place_in(mesh, rank), mesh.size())


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor, where it is cut with the help of all ranks."""
    return whole_of(own_part(tensor), tensor)


def _is_cut_tensor(tensor: Tensor) -> bool:
    return hasattr(tensor, "to_local")


class OwnParts(Mapping[str, Tensor]):
    """This rank's parts of tensors, looked up every time: torch may give them other memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        return own_part(self._tensors[name].detach())

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class WholeTensors(OwnParts):
    """Tensors that are made whole when they are asked for, on the CPU, by all ranks in one order."""

    def __init__(self, parts: Mapping[str, Tensor], likes: Mapping[str, Tensor]) -> None:
        """likes: the parameter that each is cut like, by the same names."""
        super().__init__(parts)
        self._likes = likes

    def __getitem__(self, name: str) -> Tensor:
        return whole_of(super().__getitem__(name), self._likes[name]).cpu()

    def own(self, name: str) -> Tensor:
        """This rank's part, without the help of others."""
        return super().__getitem__(name)

    def cut(self, name: str, rank: int) -> Cut:
        """Of one that is not cut the first rank has all."""
        return cut_of(self._likes[name], rank) if _is_cut_tensor(self._likes[name]) else Cut(0, rank, 1)

    def outlines(self) -> dict[str, Tensor]:
        """Tensors of the shapes and types of the whole ones, without numbers."""
        found = {}
        for name in self:
            own = self.own(name)
            shape = self._likes[name].shape if _is_cut_tensor(self._likes[name]) else own.shape
            found[name] = torch.empty(shape, dtype=own.dtype, device="meta")
        return found


class PartsOf(OwnParts):
    """This rank's rows of whole tensors."""

    def __init__(self, wholes: Mapping[str, Tensor], likes: Mapping[str, Tensor]) -> None:
        super().__init__(wholes)
        self._likes = likes

    def __getitem__(self, name: str) -> Tensor:
        return part_of(super().__getitem__(name), self._likes[name])


class GatheredTensors(OwnParts):
    """Whole tensors of a cut model on its device, a few neighbours at a time: all of them may not fit on one rank.

    Samplers elsewhere read them side by side, each in its own time, so each holds the neighbours that it reads: if all
    had to share what is held, they would gather the model many times over.
    """

    def __init__(self, cut: Mapping[str, Tensor], gather: Callable[[Sequence[str]], Mapping[str, Tensor]]) -> None:
        """gather: makes tensors whole, with the help of all ranks."""
        super().__init__(cut)
        self._gather = gather
        self._neighbours = {name: bucket for bucket in _buckets(cut) for name in bucket}
        self._held: WeakKeyDictionary[object, Mapping[str, Tensor]] = WeakKeyDictionary()
        """By reader, as long as it reads."""
        self._one_reader = threading.Lock()

    def __getitem__(self, name: str) -> Tensor:
        reader = _reader()
        with self._one_reader:
            held = next((held for held in self._held.values() if name in held), None)
            if held is None:
                self._held.pop(reader, None)  # first: there may be no room for both
                held = self._gather(self._neighbours[name])
            self._held[reader] = held
            return held[name]

    def outlines(self) -> dict[str, Tensor]:
        """Tensors of these shapes and types, on this device, that take no memory."""
        return {
            name: torch.empty((), dtype=t.dtype, device=t.device).expand(t.shape) for name, t in self._tensors.items()
        }


def _buckets(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """Neighbours of up to GATHERED_BYTES together, or one larger tensor alone."""
    buckets: list[list[str]] = []
    size = 0
    for name, tensor in tensors.items():
        size += tensor.nbytes
        if not buckets or size > GATHERED_BYTES:
            buckets.append([])
            size = tensor.nbytes
        buckets[-1].append(name)
    return buckets


def _reader() -> object:
    """Whoever reads: a task where there are any, else a thread."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop
        task = None
    return task or threading.current_thread()


@contextmanager
def under_own_name(model: nn.Module) -> Iterator[None]:
    """Cut models are of a class that torch made up: a configuration that is written inside names the model's own."""
    if not is_cut(model):
        yield
        return
    made_up = type(model)
    model.__class__ = made_up.__bases__[-1]  # the other is torch's
    try:
        yield
    finally:
        model.__class__ = made_up
