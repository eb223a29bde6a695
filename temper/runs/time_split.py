"""Where the time of a step went, and how much of the hardware it used.

Owns: the phases of a step and that they add up to its wall clock, idle shares, model FLOPs utilisation (MFU).
Refuses: clocks; everything here is arithmetic on what others measured.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

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
COUNTED = ("kv_use", "preemptions", "prefix_hit_rate", "occupancy", "prefill_tok_s", "decode_tok_s")
"""What a sampler counts that is a metric as it is."""

PEAK_FLOPS: dict[str, dict[str, float]] = {
    "B200": {"bfloat16": 2250e12, "float16": 2250e12},
    "GH200": {"bfloat16": 989e12, "float16": 989e12, "float32": 67e12},
    "H200": {"bfloat16": 989e12, "float16": 989e12, "float32": 67e12},
    "H100": {"bfloat16": 989e12, "float16": 989e12, "float32": 67e12},
    "H100 NVL": {"bfloat16": 835e12, "float16": 835e12, "float32": 60e12},
    "H100 PCIE": {"bfloat16": 756e12, "float16": 756e12, "float32": 51e12},
    "A100": {"bfloat16": 312e12, "float16": 312e12, "float32": 19.5e12},
    "L40S": {"bfloat16": 362e12, "float16": 362e12, "float32": 91.6e12},
    "RTX 4090": {"bfloat16": 165e12, "float16": 165e12, "float32": 82.6e12},
}
"""By words of the name that torch gives a GPU, then dtype: dense FLOP/s of its data sheet, float32 accumulation."""
LESSER = {"D", "MIG", "LAPTOP", "MOBILE", "MAX"}
"""Words that make a GPU another one than its number says."""


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
        "sys/trainer_idle_frac": sum(phases.get(name, 0.0) for name in WAITING) / wall,
    }
    if "publish" in phases:
        metrics["sys/publish_latency"] = phases["publish"]
    if "decode_tokens" in stats and stats.get("decode_tok_s"):
        busy = stats["decode_tokens"] / stats["decode_tok_s"]  # seconds inside the sampler's own steps
        metrics["sys/rollout_idle_frac"] = min(1.0, max(0.0, 1.0 - busy / wall))
    if "running" in stats and "waiting" in stats:
        metrics["sys/inflight"] = stats["running"] + stats["waiting"]
    return metrics | {f"sys/{name}": stats[name] for name in COUNTED if name in stats}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """What the FLOPs of a token depend on."""

    active_parameters: float
    num_layers: int
    attention_width: int
    """Heads times their size."""

    def flops_per_token(self, length: int) -> float:
        """FLOPs of training on a token of a sequence this long: 6 N + 6 layers width length, for causal attention."""
        return 6.0 * self.active_parameters + 6.0 * self.num_layers * self.attention_width * length

    def flops(self, lengths: Iterable[int]) -> float:
        """FLOPs of training on rows of these lengths."""
        return sum(length * self.flops_per_token(length) for length in lengths)


def active_parameters(sizes: Mapping[str, int], *, num_experts: int = 0, experts_per_token: int = 0) -> float:
    """Parameters that work on one token: all by name, of experts only as many as are chosen."""
    share = experts_per_token / num_experts if num_experts else 1.0
    return sum(size * (share if ".experts." in f".{name}." else 1.0) for name, size in sizes.items())


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Peak FLOP/s of a GPU by the name torch gives it and the dtype of the weights; None when it is not known."""
    words = set(re.split(r"[^A-Z0-9]+", device_name.upper()))
    if words & LESSER:
        return None
    known = [name for name in PEAK_FLOPS if words >= set(name.split())]
    return PEAK_FLOPS[max(known, key=len)].get(dtype.removeprefix("torch.")) if known else None


def mfu(size: ModelSize, lengths: Iterable[int], seconds: float, peak: float | None) -> dict[str, float]:
    """sys/mfu of the training phases of a step; nothing, and not 0, where the peak is not known."""
    return {} if peak is None or seconds <= 0 else {"sys/mfu": size.flops(lengths) / (seconds * peak)}
