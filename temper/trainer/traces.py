"""What the policy thought of the tokens it was trained on, row by row, for people to look at.

Owns: names of rows, and the copy to the host. Refuses: forward passes of its own;
it keeps what the gradient's pass computes anyway. Several ranks: each traces its own rows, and the first gets all.
Shapes: _A drawn tokens of a microbatch, _T all its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from temper.types import Column, Microbatch, Sample, Trace

Key = tuple[str, int, int]
"""Group, member, and number of the row among those of the trajectory."""


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
    """Traces of all rows of a microbatch, one copy to the host; `keys` are those of all samples."""
    spread = torch.zeros(2, len(microbatch.token_ids))
    spread[:, microbatch.loss_mask.bool()] = seen.cpu()
    rows = torch.split(spread, list(microbatch.lengths), dim=1)
    return {
        keys[number]: Trace(policy_logprobs=Column(row[0].numpy()), entropies=Column(row[1].numpy()))
        for number, row in zip(microbatch.rows, rows, strict=True)
    }
