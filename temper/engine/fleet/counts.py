"""What the samplers of a fleet counted, as if they were one.

Owns: which counts add up. Refuses: counting.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

SUMS = ("prefill_tokens", "decode_tokens", "preemptions", "running", "waiting", "prefill_tok_s", "decode_tok_s")
MEANS = ("occupancy", "prefix_hit_rate")
PEAKS = ("kv_use",)


@dataclass(slots=True)
class Losses:
    """What lost samplers have cost since somebody asked last."""

    sampler_restarts: int = 0
    reissued: int = 0
    """Requests that went to another."""
    rescued: int = 0
    """Their tokens that did."""

    def take(self) -> dict[str, float]:
        told = {name: float(getattr(self, name)) for name in ("sampler_restarts", "reissued", "rescued")}
        self.sampler_restarts = self.reissued = self.rescued = 0
        return told


def together(counts: Sequence[Mapping[str, float]], num_samplers: int) -> dict[str, float]:
    """Names that nobody counted are left out. A mean is over those who counted, by the tokens that each of them read
    where that is known: an idle sampler's rate says nothing. Seconds with something to draw are a mean over all
    samplers: who is lost draws nothing, and one that draws the tail alone leaves the others idle."""
    found = {"drawing_seconds": sum(each.get("drawing_seconds", 0.0) for each in counts) / num_samplers}
    for name in SUMS:
        if values := [each[name] for each in counts if name in each]:
            found[name] = sum(values)
    for name in PEAKS:
        if values := [each[name] for each in counts if name in each]:
            found[name] = max(values)
    for name in MEANS:
        if pairs := [(each[name], _work(each)) for each in counts if name in each]:
            total = sum(weight for _, weight in pairs)
            found[name] = sum(value * weight for value, weight in pairs) / total if total else pairs[0][0]
    return found


def tell_together(num: int, tell: Callable[[int, int], None]) -> list[Callable[[int, int], None]]:
    """For each of so many whom it tells how far it is; `tell` hears how far all are."""
    done = [(0, 1)] * num

    def teller(number: int) -> Callable[[int, int], None]:
        def told(part: int, total: int) -> None:
            done[number] = (part, total)
            tell(sum(part for part, _ in done), sum(total for _, total in done))

        return told

    return [teller(number) for number in range(num)]


def _work(counted: Mapping[str, float]) -> float:
    return counted.get("prefill_tokens", 0.0) + counted.get("decode_tokens", 0.0)
