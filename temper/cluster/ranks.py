"""Trainer ranks: who this process is among them, starting those that nobody started, and the group they form.

Owns: their life. Rank 0 is the process that the user started; others are its children, or were started by torchrun or
SLURM. Refuses: what they compute, and what is said to them (trainer/).
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import DistError, PrefixStore, Store, TCPStore, rendezvous  # type: ignore[attr-defined]

from temper.cluster.child import Child
from temper.engine.process.client import Process
from temper.errors import BackendError, TemperError, UserError
from temper.trainer.ranks.beats import Beats, Watchdog, end_others
from temper.trainer.ranks.channel import KEY_VARIABLE, Channel, Failure, RankFailure

HOST = "127.0.0.1"
STARTING_SECONDS = 300.0
"""For a rank's process to import torch and say that it is there."""
LEAVING_SECONDS = 20.0
PATIENCE = "patience"
"""Where rank 0 says for how long others may be silent."""
ENVIRONMENTS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)
"""Names under which torchrun and SLURM say who a process is."""


@dataclass(frozen=True, slots=True)
class Place:
    """Of one process among the trainer ranks of a run."""

    rank: int
    world: int
    local: int
    """Among those of its machine: its GPU."""
    is_launched: bool = True
    """Whether somebody started it as a rank."""


ALONE = Place(0, 1, 0, is_launched=False)

StartRank = Callable[[int, str, Mapping[str, str]], Process]
"""(rank, name, environment) -> a process that is this rank."""


def as_children(module: str) -> StartRank:
    """Ranks as children of this process, which run `module`."""
    return lambda _, name, environment: Child(name, module, environment=environment)


def find_place(environment: Mapping[str, str]) -> Place:
    """As whoever started this process says; alone, where nobody says so. SLURM's word counts where it also says where
    rank 0 is: without MASTER_ADDR a job step of several tasks is no trainer of several ranks."""
    for names in ENVIRONMENTS:
        if all(name in environment for name in names) and "MASTER_ADDR" in environment:
            rank, world, local = (int(environment[name]) for name in names)
            return Place(rank, world, local)
    return ALONE


@dataclass
class Ranks:
    """This process in the group. Close it when the run is over."""

    place: Place
    channel: Channel
    store: Store
    beats: Beats
    children: Sequence[Process] = ()
    watchdog: Watchdog | None = None
    """On a rank that outlives rank 0, unless somebody ends it."""

    def close(self, *, at_once: bool = False) -> None:
        """Ends what was started here. Others end with the word that the run is over, or because we are gone. at_once:
        they may be stuck, and nothing of theirs is needed."""
        if self.watchdog is not None:
            self.watchdog.close()
        if at_once and self.place.rank == 0:
            with suppress(DistError):
                end_others(self.store, range(1, self.place.world) if not self.children else ())
        self.beats.close()
        end = time.monotonic() + (0.0 if at_once else LEAVING_SECONDS)
        for child in self.children:
            if child.wait(max(0.0, end - time.monotonic())) is None:
                child.kill()
                child.wait(LEAVING_SECONDS)
        if dist.is_initialized():
            dist.destroy_process_group()


def start_ranks(start: StartRank, world: int, seconds: float, host: str = HOST) -> Ranks:
    """This process as rank 0, and others that `start` starts. seconds: that any of them may be silent. host: where they
    find this one."""
    store, key = _listen(host), secrets.token_hex(32)
    children: list[Process] = []
    os.environ |= _sharing(0, world, host)
    try:
        for rank in range(1, world):
            told = _environment(rank, world, host, store.port)
            children.append(start(rank, f"trainer rank {rank} of {world}", {**told, KEY_VARIABLE: key}))
        return _formed(Place(0, world, 0), store, seconds, key, children)
    except BaseException:
        for child in children:
            child.kill()
        raise


def join_ranks(place: Place, seconds: float, *, is_watched: bool = False) -> Ranks:
    """This process in a group that somebody else started; MASTER_ADDR and MASTER_PORT say where its rank 0 is.

    is_watched: it ends when rank 0 cannot be heard for as long as rank 0 waits for others. Where rank 0 is its parent
    the kernel ends it.
    """
    key = os.environ.get(KEY_VARIABLE, "")
    return _formed(place, _meet(place), seconds, key, is_watched=is_watched)


