"""Bytes that training holds for every parameter, before activations.

Owns: the sum. Refuses: measuring; benchmarks/optimizer.py does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from temper.trainer.adamw.moments import SMALL_TENSOR, States, formats_for

REMAINDER_BYTES = {torch.bfloat16: 2, torch.float16: 4}
"""Of a float32 master, what its weight leaves out (masters.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BytesPerParameter:
    """Of one trained parameter in a matrix; norms and biases have wide moments and weigh nothing."""

    weights: float
    gradients: float
    """Summed over microbatches, in float32."""
    masters: float
    """What masters need beside the weights."""
    moments: float
    offload: bool
    """Whether masters and moments are in the memory of the host."""

    @property
    def host(self) -> float:
        return self.masters + self.moments if self.offload else 0.0

    @property
    def device(self) -> float:
        return self.weights + self.gradients + self.masters + self.moments - self.host


def bytes_per_parameter(
    states: States, *, offload: bool = False, dtype: torch.dtype = torch.bfloat16
) -> BytesPerParameter:
    """For weights in `dtype`: bfloat16 and float16 have masters, float32 and float64 are their own."""
    master = torch.promote_types(dtype, torch.float32)
    formats = formats_for(states, torch.Size([1, SMALL_TENSOR]), master)
    return BytesPerParameter(
        weights=dtype.itemsize,
        gradients=master.itemsize,
        masters=REMAINDER_BYTES.get(dtype, 0),
        moments=sum(each.bytes_per_value for each in formats),
        offload=offload,
    )
