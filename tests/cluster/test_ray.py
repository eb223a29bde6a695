"""Trainers and samplers that Ray places: over several raylets the same run as in one process."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from temper.cluster import ray as placing
from temper.commands.training import train as training
from temper.config import resolve
from temper.errors import UserError
from tests.commands.training.test_ranks import digest, gap, make_table, weights_of

ray = pytest.importorskip("ray", reason="ray is not installed; `make adapters` installs and runs this")


@pytest.fixture(scope="module")
def address() -> Any:
    """Three raylets on this machine, a cluster of its own."""
    from ray.cluster_utils import Cluster

    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    for _ in range(2):
        cluster.add_node(num_cpus=2)
    yield cluster.address
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(autouse=True)
def alone() -> Any:
    """Every run joins the cluster by itself."""
    yield
    ray.shutdown()


def placed(recipe: dict[str, Any], address: str, *, steps: tuple[int, int] = (4, 3), **cluster: Any) -> dict[str, Any]:
    keys = {"place": "ray", "address": address, "trainers": 2, "samplers": 2, **cluster}
    table = make_table(recipe, steps=steps, **keys)
    return {**table, "engine": {"place": "process", "numerics": "exact", "threads": 1}}


def run(table: dict[str, Any], folder: Path) -> dict[str, torch.Tensor]:
    training.train_stages(resolve(table, (), where="test"), run=folder)
    return weights_of(folder)


def test_two_trainers_and_two_samplers_over_raylets_train_what_one_process_trains(
    tiny_recipe: dict[str, Any], tmp_path: Path, address: str
) -> None:
    alone = run(make_table(tiny_recipe), tmp_path / "alone")
    assert gap(run(placed(tiny_recipe, address), tmp_path / "placed"), alone) < 1e-5


@pytest.mark.parametrize("victim", [0, 1], ids=["a trainer", "a sampler"])
def test_who_is_killed_is_replaced(
    tiny_recipe: dict[str, Any], tmp_path: Path, address: str, victim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = run(make_table(tiny_recipe, steps=(12, 4)), tmp_path / "alone")
    started: list[tuple[str, Any]] = []
    start = placing.RayPlace._start

    def noted(self: Any, bundle: int, name: str, *rest: Any) -> Any:
        process = start(self, bundle, name, *rest)
        started.append((name, process))
        return process

    monkeypatch.setattr(placing.RayPlace, "_start", noted)
    wanted = ("trainer rank", "sampler process")[victim]

    def kill() -> None:
        end = time.monotonic() + 120
        while time.monotonic() < end and not (tmp_path / "placed/checkpoints/1-rl/step-1").is_dir():
            time.sleep(0.02)
        next(process for name, process in started if name.startswith(wanted)).kill()

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    assert gap(run(placed(tiny_recipe, address, steps=(12, 4)), tmp_path / "placed"), alone) < 1e-5
    thread.join(10)
    assert len([name for name, _ in started if name.startswith(wanted)]) > victim + 1, "nobody was replaced"


def test_what_is_missing_is_named(
    tiny_recipe: dict[str, Any], tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placing, "ROOM_SECONDS", 2.0)
    with pytest.raises(UserError, match=r"no room within 2 s for 41 CPU \(5 in the cluster\): .* too few: CPU"):
        run(placed(tiny_recipe, address, samplers=40), tmp_path / "run")


def test_a_cluster_that_is_not_there_is_named(tiny_recipe: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r'cluster.address = "127.0.0.1:1": no Ray answers there'):
        run(placed(tiny_recipe, "127.0.0.1:1"), tmp_path / "run")


def test_without_an_address_a_cluster_is_started_and_ended(tiny_recipe: dict[str, Any], tmp_path: Path) -> None:
    alone = run(make_table(tiny_recipe), tmp_path / "alone")
    placed_alone = run(placed(tiny_recipe, "", trainers=1), tmp_path / "placed")
    assert digest(placed_alone) == digest(alone), "one trainer: samplers elsewhere change no bit"
    assert not ray.is_initialized()
