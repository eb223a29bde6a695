"""GPUs of one machine, shared out between the trainer and sampler processes.

Owns: the arithmetic. Refuses: looking what there is.
"""

from __future__ import annotations

from collections.abc import Mapping

from temper.cluster.ranks import find_place

LOCAL_WORLD = "LOCAL_WORLD_SIZE"
"""How many ranks torchrun started on this machine; SLURM does not say."""


def trainers_here(trainers: int, num_gpus: int, environment: Mapping[str, str], *, is_on_ray: bool) -> int:
    """Of so many, those on this machine: all where they are children of this process. Ray gives each a GPU."""
    if is_on_ray:
        return min(trainers, num_gpus)
    if find_place(environment).is_launched:
        local = environment.get(LOCAL_WORLD, "")
        return min(trainers, int(local) if local.isdecimal() else num_gpus)
    return trainers


def sampler_devices(device: str, num_samplers: int, num_gpus: int, num_trainers: int = 1) -> list[str]:
    """Of each sampler: a GPU that no trainer uses, in turn; beside trainers where there is no other. On a CPU all are
    there. Trainers have the GPUs from the first one's on."""
    if device == "cpu" or num_gpus < 2:
        return [device] * num_samplers
    return [f"cuda:{gpus[0]}" for gpus in sampler_gpus(device, num_samplers, num_gpus, num_trainers)]


def sampler_gpus(
    device: str, num_samplers: int, num_gpus: int, num_trainers: int = 1, each: int = 1
) -> list[tuple[int, ...]]:
    """The same for samplers that share out their matrices over `each` GPUs, side by side."""
    own = int(device.partition(":")[2] or 0)
    trainers = {(own + rank) % num_gpus for rank in range(num_trainers)}
    free = [number for number in range(num_gpus) if number not in trainers]
    free = free if len(free) >= each else list(range(num_gpus))
    groups = [tuple(free[start : start + each]) for start in range(0, len(free) - each + 1, each)]
    return [groups[place % len(groups)] for place in range(num_samplers)]
