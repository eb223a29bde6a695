"""Trainers and samplers that Ray places: over several raylets the same run as in one process."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from temper.cluster import ray as placing
from temper.cluster import remote
from temper.commands.training import train as training
from temper.config import resolve
from temper.engine.fleet.member import SamplerLost
from temper.errors import UserError
from tests.commands.training.test_ranks import digest, gap, make_learnable, make_table, require_learned, weights_of

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


def test_two_trainers_and_two_samplers_over_raylets_learn(
    tiny_recipe: dict[str, Any], tmp_path: Path, address: str
) -> None:
    cluster = {"place": "ray", "address": address, "trainers": 2, "samplers": 2}
    training.train_stages(resolve(make_learnable(tiny_recipe, cluster), (), where="test"), run=tmp_path / "run")
    require_learned(tmp_path / "run")


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


class Nodes:
    """A cluster whose nodes have room for one process each, and whose head has none."""

    def __init__(self, num: int) -> None:
        from ray.cluster_utils import Cluster

        noticed = {
            "health_check_initial_delay_ms": 1000, "health_check_period_ms": 500, "health_check_failure_threshold": 3,
        }  # fmt: skip
        head = {"num_cpus": 0, "include_dashboard": False, "_system_config": noticed}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.nodes = {self._add() for _ in range(num)}
        self.removed: list[Any] = []

    def _add(self) -> Any:
        return self.cluster.add_node(num_cpus=1)

    def cut_one_that_draws(self, folder: Path) -> None:
        """A raylet that is killed takes what runs on it along. Waits for a checkpoint of the stage that draws."""
        end = time.monotonic() + 120
        while time.monotonic() < end and not (folder / "checkpoints/1-rl/step-2").is_dir():
            time.sleep(0.02)
        groups = ray.util.placement_group_table().values()
        drawing = {node for each in groups for node in each["bundles_to_node_id"].values()}
        node = next(node for node in self.nodes if node.node_id in drawing)
        self.cluster.remove_node(node, allow_graceful=False)
        self.removed.append(node)

    def run(self, table: dict[str, Any], folder: Path) -> dict[str, torch.Tensor]:
        """While one of the nodes dies."""
        thread = threading.Thread(target=self.cut_one_that_draws, args=(folder,), daemon=True)
        thread.start()
        try:
            return run(table, folder)
        finally:
            thread.join(10)
            ray.shutdown()
            self.cluster.shutdown()


def test_when_a_node_dies_its_sampler_is_started_on_another(tiny_recipe: dict[str, Any], tmp_path: Path) -> None:
    nodes = Nodes(3)
    table = placed(tiny_recipe, nodes.cluster.address, steps=(2, 8), trainers=1)
    assert digest(nodes.run(table, tmp_path / "placed")) == digest(
        run(make_table(tiny_recipe, steps=(2, 8)), tmp_path / "alone")
    )
    assert nodes.removed, "no node died"


def test_when_the_last_node_with_room_dies_the_run_ends_and_says_what_is_missing(
    tiny_recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "CALL_SECONDS", 30.0)  # a process imports torch for 12 where cores are busy
    nodes = Nodes(1)
    table = placed(tiny_recipe, nodes.cluster.address, steps=(2, 200), trainers=1, samplers=1, max_restarts=1)
    with pytest.raises(
        SamplerLost,
        match=r"after 1 restarts each: the sampler process: it did not come: nothing for 30 s \(it needs 1 CPU, and "
        r"the cluster has [01]: a node may be gone\)",
    ):
        nodes.run(table, tmp_path / "placed")
    assert nodes.removed, "no node died"


def test_what_is_missing_is_named(
    tiny_recipe: dict[str, Any], tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placing, "ROOM_SECONDS", 2.0)
    with pytest.raises(UserError, match=r"no room within 2 s for 41 CPU \(5 in the cluster\): .* too few: CPU"):
        run(placed(tiny_recipe, address, samplers=40), tmp_path / "run")


def test_a_cluster_that_is_not_there_is_named(tiny_recipe: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r'cluster.address = "127.0.0.1:1": no Ray answers there'):
        run(placed(tiny_recipe, "127.0.0.1:1"), tmp_path / "run")


# Last: a process of which a cluster was started cannot join another afterwards. Ray 2.60 ends its actors at once.


def test_a_cluster_of_our_own_does_not_give_away_the_gpu_of_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(placing.VISIBLE, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    place = placing.RayPlace(placing.OWN_CLUSTER, ranks=1, samplers=1, gpus=1)
    try:
        assert placing.VISIBLE not in os.environ, "this process sees all of them"
        for bundle in range(2):
            told = f"echo ${placing.VISIBLE} > {tmp_path / str(bundle)}"
            process = place._start(bundle, "one", {}, subprocess.call, ["sh", "-c", told])
            assert process.wait(60) == "it ended, as it was told to"
    finally:
        place.close()
    assert sorted((tmp_path / str(bundle)).read_text().strip() for bundle in range(2)) == ["1", "2"]


def test_without_an_address_a_cluster_is_started_and_ended(tiny_recipe: dict[str, Any], tmp_path: Path) -> None:
    alone = run(make_table(tiny_recipe), tmp_path / "alone")
    placed_alone = run(placed(tiny_recipe, "", trainers=1), tmp_path / "placed")
    assert digest(placed_alone) == digest(alone), "one trainer: samplers elsewhere change no bit"
    assert not ray.is_initialized()
