"""GPUs of one machine, shared out between the trainer and sampler processes.

Owns: the arithmetic. Refuses: looking what there is.
"""

from __future__ import annotations


def sampler_devices(device: str, num_samplers: int, num_gpus: int, num_trainers: int = 1) -> list[str]:
    """Of each sampler: a GPU that no trainer uses, in turn; beside trainers where there is no other. On a CPU all are
    there. Trainers have the GPUs from the first one's on."""
    if device == "cpu" or num_gpus < 2:
        return [device] * num_samplers
    own = int(device.partition(":")[2] or 0)
    trainers = {(own + rank) % num_gpus for rank in range(num_trainers)}
    free = [number for number in range(num_gpus) if number not in trainers] or list(range(num_gpus))
    return [f"cuda:{free[place % len(free)]}" for place in range(num_samplers)]
