"""Processes of a run are counted on the GPUs and the host that they share."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from temper.build.machine import spread
from temper.config.cluster import ClusterConfig
from tests.planning.conftest import MakeWorkload

LAUNCHED = {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "MASTER_ADDR": "gpu7"}


@pytest.mark.parametrize(
    ("cluster", "gpus", "environment", "here", "on_one"),
    [
        ({"trainers": 4}, 4, {}, 4, 1),
        ({"trainers": 4}, 2, {}, 4, 2),
        ({"trainers": 3}, 2, {}, 3, 2),
        ({"trainers": 8}, 4, {**LAUNCHED, "LOCAL_WORLD_SIZE": "4"}, 4, 1),
        ({"trainers": 8}, 1, {**LAUNCHED, "LOCAL_WORLD_SIZE": "4"}, 4, 4),
        ({"trainers": 8}, 4, LAUNCHED, 4, 1),
        ({"trainers": 8, "place": "ray"}, 1, {}, 1, 1),
    ],
    ids=str,
)
def test_trainers_share_what_there_is(
    cluster: Mapping[str, object], gpus: int, environment: Mapping[str, str], here: int, on_one: int,
    make_workload: MakeWorkload,
) -> None:  # fmt: skip
    config = ClusterConfig.model_validate(cluster)
    work = spread(make_workload("1.5b", trainers=config.trainers), config, gpus, environment)
    assert (work.machine_trainers, work.trainers_per_gpu, work.samplers_per_gpu) == (here, on_one, 1)


def test_samplers_share_the_gpus_that_trainers_leave(make_workload: MakeWorkload) -> None:
    config = ClusterConfig(trainers=2, samplers=5)
    work = make_workload("1.5b", trainers=2, num_samplers=5, engine="apart")
    assert spread(work, config, 4, {}).samplers_per_gpu == 3
    assert spread(work, config, 8, {}).samplers_per_gpu == 1
    assert spread(work, config, 0, {}) == work, "on a CPU nothing is planned"
