"""Trainer ranks and sampler processes where Ray has room for them.

Owns: one placement group for all of a run, what is said when there is no room, their ends. Refuses: what they do; the
mains are those of processes of one machine. Ray is imported inside functions: it is an extra.
"""

from __future__ import annotations

import importlib
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from temper.cluster.remote import Callback, serve_caller
from temper.engine.process.client import ProcessSampler
from temper.engine.process.sent_weights import SentWeights
from temper.errors import UserError, install_line

ROOM_SECONDS = 300.0
"""For Ray to find room for everybody."""
ANSWER_SECONDS = 10.0
JOIN_SECONDS = 90.0
"""For a cluster to let this process in, or to start."""
OWN_ROOM_SECONDS = 30.0
"""In a cluster that was started for this run: what it lacks does not come."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
OWN_CLUSTER = ""
"""Address of a cluster that is started here and ends with the run."""


class RayProcess:
    """One of them. Implements what ProcessSampler and Ranks ask of a process."""

    def __init__(self, name: str, actor: Any, work: Any) -> None:
        self.name, self._actor, self._work = name, actor, work

    def wait(self, seconds: float) -> str | None:
        """How it ended. None: it still runs."""
        import ray

        done, _ = ray.wait([self._work], timeout=max(seconds, 1e-3))
        if not done:
            return None
        try:
            ray.get(self._work, timeout=10.0)
        except Exception as error:
            return f"it ended: {error}"
        return "it ended, as it was told to"

    def kill(self) -> None:
        import ray

        ray.kill(self._actor)


def require_ray() -> None:
    """UserError where it is not installed."""
    if find_spec("ray") is None:
        raise UserError(f'cluster.place = "ray" needs Ray: {install_line("ray")}')


class RayPlace:
    """Room for the trainers and samplers of one run. Constructed when Ray has found it."""

    def __init__(self, address: str, *, ranks: int, samplers: int, gpus: int) -> None:
        """address: of a cluster that runs; OWN_CLUSTER: one is started. ranks: trainers beside this process. gpus: of
        each process, 0 or 1."""
        require_ray()
        import ray

        self._starts_own = not ray.is_initialized() and address == OWN_CLUSTER
        if not ray.is_initialized():
            os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
            root = str(Path(__file__).resolve().parents[2])
            path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)
            _require_answer(address)
            own = {"num_cpus": max(os.cpu_count() or 1, ranks + samplers), "include_dashboard": False}
            with _gpus_of_others(gpus * (ranks + samplers) if self._starts_own else 0) as others:
                begin = partial(
                    ray.init,
                    address=address or "local",
                    log_to_driver=False,
                    runtime_env={"env_vars": {"PYTHONPATH": path}},
                    **((own | others) if self._starts_own else {}),
                )
                _join_cluster(begin, address)
        self._ray = ray
        self._num_ranks = ranks
        need: dict[str, float] = {"CPU": 1.0} | ({"GPU": float(gpus)} if gpus else {})
        self._need = need
        self._group = _find_room([need] * (ranks + samplers), ROOM_SECONDS if address else OWN_ROOM_SECONDS)
        self.host: str = ray.util.get_node_ip_address()

    def start_rank(self, rank: int, name: str, main: str, environment: Mapping[str, str]) -> RayProcess:
        """main: "module:function" without arguments."""
        return self._start(rank - 1, name, environment, _call, main)

    def start_sampler(
        self, number: int, name: str, order: str, environment: Mapping[str, str], silent_seconds: float
    ) -> ProcessSampler:
        """One that opens what the order says. It is stale until weights are published. silent_seconds: after which each
        side gives up the other."""
        callback = Callback(silent_seconds, self._describe_room)
        where = (self.host, callback.port, callback.token, silent_seconds)
        process = self._start(self._num_ranks + number, name, environment, serve_caller, *where)
        return ProcessSampler(callback, SentWeights(), process, order=order)

    def _describe_room(self) -> str:
        there = self._ray.cluster_resources()
        told = (f"{count:g} {name}, and the cluster has {there.get(name, 0):g}" for name, count in self._need.items())
        return f" (it needs {'; '.join(told)}: a node may be gone)"

    def close(self) -> None:
        self._ray.util.remove_placement_group(self._group)
        if self._starts_own:
            self._ray.shutdown()

    def _start(self, bundle: int, name: str, environment: Mapping[str, str], work: Any, *arguments: Any) -> RayProcess:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        placed = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        actor = self._ray.remote(Role).options(
            num_cpus=self._need["CPU"],
            num_gpus=self._need.get("GPU", 0),
            scheduling_strategy=placed,
            runtime_env={"env_vars": dict(environment)},
        )
        started = actor.remote()
        return RayProcess(name, started, started.do.remote(work, *arguments))


class Role:
    """What a process of Ray does, until it ends."""

    def do(self, work: Any, *arguments: Any) -> None:
        work(*arguments)


def _call(main: str) -> None:
    module, _, name = main.partition(":")
    getattr(importlib.import_module(module), name)()


@contextmanager
def _gpus_of_others(needed: int) -> Iterator[dict[str, int]]:
    """What a cluster is told of the GPUs of this machine, where it begins inside. This process trains on the first of
    them, which Ray would give away: it sees the others alone, where they are enough."""
    visible = os.environ.get(VISIBLE)
    names = visible.split(",") if visible else [str(number) for number in range(torch.cuda.device_count())]
    if not 0 < needed < len(names):
        yield {}
        return
    os.environ[VISIBLE] = ",".join(names[1:])
    try:
        yield {"num_gpus": len(names) - 1}
    finally:
        os.environ.pop(VISIBLE)
        if visible is not None:
            os.environ[VISIBLE] = visible


def _require_answer(address: str) -> None:
    """Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return  # "", "auto", "local"
    try:
        socket.create_connection((host, int(port)), timeout=ANSWER_SECONDS).close()
    except OSError as error:
        raise UserError(f'cluster.address = "{address}": no Ray answers there: {error}') from error


def _join_cluster(begin: Callable[[], object], address: str) -> None:
    """Waits for: Ray, for JOIN_SECONDS. Something else that listens there is asked by Ray without end."""
    failed: list[Exception] = []

    def work() -> None:
        try:
            begin()
        except Exception as error:  # Ray's own, of many types
            failed.append(error)

    thread = threading.Thread(target=work, name="joining a Ray cluster", daemon=True)
    thread.start()
    thread.join(JOIN_SECONDS)
    if thread.is_alive() or failed:
        why = failed[0] if failed else f"what listens there has said nothing for {JOIN_SECONDS:g} s"
        where = f'cluster.address = "{address}": no Ray answers there' if address else "Ray could not be started here"
        raise UserError(f"{where}: {why}") from (failed[0] if failed else None)


def _find_room(bundles: Sequence[Mapping[str, float]], seconds: float) -> Any:
    """Waits for: Ray, for so long. UserError says which resource is missing."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    group = placement_group([dict(bundle) for bundle in bundles], strategy="PACK")
    if group.wait(timeout_seconds=seconds):
        return group
    remove_placement_group(group)
    wanted = {name: sum(bundle[name] for bundle in bundles) for name in bundles[0]}
    there = ray.cluster_resources()
    told = ", ".join(f"{count:g} {name} ({there.get(name, 0):g} in the cluster)" for name, count in wanted.items())
    lacking = [name for name, count in wanted.items() if count > there.get(name, 0)]
    why = f"the cluster has too few: {', '.join(lacking)}" if lacking else "others use the cluster"
    raise UserError(
        f'cluster.place = "ray": no room within {seconds:g} s for {told}: {why}. Use fewer processes, or add nodes'
    )
