"""Sums that become metrics only at the end, so that microbatches and ranks never change a reported number.

Owns: how sums, means and extrema merge. Refuses: what is measured (objective.py) and where it is stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

Sums = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSums:
    """Everything is a 0-dimensional float64 tensor and stays on its device until finish().

    Merging is associative; gather the objects of all ranks and merge them in rank order.
    """

    totals: Sums = field(default_factory=dict)
    """Terms that already hold their share of the batch, such as losses: they add up."""
    sums: Sums = field(default_factory=dict)
    counts: Sums = field(default_factory=dict)
    """Same names as sums; the mean is their quotient."""
    maxima: Sums = field(default_factory=dict)
    minima: Sums = field(default_factory=dict)

    def merge(self, other: MetricSums) -> MetricSums:
        return MetricSums(
            totals=_joined(self.totals, other.totals, torch.add),
            sums=_joined(self.sums, other.sums, torch.add),
            counts=_joined(self.counts, other.counts, torch.add),
            maxima=_joined(self.maxima, other.maxima, torch.maximum),
            minima=_joined(self.minima, other.minima, torch.minimum),
        )

    def finish(self) -> dict[str, float]:
        """Divides. Metrics over nothing are left out; a NaN that was measured stays, for it is news."""
        totals, sums, counts, maxima, minima = self._on_host()
        finished = totals | {name: value / counts[name] for name, value in sums.items() if counts[name]}
        finished |= {name: value for name, value in maxima.items() if value != -math.inf}
        finished |= {name: value for name, value in minima.items() if value != math.inf}
        square = finished.pop("mismatch/weight_square_mean", 0.0)
        if square > 0:
            # Effective share of the tokens under the applied weights: (mean W)^2 / mean(W^2).
            finished["mismatch/ess"] = finished["mismatch/weight_mean"] ** 2 / square
        return finished

    def _on_host(self) -> list[dict[str, float]]:
        """All five as floats in one transfer: a host sync per metric would stall a GPU dozens of times per step."""
        parts = (self.totals, self.sums, self.counts, self.maxima, self.minima)
        tensors = [value for part in parts for value in part.values()]
        values = iter(torch.stack(tensors).tolist() if tensors else ())
        return [{name: next(values) for name in part} for part in parts]


def mean_sums(values: Mapping[str, Tensor], count: Tensor | None = None) -> MetricSums:
    """Sums of equally long vectors for means over their elements; `count` when fewer elements are real."""
    if not values:
        return MetricSums()
    stacked = torch.stack([value.detach().double() for value in values.values()])
    count = stacked.new_tensor(stacked.shape[1]) if count is None else count.double()
    return MetricSums(sums=dict(zip(values, stacked.sum(1), strict=True)), counts=dict.fromkeys(values, count))


def largest(values_T: Tensor) -> Tensor:
    """Maximum in float64; minus infinity of nothing, the neutral element."""
    values_T = values_T.detach().double()
    return values_T.amax() if len(values_T) else values_T.new_tensor(-float("inf"))


def smallest(values_T: Tensor) -> Tensor:
    return -largest(-values_T)


def _joined(left: Sums, right: Sums, combine: Callable[[Tensor, Tensor], Tensor]) -> dict[str, Tensor]:
    joined = dict(left)
    for name, value in right.items():
        joined[name] = combine(joined[name], value) if name in joined else value
    return joined
