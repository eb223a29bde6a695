"""Random schedules of runs with rollout controls.

Owns: which controls are drawn together, with which options. Combinations that a recipe may not have are never drawn.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tests.fakes.schedules import Schedule, draw_schedule

Options = Mapping[str, Any]

SETS = {
    "draw": (("partial",), ("concurrency",), ("partial", "concurrency")),
    "finished": (
        ("oversample",),
        ("partial",),
        ("concurrency",),
        ("oversample", "partial"),
        ("oversample", "concurrency"),
        ("partial", "concurrency"),
        ("oversample", "partial", "concurrency"),
    ),
    "synchronous": (("oversample",), ("tail",)),
}
"""Names that go together: in each order where the sampler runs ahead, and where it does not."""


def draw_controlled(seed: int) -> Schedule:
    """Longer than one without controls, so that what was put off comes back before it ends."""
    plain, lot = draw_schedule(seed), random.Random(f"controls {seed}")
    order = lot.choice(["draw", "finished", "finished"]) if plain.staleness else "finished"
    names = lot.choice(SETS[order if plain.staleness else "synchronous"])
    steps = lot.randint(4, 9) if plain.staleness == 0 else lot.randint(3, 6)
    seconds = steps * (plain.longest_seconds + plain.train_seconds)
    return replace(
        plain,
        order=order,
        steps=steps,
        num_tasks=plain.num_tasks + lot.randint(0, 4 * plain.groups_per_step),
        crashes=tuple(lot.random() * seconds for _ in range(lot.choice([0, 1, 2, 3]))),
        controls=tuple(_draw_options(name, plain, lot) for name in lot.sample(names, len(names))),
    )


def _draw_options(name: str, schedule: Schedule, lot: random.Random) -> Options:
    per_step, most = schedule.groups_per_step, (schedule.staleness + 1) * schedule.groups_per_step
    if name == "oversample":
        more = lot.randint(1, per_step * max(1, schedule.staleness))
        return {"name": name, "factor": (per_step + more) / per_step, "patience": lot.randint(1, 3)}
    if name == "tail":
        window, quantile = per_step * lot.randint(2, 4), lot.choice([0.2, 0.5, 0.8])
        return {"name": name, "quantile": quantile, "window": window, "patience": lot.randint(1, 3)}
    if name == "concurrency":
        return {"name": name, "kv_use": lot.choice([0.5, 0.95]), "least": lot.randint(1, most)}
    return {"name": name}
