"""Masters and moments of a model's parameters, however they are held and wherever they live.

Owns: handing them out wide, bucket by bucket, and taking them back; their tensors in a checkpoint. Refuses: AdamW's
equations (update.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from temper.errors import UserError
from temper.trainer.adamw.buckets import REMAINDER, HeldBucket, WideBucket, has_kernels, ranges_of
from temper.trainer.adamw.layout import BUCKET_VALUES, Bucket, make_buckets
from temper.trainer.adamw.masters import Exceptions, join, join_float16, split, split_float16, split_settled
from temper.trainer.adamw.moments import Held, HeldPart, MomentFormat, States, formats_for
from temper.trainer.adamw.noise import high_half, key_of, low_half, random_bits
from temper.trainer.adamw.residence import Residence
from temper.trainer.adamw.update import apply_in_order, apply_update

REMAINDERS = {torch.bfloat16: torch.int16, torch.float16: torch.float32}
"""Types of weights that have masters, and of what they leave out of them. Zeros mean that weights are their masters."""


@dataclass(frozen=True, slots=True)
class BucketKind:
    """What the parameters of one bucket have in common."""

    is_decayed: bool
    """Matrices are; norms and biases are not."""
    dtype: torch.dtype
    mean: MomentFormat
    square: MomentFormat

    @property
    def has_masters(self) -> bool:
        return self.dtype in REMAINDERS

    @property
    def master_dtype(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def is_compact(self) -> bool:
        """Whether moments are rounded at random when they are held."""
        return self.mean.is_random or self.square.is_random

    @property
    def moments(self) -> dict[str, HeldPart]:
        return {**self.mean.parts, **self.square.parts}

    @property
    def parts(self) -> dict[str, HeldPart]:
        return ({REMAINDER: HeldPart(REMAINDERS[self.dtype])} if self.has_masters else {}) | self.moments


class AdamState:
    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        states: States,
        *,
        offload: bool,
        seed: int,
        kernels: bool,
        shapes: Mapping[str, torch.Size] | None = None,
    ) -> None:
        """seed: of the random bits that compact moments are rounded with. kernels: whether to use those there are.
        shapes: of the whole tensors, where parameters are parts of them: every rank holds a tensor's moments alike."""
        self._parameters, self._states = parameters, states
        self._offload, self._seed, self._kernels = offload, seed, kernels
        self._kinds = {
            name: _kind_of(name, parameter, parameter.shape if shapes is None else shapes[name], states)
            for name, parameter in parameters.items()
        }
        sizes = {name: parameter.numel() for name, parameter in parameters.items()}
        self._buckets = make_buckets(sizes, self._kinds, BUCKET_VALUES)
        self._made: Residence | None = None
        """None before the first update: moments are 0 and masters are their weights."""
        self._exceptions: dict[int, Exceptions] = {}
        """By bucket, of those with wide moments; on the device, for they are few."""

    def has_master(self, name: str) -> bool:
        """Whether the master of a parameter is another tensor than the parameter."""
        return self._kinds[name].has_masters

    def visit(self, num_steps: int) -> Iterator[WideBucket | HeldBucket]:
        """All buckets, one after the other. What was changed in one is kept when the next is asked for.

        num_steps counts the update that is being made: every update rounds with random bits of its own.
        """
        key = key_of(self._seed, num_steps)
        # The residence comes first in the zip: it is asked once more after the last bucket, and brings that one home.
        for held, bucket in zip(self._residence().visit(), self._buckets, strict=True):
            kind = self._kind(bucket)
            if self._has_kernel(kind):
                noise_at = key + bucket.first
                yield HeldBucket(bucket.slices, kind.is_decayed, self._weights(bucket), held, kind.moments, noise_at)
                continue
            masters = self._masters(bucket, held) if kind.has_masters else None
            means, squares = (each.read(held).to(kind.master_dtype) for each in (kind.mean, kind.square))
            yield WideBucket(
                bucket.slices,
                kind.is_decayed,
                self._weights(bucket) if masters is None else _views(masters, bucket),
                _views(means, bucket),
                _views(squares, bucket),
                apply_in_order if kind.is_compact else apply_update,
                None if masters is None or not self._has_wide_kernels(kind) else (masters, means, squares),
            )
            if masters is not None:
                self._keep_masters(bucket, held, masters)
            if kind.is_compact:
                bits = random_bits(key, bucket.first, bucket.size, means.device)
                kind.mean.write(held, means, low_half(bits))
                kind.square.write(held, squares, high_half(bits))

    def _has_kernel(self, kind: BucketKind) -> bool:
        """Wide moments have none: their bits are those of torch's own kernel."""
        device = next(iter(self._parameters.values())).device
        is_fit = kind.is_compact and kind.master_dtype == torch.float32
        return self._kernels and is_fit and has_kernels(device.type)

    def _has_wide_kernels(self, kind: BucketKind) -> bool:
        """Whether kernels take masters apart, put them together and measure what torch's own kernel updates."""
        device = next(iter(self._parameters.values())).device
        is_fit = not kind.is_compact and kind.master_dtype == torch.float32
        return self._kernels and is_fit and has_kernels(device.type)

    def reserve(self) -> None:
        """Makes the state, all zeros, before the first update needs it: what is tried beside it has less room."""
        self._residence()

    def forget_moments(self) -> None:
        if self._made is not None:
            for home in self._made.homes():
                for name in home.keys() - {REMAINDER}:
                    home[name].zero_()

    def tensors(self, *, moments: bool) -> Mapping[str, Tensor]:
        """Masters that are not their parameters, as float32, and moments as they are held, by name. Each is made when
        it is asked for, on the CPU: all of them would not fit beside the model."""
        makers: dict[str, Callable[[], Tensor]] = {}
        for name, kind in self._kinds.items():
            if kind.has_masters:
                makers[f"master.{name}"] = partial(self._master, name)
            for part in kind.moments if moments else ():
                makers[f"{part}.{name}"] = partial(self._moment, name, part)
        return _Made(makers)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes over what tensors() gave, which is of this model (outlines), and rounds weights from their masters."""
        self.forget_moments()
        for bucket, home in zip(self._buckets, self._residence().homes(), strict=True):
            kind = self._kind(bucket)
            if kind.has_masters:
                weights = self._weights(bucket)
                masters = torch.zeros(bucket.size, device=weights[0].device)
                for view, piece in zip(_views(masters, bucket), bucket.slices, strict=True):
                    view.copy_(tensors[f"master.{piece.name}"].reshape(-1)[piece.start : piece.stop])
                self._keep_masters(bucket, home, masters)
            for piece in bucket.slices:
                for name, part in kind.moments.items():
                    if (key := f"{name}.{piece.name}") in tensors:
                        inside, outside = ranges_of(piece, part)
                        home[name][inside].copy_(tensors[key].reshape(-1)[outside])

    def outlines(self, *, moments: bool) -> dict[str, Tensor]:
        """Tensors without data, of the shapes and types of tensors()."""
        found = {}
        for name, kind in self._kinds.items():
            shape = self._parameters[name].shape
            if kind.has_masters:
                found[f"master.{name}"] = torch.empty(shape, dtype=torch.float32, device="meta")
            for key, part in kind.moments.items() if moments else ():
                held = shape if part.values_each == 1 else (-(-shape.numel() // part.values_each),)
                found[f"{key}.{name}"] = torch.empty(held, dtype=part.dtype, device="meta")
        return found

    def _residence(self) -> Residence:
        if self._made is None:
            device = next(iter(self._parameters.values())).device
            parts = [self._kind(bucket).parts for bucket in self._buckets]
            self._made = Residence([bucket.size for bucket in self._buckets], parts, device, self._offload)
        return self._made

    def _kind(self, bucket: Bucket) -> BucketKind:
        return self._kinds[bucket.slices[0].name]

    def _weights(self, bucket: Bucket) -> list[Tensor]:
        """Looked up every time: a parameter may have been given other memory since."""
        return [self._parameters[s.name].detach().view(-1)[s.start : s.stop] for s in bucket.slices]

    def _masters(self, bucket: Bucket, held: Held) -> Tensor:
        weights = self._weights(bucket)
        flat = torch.zeros(bucket.size, dtype=self._kind(bucket).dtype, device=weights[0].device)
        torch._foreach_copy_(_views(flat, bucket), weights)
        if flat.dtype == torch.float16:
            return join_float16(flat, held[REMAINDER])
        exceptions, kernel = self._exceptions.get(bucket.number), self._has_wide_kernels(self._kind(bucket))
        return join(flat, held[REMAINDER], exceptions, kernel=kernel)

    def _keep_masters(self, bucket: Bucket, held: Held, masters: Tensor) -> None:
        kind = self._kind(bucket)
        if kind.dtype == torch.float16:
            rounded, remainder = split_float16(masters)
        elif kind.is_compact:
            rounded, remainder = split_settled(masters)
        else:
            kernel = self._has_wide_kernels(kind)
            rounded, remainder, self._exceptions[bucket.number] = split(masters, kernel=kernel)
        held[REMAINDER].copy_(remainder)
        torch._foreach_copy_(self._weights(bucket), _views(rounded, bucket))

    def _master(self, name: str) -> Tensor:
        pieces = []
        for bucket in self._buckets_of(name):
            if self._made is None:
                masters = [weight.float() for weight in self._weights(bucket)]
            else:
                home = self._made.homes()[bucket.number]
                device = self._parameters[name].device
                masters = _views(self._masters(bucket, {REMAINDER: home[REMAINDER].to(device)}), bucket)
            pieces += [m.cpu() for m, piece in zip(masters, bucket.slices, strict=True) if piece.name == name]
        return _end_to_end(pieces, torch.float32).view(self._parameters[name].shape)

    def _moment(self, name: str, part_name: str) -> Tensor:
        part = self._kinds[name].moments[part_name]
        pieces = []
        for bucket in self._buckets_of(name):
            home = self._residence().homes()[bucket.number]
            pieces += [home[part_name][ranges_of(s, part)[0]].cpu() for s in bucket.slices if s.name == name]
        flat = _end_to_end(pieces, part.dtype)
        return flat.view(self._parameters[name].shape) if part.values_each == 1 else flat

    def _buckets_of(self, name: str) -> list[Bucket]:
        return [bucket for bucket in self._buckets if any(piece.name == name for piece in bucket.slices)]


def states_of(tensors: Mapping[str, Tensor]) -> States:
    """How the moments of a checkpoint are held, by the types of its tensors."""
    dtypes = {tensors[name].dtype for name in tensors if name.startswith("exp_avg")}
    if torch.uint8 in dtypes:
        return "8bit"
    return "bfloat16" if torch.bfloat16 in dtypes else "float32"


class _Made(Mapping[str, Tensor]):
    """Tensors that are made when they are asked for."""

    def __init__(self, makers: Mapping[str, Callable[[], Tensor]]) -> None:
        self._makers = makers

    def __getitem__(self, name: str) -> Tensor:
        return self._makers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


def _kind_of(name: str, parameter: Tensor, shape: torch.Size, states: States) -> BucketKind:
    if parameter.dtype not in (*REMAINDERS, torch.float32, torch.float64):
        raise UserError(
            f'parameter "{name}" is {parameter.dtype}. Train in bfloat16, float16 or float32: set model.dtype'
        )
    assert parameter.is_contiguous(), f"{name} cannot be cut into buckets"
    formats = formats_for(states, shape, torch.promote_types(parameter.dtype, torch.float32))
    return BucketKind(parameter.ndim >= 2, parameter.dtype, *formats)


def _end_to_end(pieces: list[Tensor], dtype: torch.dtype) -> Tensor:
    """A rank may hold nothing of a tensor with few rows."""
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=dtype)


def _views(flat: Tensor, bucket: Bucket) -> list[Tensor]:
    return [flat[piece.place : piece.place + piece.size] for piece in bucket.slices]
