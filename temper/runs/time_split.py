"""Where the time of a step went.

Owns: the phases of a step and that they add up to its wall clock, idle shares. Refuses: clocks; everything here is
arithmetic on what others measured. FLOPs: flops.py.
"""

from __future__ import annotations

from collections.abc import Mapping

PHASES: dict[str, str] = {
    "rollout": "The trainer waits for the groups of this step; drawing and scoring overlap in it",
    "data": "Supervised examples are drawn and encoded",
    "credit": "Passes that credit needs, advantages, rewards that learn; what was drawn is laid end to end",
    "pack": "Rows are laid end to end",
    "reference": "Log-probabilities of the reference and the teacher",
    "proximal": "Log-probabilities of the policy when the batch started",
    "critic": "The value model is trained",
    "measure": "What the objective takes from the whole batch",
    "forward_backward": "Gradient of all microbatches",
    "optimizer": "Clipping, update, rounding",
    "trace": "What the policy thought of each token is copied for the dashboard",
    "train_other": "The rest of training",
    "publish": "New weights reach the samplers",
    "canary": "Sampler and trainer are compared after a publication; before an evaluation, judges with their labels",
    "warm_up": "Before step 1, on a GPU: kernels are compiled, decode steps recorded, a largest microbatch is tried",
    "parity": "Before step 1: sampler and trainer are compared, rows are proven apart",
    "record": "After the step before: its report goes to the run store and the display",
    "evaluate": "After the step before, or before step 1: held-out scores",
    "checkpoint": "After the step before: its checkpoint is written",
    "release": "After the step before: the staleness bound moves on",
    "other": "Nothing of the above; what is missing to the wall clock",
}
WAITING = ("rollout", "data")
TRAINING = ("proximal", "forward_backward", "optimizer")
"""Phases whose seconds count for throughput and MFU of training."""
COUNTED = (
    "kv_use", "preemptions", "prefix_hit_rate", "occupancy", "prefill_tok_s", "decode_tok_s", "decode_tokens",
    "samplers", "sampler_restarts", "reissued", "rescued",
)  # fmt: skip
"""What a sampler counts that is a metric as it is."""


def balanced(phases: Mapping[str, float], wall_seconds: float) -> dict[str, float]:
    """The phases with "other", so that they add up to the wall clock.

    Never less than 0: phases that overlap then add up to more than the wall clock, and are found out.
    """
    return {**phases, "other": max(0.0, wall_seconds - sum(phases.values()))}


def time_metrics(phases: Mapping[str, float], stats: Mapping[str, float]) -> dict[str, float]:
    """sys/ metrics of a step from its balanced phases and what the sampler counted during it.

    The only reader of protocols.Sampler.stats. What a sampler does not count is left out: a 0 would be a claim.
    """
    wall = max(sum(phases.values()), 1e-9)
    metrics = {
        "sys/step_time": wall,
        "sys/trainer_idle": sum(phases.get(name, 0.0) for name in WAITING) / wall,
    }
    if "publish" in phases:
        metrics["sys/publish_latency"] = phases["publish"]
    if "drawing_seconds" in stats:
        metrics["sys/sampler_idle"] = max(0.0, 1.0 - stats["drawing_seconds"] / wall)
    if "running" in stats and "waiting" in stats:
        metrics["sys/inflight"] = stats["running"] + stats["waiting"]
    return metrics | {f"sys/{name}": stats[name] for name in COUNTED if name in stats}
