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
STAY_SECONDS = 60.0
"""Between two looks of who joined whether the cluster was left."""
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

        self._ray, self._num_ranks = ray, ranks
        need: dict[str, float] = {"CPU": 1.0} | ({"GPU": float(gpus)} if gpus else {})
        self._need = need
        if ray.is_initialized():
            _require_same(address, ray.get_runtime_context().gcs_address)
            self._left = None
        else:
            self._left = _enter(address, ranks + samplers, gpus)
        try:
            self._group = _find_room([need] * (ranks + samplers), ROOM_SECONDS if address else OWN_ROOM_SECONDS)
        except BaseException:
            self._leave()
            raise
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
        self._leave()

    def _leave(self) -> None:
        """A cluster that was started here ends with it. Whoever was in one before stays."""
        if self._left is not None:
            self._ray.shutdown()
            self._left.set()

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


def _enter(address: str, num_processes: int, gpus: int) -> threading.Event:
    """This process is in a cluster from now on. Returns what to set when it has left."""
    import ray

    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)
    _require_answer(address)
    starts_own = address == OWN_CLUSTER
    own = {"num_cpus": max(os.cpu_count() or 1, num_processes), "include_dashboard": False}
    with _gpus_of_others(gpus * num_processes if starts_own else 0) as others:
        begin = partial(
            ray.init,
            address=address or "local",
            log_to_driver=False,
            runtime_env={"env_vars": {"PYTHONPATH": path}},
            **((own | others) if starts_own else {}),
        )
        return _join_cluster(begin, address)


def _require_same(address: str, joined: str) -> None:
    """UserError where a recipe names another cluster than that in which this process is already."""
    if address not in (OWN_CLUSTER, "auto", joined):
        raise UserError(
            f'cluster.address = "{address}", and this process is in the Ray cluster at {joined} already: leave the key '
            f"out, or call ray.shutdown() before the run"
        )


def _require_answer(address: str) -> None:
    """Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return  # "", "auto", "local"
    try:
        socket.create_connection((host, int(port)), timeout=ANSWER_SECONDS).close()
    except OSError as error:
        raise UserError(f'cluster.address = "{address}": no Ray answers there: {error}') from error


def _join_cluster(begin: Callable[[], object], address: str) -> threading.Event:
    """Waits for: Ray, for JOIN_SECONDS. Something else that listens there is asked by Ray without end. Returns what to
    set when the cluster was left."""
    failed: list[Exception] = []
    joined, left = threading.Event(), threading.Event()

    def work() -> None:
        try:
            begin()
        except Exception as error:  # Ray's own, of many types
            failed.append(error)
            return
        finally:
            joined.set()
        # What Ray starts asks the kernel to end it with its parent, and that is the thread which started it.
        while not left.wait(STAY_SECONDS):
            pass

    threading.Thread(target=work, name="member of a Ray cluster", daemon=True).start()
    is_late = not joined.wait(JOIN_SECONDS)
    if is_late or failed:
        left.set()
        why = f"what listens there has said nothing for {JOIN_SECONDS:g} s" if is_late else failed[0]
        where = f'cluster.address = "{address}": no Ray answers there' if address else "Ray could not be started here"
        raise UserError(f"{where}: {why}") from (None if is_late else failed[0])
    return left


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
