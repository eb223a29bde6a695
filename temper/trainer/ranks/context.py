"""Ranks that go over each row together: every one computes a stretch of its tokens, and some heads of its attention.

Only attention looks at other tokens. Before it, every rank gets all tokens of its own heads; behind it, all heads of
its own tokens (Ulysses, arXiv 2309.14509). What is said of drawn tokens is gathered, and every rank has the same loss;
gradients of the weights add up over ranks as ever, since each comes from tokens of its own.
Owns: who goes together, whose tokens are whose, these exchanges. Refuses: heads that do not divide, and passes that
look at whole rows elsewhere (build/check.py names them).
Shapes: C ranks together, _T packed tokens, _t those of this rank, H heads, K kv-heads, D head size.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from temper.errors import UserError
from temper.models.attention_interface import Attend
from temper.trainer.ranks.exchange import exchange_rows


@dataclass(frozen=True, slots=True)
class Context:
    """The ranks that this one goes together with."""

    size: int
    rank: int
    """Of this process among them."""
    group: Any

    def ends(self, num_tokens: int) -> list[int]:
        """C + 1 places where the tokens of each rank begin, and the end. Some rank may have none."""
        return [num_tokens * rank // self.size for rank in range(self.size + 1)]

    def own(self, num_tokens: int) -> slice:
        return slice(*self.ends(num_tokens)[self.rank : self.rank + 2])

    def attend(self, attend: Attend, num_tokens: int) -> Attend:
        """Attention of this rank's tokens. attend: of all of them, for any number of heads."""
        sizes = [after - before for before, after in pairwise(self.ends(num_tokens))]
        return partial(self._attend, attend, sizes)

    def _attend(
        self,
        attend: Attend,
        sizes: Sequence[int],
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        **options: Any,
    ) -> Tensor:
        own, (_, num_heads, width) = [sizes[self.rank]] * self.size, query.shape
        parts = [self._by_rank(query), *(self._by_rank(_for_each(tensor, self.size)) for tensor in (key, value))]
        heads = [part.shape[2] for part in parts]
        leaving = torch.cat(parts, 2).transpose(0, 1).reshape(sum(own), -1)  # by the rank that they go to
        whole_ThD = exchange_rows(leaving, own, sizes, self.group).view(sum(sizes), sum(heads), width)
        output_ThD = attend(layer, *torch.split(whole_ThD, heads, 1), **options)
        arrived = exchange_rows(output_ThD.flatten(1), sizes, own, self.group)
        return arrived.view(self.size, own[0], heads[0], width).transpose(0, 1).reshape(own[0], num_heads, width)

    def _by_rank(self, heads_tHD: Tensor) -> Tensor:
        """[t, C, heads of each, D]."""
        num_tokens, num_heads, width = heads_tHD.shape
        return heads_tHD.reshape(num_tokens, self.size, num_heads // self.size, width)

    def gather(self, counts: Sequence[int], own: Tensor) -> Tensor:
        """What all of them have, in order of ranks. counts: how much each has. The gradient of a rank's own part is its
        own alone: all have the same loss, and adding theirs up would count it C times."""
        return _Gather.apply(own, list(counts), self)  # type: ignore[no-any-return, no-untyped-call]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, counts: list[int], context: Context) -> Tensor:
        ctx.counts, ctx.rank = counts, context.rank
        room = max(counts)
        padded = torch.cat([own, own.new_zeros(room - len(own), *own.shape[1:])])
        everyone = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(everyone, padded, group=context.group)
        return torch.cat([part[:count] for part, count in zip(everyone, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return torch.split(grads[0], ctx.counts)[ctx.rank], None, None


def _for_each(heads_tKD: Tensor, size: int) -> Tensor:
    """Keys or values with one head for each rank at least: fewer are copied to all that share them."""
    num_heads = heads_tKD.shape[1]
    return heads_tKD if num_heads % size == 0 else heads_tKD.repeat_interleave(size // num_heads, 1)


def require_heads(config: Any, size: int) -> None:
    """UserError where heads of a model's attention cannot be shared out over so many ranks."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % size or (kv_heads % size and size % kv_heads):
        fitting = [n for n in range(2, heads + 1) if not heads % n and not (kv_heads % n and n % kv_heads)]
        raise UserError(
            f"cluster.context: {heads} heads of attention, {kv_heads} of keys, do not divide over {size} trainers. Use "
            f"cluster.context = {', '.join(map(str, fitting)) or 1}"
        )


_current: tuple[Any, Context | None] = None, None
"""The group of all ranks that it was made for, and this rank's. Another run in this process has another group."""


def context_of_rank() -> Context | None:
    """None: this rank goes over its rows alone."""
    world, context = _current
    return context if context is not None and world is dist.group.WORLD else None


def is_counted() -> bool:
    """Whether what this rank says of its rows counts: those that go together say the same."""
    context = context_of_rank()
    return context is None or context.rank == 0


def go_together(size: int, seconds: float) -> None:
    """From now on so many neighbours of all ranks go over each row together; 1: each alone. All ranks call it."""
    global _current
    context, rank = context_of_rank(), dist.get_rank()
    if size == (1 if context is None else context.size):
        return
    context = None
    for first in range(0, dist.get_world_size(), size) if size > 1 else ():
        group = dist.new_group(list(range(first, first + size)), timeout=datetime.timedelta(seconds=seconds))
        if first <= rank < first + size:
            context = Context(size, rank - first, group)
    _current = dist.group.WORLD, context
