"""How far sampler and trainer may be apart: by model family, dtype, engine, numerics, and the size of the model.

Owns: the rule, the table of its constants and the order of their lookup. Refuses: a budget above zero in exact mode.

The rule. Two sides round in other places: every layer adds errors of its own to the stream of states, and like steps
of a random walk they add up with the root of their number. Head and attention turn an error of states into one of
logits and of scores, which are sums over the width: with weights of one size both grow with it. So

    mean gap = unit(dtype) x sqrt(layers) x max(1, width / 1024)

and the budget is MARGIN times that. Below 1024 the width counts as 1024: trained weights of narrow models are larger.
At a temperature below 1 both are divided by it, as logits are. The vocabulary does not count: the normaliser of the
softmax averages over it. `python benchmarks/parity.py` measures the constants, and whether planted faults are still
seen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from temper.errors import UserError

ANY = "*"
MARGIN = 2.0
"""Budget over what honest rounding makes of a mean."""
USUAL_WIDTH = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Largest |sampled - recomputed| log-probability, in nats."""

    mean_gap: float
    """Largest mean gap over the drawn tokens that are compared."""
    max_gap: float
    """Largest gap of any one of the few hundred tokens that the proof compares. A whole batch has unluckier ones."""

    def at(self, temperature: float) -> Budget:
        """For log-probabilities at a temperature below 1: logits are divided by it, and so are their errors. Above 1
        the budget stays what it is."""
        wider = 1 / min(1.0, temperature)
        return Budget(mean_gap=wider * self.mean_gap, max_gap=wider * self.max_gap)


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthAndWidth:
    """What the rule asks of a model."""

    num_layers: int
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """What rounding does to log-probabilities, measured."""

    unit: float
    """Mean gap of one layer of width 1024."""
    tail: float
    """Largest gap of a few hundred tokens over their mean, at most."""

    def budget(self, size: DepthAndWidth) -> Budget:
        wider = max(1.0, size.width / USUAL_WIDTH)
        mean = MARGIN * self.unit * math.sqrt(size.num_layers) * wider
        return Budget(mean_gap=mean, max_gap=self.tail * mean)


EXACT = Budget(mean_gap=0.0, max_gap=0.0)
MEASURED_FAMILIES = ("llama", "qwen2", "qwen3", "gemma3_text", "olmo2", "qwen3_moe", "olmoe")
"""In float32 on the local engine."""

FAST: Mapping[tuple[str, str, str], Rounding] = {
    **{(family, "float32", "local"): Rounding(unit=1.5e-6, tail=100) for family in MEASURED_FAMILIES},
    (ANY, "bfloat16", "local"): Rounding(unit=2.4e-3, tail=60),
    (ANY, "float16", "local"): Rounding(unit=3e-4, tail=60),
    # Rollouts of float8 matrices: 4 significant bits, whatever the trainer's precision is.
    (ANY, "fp8", "local"): Rounding(unit=3e-2, tail=15),
    # Families and engines that nobody has measured. Engines of others round in more places than ours and the trainer.
    (ANY, "float64", ANY): Rounding(unit=2e-9, tail=100),
    (ANY, "float32", ANY): Rounding(unit=2.5e-5, tail=100),
    (ANY, "bfloat16", ANY): Rounding(unit=4.8e-3, tail=60),
    (ANY, "float16", ANY): Rounding(unit=6e-4, tail=60),
}
"""Constants by (model_type, dtype, engine)."""


def budget_of(family: str, dtype: str, engine: str, numerics: Literal["fast", "exact"], size: DepthAndWidth) -> Budget:
    """The budget of a model family (model_type of its configuration) and a dtype (without "torch.") on an engine.

    dtype: that of the coarser side, "fp8" where the sampler's matrices are held in it.
    """
    if numerics == "exact":
        return EXACT
    for key in ((family, dtype, engine), (family, dtype, ANY), (ANY, dtype, engine), (ANY, dtype, ANY)):
        if key in FAST:
            return FAST[key].budget(size)
    known = ", ".join(sorted({dtype for _, dtype, _ in FAST} - {"fp8"}))
    raise UserError(
        f"no budget for log-probability gaps in {dtype}. Use model.dtype {known}; or engine.max_logprob_gap"
    )
