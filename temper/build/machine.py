"""How the processes of a run are spread over the GPUs and the memory of this machine.

Owns: the counts that a plan for this machine needs. Refuses: starting them (cluster/), and their bytes (planning/).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from temper.cluster.ranks import find_place
from temper.config.cluster import ClusterConfig
from temper.planning.workload import Workload

LOCAL_WORLD = "LOCAL_WORLD_SIZE"
"""How many ranks torchrun started on this machine; SLURM does not say."""


def spread(work: Workload, cluster: ClusterConfig, gpus: int, environment: Mapping[str, str] = os.environ) -> Workload:
    """The same, with what processes share where there are so many GPUs (0: nobody looks, for a CPU is not planned)."""
    if gpus == 0:
        return work
    here = _trainers_here(cluster, gpus, environment)
    free = (gpus - here) // work.engine_gpus
    return replace(
        work,
        machine_trainers=here,
        trainers_per_gpu=-(-here // gpus),
        samplers_per_gpu=-(-work.num_samplers // free) if work.engine == "apart" and free > 0 else 1,
    )


def _trainers_here(cluster: ClusterConfig, gpus: int, environment: Mapping[str, str]) -> int:
    """Of the trainers, those on this machine: all where they are children of this process. Ray gives each a GPU."""
    if cluster.is_on_ray:
        return min(cluster.trainers, gpus)
    if find_place(environment).is_launched:
        local = environment.get(LOCAL_WORLD, "")
        return min(cluster.trainers, int(local) if local.isdecimal() else gpus)
    return cluster.trainers
