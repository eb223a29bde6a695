"""GPUs of one machine, shared out between the trainer and sampler processes.

Owns: the arithmetic. Refuses: looking what there is.
"""

from __future__ import annotations


def sampler_devices(device: str, num_samplers: int, num_gpus: int) -> list[str]:
    """Of each sampler: a GPU that the trainer does not use, in turn; beside it where there is no other. On a CPU all
    are there."""
    if device == "cpu" or num_gpus < 2:
        return [device] * num_samplers
    own = int(device.partition(":")[2] or 0)
    others = [number for number in range(num_gpus) if number != own]
    return [f"cuda:{others[place % len(others)]}" for place in range(num_samplers)]