def _listen(host: str) -> TCPStore:
    """Where ranks of this machine meet nobody else is let in."""
    timeout = timedelta(seconds=STARTING_SECONDS)
    if host != HOST:
        return TCPStore(host, 0, None, is_master=True, wait_for_workers=False, timeout=timeout)
    listener = socket.create_server((host, 0), backlog=1024)
    port = listener.getsockname()[1]
    return TCPStore(
        host, port, None, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
    )


def _meet(place: Place) -> Store:
    """The store of ranks that a launcher started: its own, or that of rank 0."""
    timeout = timedelta(seconds=STARTING_SECONDS)
    try:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            store, _, _ = next(rendezvous("env://", rank=place.rank, world_size=place.world, timeout=timeout))
            return store
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return TCPStore(host, port, None, is_master=place.rank == 0, wait_for_workers=False, timeout=timeout)
    except (KeyError, ValueError) as error:
        raise UserError(f"trainer ranks cannot find each other: MASTER_ADDR and MASTER_PORT: {error}") from error
    except DistError as error:
        raise BackendError(
            f"trainer rank {place.rank} of {place.world} found nobody at MASTER_ADDR and MASTER_PORT within "
            f"{STARTING_SECONDS:g} s: {error}"
        ) from error


def _environment(rank: int, world: int, host: str, port: int) -> dict[str, str]:
    own = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "MASTER_ADDR": host, "MASTER_PORT": port}
    own |= {"OMP_NUM_THREADS": torch.get_num_threads()}
    return {**{name: str(value) for name, value in own.items()}, **_sharing(rank, world, host)}


def _sharing(rank: int, world: int, host: str) -> dict[str, str]:
    """NCCL refuses two ranks on one GPU of one host; said to be of two hosts, they may share it, over the loopback.
    Ranks that meet elsewhere may be on other machines, which have GPUs of their own."""
    if host != HOST or not 0 < torch.cuda.device_count() < world:
        return {}
    return {"NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


def _formed(
    place: Place, store: Store, seconds: float, key: str, children: Sequence[Process] = (), *, is_watched: bool = False
) -> Ranks:
    """Waits for: every rank to be there, then for all to connect, each within its deadline."""

    def find_lost() -> list[Failure]:
        ended = ((rank, child.wait(0.0)) for rank, child in enumerate(children, start=1))
        return [Failure(rank, how, True) for rank, how in ended if how is not None]

    words = PrefixStore("words", store)
    channel = Channel(words, place.rank, place.world, seconds=seconds, find_lost=find_lost, key=key.encode())
    ranks = Ranks(place, channel, words, Beats(words, place.rank), children)
    try:
        ranks.beats.start()
        if place.rank == 0:
            words.set(PATIENCE, str(seconds))
        _wait_for_all(place, channel)
        if is_watched:
            ranks.watchdog = Watchdog(words, place.rank, float(words.get(PATIENCE)))
            ranks.watchdog.start()
        _connect(PrefixStore("group", store), place, seconds)
    except BaseException:
        with suppress(TemperError):
            ranks.close(at_once=True)
        raise
    return ranks


def _connect(store: Store, place: Place, seconds: float) -> None:
    """Waits for: the other ranks, for so long. From then on they exchange tensors."""
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.set_device(place.local % torch.cuda.device_count())
        # When another rank is lost torch would end this process, too, which has to say who it was and to begin anew. So
        # it gives up what is under way and no more; what came of that is thrown away with the step.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if has_gpu else "gloo",
        store=store,
        rank=place.rank,
        world_size=place.world,
        timeout=timedelta(seconds=seconds),
    )


def _wait_for_all(place: Place, channel: Channel) -> None:
    channel.sign_in()
    end = time.monotonic() + STARTING_SECONDS
    while missing := channel.missing():
        if (failure := channel.find_failure()) is not None:
            raise RankFailure(failure, "start", place.world)
        if time.monotonic() > end:
            told = f"trainer ranks {', '.join(map(str, missing))} did not come within {STARTING_SECONDS:g} s"
            raise RankFailure(Failure(missing[0], told, True), "start", place.world)
        time.sleep(0.05)
    channel.require_one_key()
