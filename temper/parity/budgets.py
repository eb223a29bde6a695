"""How far sampler and trainer may be apart: checked-in budgets by model family, dtype, engine and numerics.

Owns: the table and the order of its lookup. Refuses: a budget above zero in exact mode.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from temper.errors import UserError

ANY = "*"


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Largest |sampled - recomputed| log-probability, in nats."""

    mean_gap: float
    """Largest mean gap over the drawn tokens that are compared."""
    max_gap: float
    """Largest gap of any one of the few hundred tokens that the proof compares. A whole batch has unluckier ones."""


EXACT = Budget(mean_gap=0.0, max_gap=0.0)
MEASURED_FAMILIES = ("llama", "qwen2", "qwen3", "gemma3_text", "olmo2", "qwen3_moe", "olmoe")
"""In float32 on the local engine: means of at most 7e-7 at 3 layers of 64 and 1.3e-6 at 12 layers of 256."""

FAST: Mapping[tuple[str, str, str], Budget] = {
    **{(family, "float32", "local"): Budget(mean_gap=1e-5, max_gap=1e-3) for family in MEASURED_FAMILIES},
    # For families nobody has measured yet.
    (ANY, "float64", ANY): Budget(mean_gap=1e-8, max_gap=1e-6),
    (ANY, "float32", ANY): Budget(mean_gap=1e-4, max_gap=1e-2),
    (ANY, "bfloat16", ANY): Budget(mean_gap=0.03, max_gap=2.0),
}
"""Budgets by (model_type, dtype, engine)."""


def budget_of(family: str, dtype: str, engine: str, numerics: Literal["fast", "exact"]) -> Budget:
    """The budget of a model family (model_type of its configuration) and a dtype (without "torch.") on an engine."""
    if numerics == "exact":
        return EXACT
    for key in ((family, dtype, engine), (family, dtype, ANY), (ANY, dtype, engine), (ANY, dtype, ANY)):
        if key in FAST:
            return FAST[key]
    known = ", ".join(sorted({dtype for _, dtype, _ in FAST}))
    raise UserError(
        f"no budget for log-probability gaps in {dtype}. Use model.dtype {known}; or engine.max_logprob_gap"
    )
