"""Processes of a run are counted on the GPUs that they share."""

from __future__ import annotations

import pytest

from temper.planning.workload import spread
from tests.planning.conftest import MakeWorkload


@pytest.mark.parametrize(("here", "gpus", "on_one"), [(4, 4, 1), (4, 2, 2), (3, 2, 2), (4, 1, 4)])
def test_trainers_share_what_gpus_there_are(here: int, gpus: int, on_one: int, make_workload: MakeWorkload) -> None:
    work = spread(make_workload("1.5b", trainers=8), here, gpus)
    assert (work.machine_trainers, work.trainers_per_gpu, work.samplers_per_gpu) == (here, on_one, 1)


def test_samplers_share_the_gpus_that_trainers_leave(make_workload: MakeWorkload) -> None:
    work = make_workload("1.5b", trainers=2, num_samplers=5, engine="apart")
    assert spread(work, 2, 4).samplers_per_gpu == 3
    assert spread(work, 2, 8).samplers_per_gpu == 1
    assert spread(work, 2, 0) == work, "on a CPU nothing is planned"
