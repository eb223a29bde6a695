"""What the policy thought of the tokens it was trained on, row by row, for people to look at.

Owns: which row of a microbatch is which of the samples, and the copy to the host. Refuses: forward passes of its own;
it keeps what the gradient's pass computes anyway. Several ranks: each traces its own rows only.
Shapes: _A drawn tokens of a microbatch, _T all its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from temper.types import Column, Microbatch, Sample, Trace, array_of

Pack = Callable[[Sequence[Sample]], list[Microbatch]]
Key = tuple[str, int, int]
"""Group, member, and number of the row among those of the trajectory."""


def pack_numbered(pack: Pack, samples: Sequence[Sample]) -> list[tuple[Microbatch, list[int]]]:
    """Microbatches, each with the numbers of its rows among the samples: the packer may put them in another order."""
    # Packing does not look into the versions column; it carries the numbers through, and then gets its own back.
    numbered = [replace(s, versions=_repeated(number, len(s.token_ids))) for number, s in enumerate(samples)]
    packed = []
    for microbatch in pack(numbered):
        rows = [int(part[0]) for part in torch.split(microbatch.versions, list(microbatch.lengths))]
        versions = np.concatenate([array_of(samples[number].versions) for number in rows], dtype=np.int64)
        packed.append((replace(microbatch, versions=torch.from_numpy(versions)), rows))
    return packed


def _repeated(number: int, count: int) -> Column[int]:
    return Column(np.full(count, number, dtype=np.int32))


def keys_of(samples: Sequence[Sample]) -> list[Key]:
    """The name of every row."""
    seen: dict[tuple[str, int], int] = {}
    keys = []
    for sample in samples:
        row = seen.get((sample.group_id, sample.index), 0)
        seen[sample.group_id, sample.index] = row + 1
        keys.append((sample.group_id, sample.index, row))
    return keys


def seen_of(logprobs_A: Tensor, entropy_A: Tensor) -> Tensor:
    """[2, A] in float32, without gradient, still on its device: copied now, it would stall the backward pass."""
    return torch.stack([logprobs_A.detach(), entropy_A.detach()]).float()


def traces_of(microbatch: Microbatch, seen: Tensor, keys: Sequence[Key]) -> dict[Key, Trace]:
    """Traces of all rows of a microbatch, one copy to the host; `keys` are those of its rows in order."""
    spread = torch.zeros(2, len(microbatch.token_ids))
    spread[:, microbatch.loss_mask.bool()] = seen.cpu()
    rows = torch.split(spread, list(microbatch.lengths), dim=1)
    return {
        key: Trace(policy_logprobs=Column(row[0].numpy()), entropies=Column(row[1].numpy()))
        for key, row in zip(keys, rows, strict=True)
    }
