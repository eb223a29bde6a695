"""Samplers draw where the trainer does not compute, while there is such a place."""

from __future__ import annotations

import pytest

from temper.cluster.devices import sampler_devices, sampler_gpus, trainers_here

LAUNCHED = {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "MASTER_ADDR": "gpu7"}


def test_samplers_have_the_gpus_that_the_trainer_leaves() -> None:
    assert sampler_devices("cuda:0", 3, 4) == ["cuda:1", "cuda:2", "cuda:3"]
    assert sampler_devices("cuda:0", 3, 3) == ["cuda:1", "cuda:2", "cuda:1"]
    assert sampler_devices("cuda", 1, 2) == ["cuda:1"]
    assert sampler_devices("cuda:1", 2, 2) == ["cuda:0", "cuda:0"]


def test_every_trainer_has_a_gpu_of_its_own_before_samplers_have_one() -> None:
    assert sampler_devices("cuda:0", 2, 8, 6) == ["cuda:6", "cuda:7"]
    assert sampler_devices("cuda:0", 3, 4, 3) == ["cuda:3", "cuda:3", "cuda:3"]
    assert sampler_devices("cuda:0", 4, 4, 4) == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"], "in turn, on the same ones"


def test_where_there_is_no_other_place_they_share_it() -> None:
    assert sampler_devices("cuda:0", 2, 1) == ["cuda:0", "cuda:0"]
    assert sampler_devices("cpu", 2, 0) == ["cpu", "cpu"]


def test_samplers_over_several_gpus_have_neighbours_that_no_trainer_uses() -> None:
    assert sampler_gpus("cuda:0", 2, 5, 1, 2) == [(1, 2), (3, 4)]
    assert sampler_gpus("cuda:0", 3, 6, 1, 2) == [(1, 2), (3, 4), (1, 2)], "in turn"
    assert sampler_gpus("cuda:0", 1, 2, 1, 2) == [(0, 1)], "beside the trainer where too few are left"


@pytest.mark.parametrize(
    ("trainers", "gpus", "environment", "is_on_ray", "here"),
    [
        (4, 2, {}, False, 4),
        (8, 4, {**LAUNCHED, "LOCAL_WORLD_SIZE": "4"}, False, 4),
        (8, 1, {**LAUNCHED, "LOCAL_WORLD_SIZE": "4"}, False, 4),
        (8, 4, LAUNCHED, False, 4),
        (8, 1, {}, True, 1),
    ],
)
def test_trainers_of_this_machine_are_children_or_those_that_a_launcher_started_here(
    trainers: int, gpus: int, environment: dict[str, str], is_on_ray: bool, here: int
) -> None:
    assert trainers_here(trainers, gpus, environment, is_on_ray=is_on_ray) == here
