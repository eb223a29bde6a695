"""Sums that become metrics only at the end, so that microbatches and ranks never change a reported number.

Owns: how sums, means, extrema and histograms merge. Refuses: what is measured (objective.py) and where it is stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, islice

import torch
from torch import Tensor

Sums = Mapping[str, Tensor]

GRID_STEP, GRID_REACH = 0.01, 5.0
"""Histograms of logarithms: bins of 0.01 around its multiples, so a percentile of a ratio is known to 0.5%, and a ratio
of exactly 1 stays exactly 1. Whatever lies beyond exp(-5) or exp(5) counts as that."""
PERCENTILE = 99
MOMENTS = ("behavior", "proximal", "behavior_square", "proximal_square", "product")
"""Means of probabilities, of their squares and of their product, for the correlation."""
SMALLEST_SPREAD = 1e-24
"""Product of two variances below which a correlation would be one of rounding errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSums:
    """Everything but a histogram is a 0-dimensional float64 tensor; all stay on their device until finish().

    Merging is associative; gather the objects of all ranks and merge them in rank order.
    """

    totals: Sums = field(default_factory=dict)
    """Terms that already hold their share of the batch, such as losses: they add up."""
    sums: Sums = field(default_factory=dict)
    counts: Sums = field(default_factory=dict)
    """Same names as sums; the mean is their quotient."""
    maxima: Sums = field(default_factory=dict)
    minima: Sums = field(default_factory=dict)
    histograms: Sums = field(default_factory=dict)
    """Counts by bin of a logarithm (log_histogram); finished to the 99th percentile of what it is the logarithm of."""
    loads: Sums = field(default_factory=dict)
    """Tokens by expert, by the number of the layer; finished to the largest over the mean, averaged over layers."""

    def merge(self, other: MetricSums) -> MetricSums:
        return MetricSums(
            totals=_joined(self.totals, other.totals, torch.add),
            sums=_joined(self.sums, other.sums, torch.add),
            counts=_joined(self.counts, other.counts, torch.add),
            maxima=_joined(self.maxima, other.maxima, torch.maximum),
            minima=_joined(self.minima, other.minima, torch.minimum),
            histograms=_joined(self.histograms, other.histograms, torch.add),
            loads=_joined(self.loads, other.loads, torch.add),
        )

    def finish(self) -> dict[str, float]:
        """Divides. Metrics over nothing are left out; a NaN that was measured stays, for it is news."""
        (totals, sums, counts, maxima, minima), histograms = self._on_host()
        finished = totals | {name: value / counts[name] for name, value in sums.items() if counts[name]}
        finished |= {name: value for name, value in maxima.items() if value != -math.inf}
        finished |= {name: value for name, value in minima.items() if value != math.inf}
        percentiles = {name: _percentile(bins) for name, bins in histograms.items() if any(bins)}
        return _derived(finished | percentiles | self._crowding())

    def _crowding(self) -> dict[str, float]:
        crowded = [load.max() / load.mean() for load in self.loads.values() if load.any()]
        return {"route/load_max": float(torch.stack(crowded).mean())} if crowded else {}

    def _on_host(self) -> tuple[list[dict[str, float]], dict[str, list[float]]]:
        """All as floats in one transfer: a host sync per metric would stall a GPU dozens of times per step."""
        parts = (self.totals, self.sums, self.counts, self.maxima, self.minima)
        tensors = [value.reshape(1) for part in parts for value in part.values()]
        tensors += self.histograms.values()
        values = iter(torch.cat(tensors).tolist() if tensors else ())
        scalars = [{name: next(values) for name in part} for part in parts]
        return scalars, {name: list(islice(values, len(bins))) for name, bins in self.histograms.items()}


def _derived(finished: dict[str, float]) -> dict[str, float]:
    """What only whole means give: effective share of the tokens, correlation. Takes out the moments it used."""
    square = finished.pop("mismatch/weight_square_mean", 0.0)
    if square > 0:
        # Effective share of the tokens under the applied weights: (mean W)^2 / mean(W^2).
        finished["mismatch/ess"] = finished["mismatch/weight_mean"] ** 2 / square
    moments = [finished.pop(f"mismatch/moment_{name}", math.nan) for name in MOMENTS]
    behavior, proximal, behavior_square, proximal_square, product = moments
    spread = (behavior_square - behavior**2) * (proximal_square - proximal**2)
    if spread > SMALLEST_SPREAD:
        finished["mismatch/corr"] = (product - behavior * proximal) / math.sqrt(spread)
    return finished


def _percentile(bins: list[float]) -> float:
    """The value at rank ceil(n * PERCENTILE / 100) of the sorted values, rounded to the grid."""
    rank = -(-round(sum(bins)) * PERCENTILE // 100)
    place = next(place for place, reached in enumerate(accumulate(bins)) if reached >= rank)
    return math.exp(place * GRID_STEP - GRID_REACH) if 2 * place != len(bins) - 1 else 1.0


def log_histogram(logarithms_T: Tensor) -> Tensor:
    """Counts in float64 by bin. By sorting: adding at places runs in no fixed order on a GPU."""
    num_bins = round(2 * GRID_REACH / GRID_STEP) + 1
    places_T = ((logarithms_T.detach().double() + GRID_REACH) / GRID_STEP).round().clamp(0, num_bins - 1)
    ends = torch.searchsorted(places_T.sort().values, torch.arange(num_bins, device=places_T.device) + 0.5)
    return torch.diff(ends, prepend=ends.new_zeros(1)).double()


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
