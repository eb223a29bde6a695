"""Trainer ranks of `temper train`: this process leads them, or follows.

Owns: which of the two it is, and the beginning and the end. Refuses: what ranks compute (trainer/ranks/ranked.py), how
processes are started (cluster/ranks.py).
`python -m temper.commands.training.ranks PARENT` is the main of a rank that rank 0 started.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

import torch

from temper.build import pick_device
from temper.build.trainer import open_here
from temper.children import die_with_parent
from temper.cluster.handshake import KEY_VARIABLE
from temper.cluster.ranks import LEAVING_SECONDS, Place, Ranks, as_children, find_place, join_ranks, start_ranks
from temper.cluster.ray import RayPlace
from temper.commands.launchers import require_one_process
from temper.config import RunConfig
from temper.config.cluster import ClusterConfig
from temper.engine.fleet.kept import KeptFleet
from temper.engine.process.client import Process
from temper.errors import TemperError, UserError
from temper.trainer.ranks.channel import RankFailure, is_cut_off
from temper.trainer.ranks.ranked import END, Together, follow

MODULE = "temper.commands.training.ranks"
FOLLOWER_SECONDS = 24 * 3600.0
"""For a collective on a rank that follows: rank 0 has the recipe's deadline, and ends the others."""


def follow_if_started_so() -> None:
    """Under torchrun or SLURM, in every process but rank 0: does what that says until the run is over, and ends this
    process. Elsewhere: nothing. UserError for one of several processes that cannot tell which of them it is."""
    place = find_place(os.environ)
    if place.world == 1:
        say_where = ", or say where rank 0 is: srun with MASTER_ADDR and MASTER_PORT makes them the trainers of one run"
        require_one_process('"temper train ..."', say_where)
    if place.rank > 0:
        _follow(place, is_watched=True)
        sys.exit(0)


@dataclass(frozen=True, slots=True)
class Others:
    """Who works beside this process."""

    kept: KeptFleet = field(default_factory=KeptFleet)
    """Sampler processes that outlive a lost trainer."""

    together: Together | None = None
    """All trainer ranks; None: there is one, this process."""
    ray: RayPlace | None = None
    """Where further processes are started; None: on this machine."""

    def cause_of_a_stop(self) -> RankFailure | None:
        """A launcher that loses one rank stops the others: what the run then says is who was lost, or failed."""
        if self.together is None or not find_place(os.environ).is_launched:
            return None
        return self.together.find_gone()


@contextmanager
def started(stages: Sequence[RunConfig], kept: KeptFleet) -> Iterator[Others]:
    """What a run has beside this process, from its first stage to its last, or until a trainer is lost."""
    place, cluster = find_place(os.environ), stages[0].cluster
    _require_place(place, cluster)
    world = _require_number(place, cluster.trainers)
    check_ranks(stages, world)
    with _ray(stages, place, world) as ray:
        if world == 1:
            yield Others(kept, ray=ray)
            return
        with _ranks(place, cluster, world, ray) as together:
            yield Others(kept, together, ray)


def check_ranks(stages: Sequence[RunConfig], world: int) -> None:
    """What can be known of so many trainers before any is started."""
    cluster = stages[0].cluster
    if world == 1 and cluster.parts:
        raise UserError("cluster.parts shares weights out over trainers, and there is one: set cluster.trainers")
    if world % cluster.together:
        raise UserError(
            f"{cluster.together_key}={cluster.together}: {world} trainers do not divide into such groups. Change one "
            f"of both"
        )
    if any(config.cluster.sampler_addresses for config in stages) and not os.environ.get(KEY_VARIABLE):
        raise UserError(
            f"cluster.samplers has addresses, and samplers there let in who has their key: set {KEY_VARIABLE} to what "
            f"it was when `temper sampler` was started, or to what that printed"
        )


@contextmanager
def _ray(stages: Sequence[RunConfig], place: Place, world: int) -> Iterator[RayPlace | None]:
    cluster = stages[0].cluster
    if not cluster.is_on_ray:
        yield None
        return
    started_here = [
        config for config in stages if config.engine.place == "process" and not config.cluster.sampler_addresses
    ]
    samplers = max((config.cluster.num_samplers for config in started_here), default=0)
    gpus = int(any(pick_device(config.model.device).type == "cuda" for config in stages))
    ray = RayPlace(cluster.address, ranks=world - 1, samplers=samplers, gpus=gpus)
    try:
        yield ray
    finally:
        ray.close()


@contextmanager
def _ranks(place: Place, cluster: ClusterConfig, world: int, ray: RayPlace | None) -> Iterator[Together]:
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // world))
    ranks: Ranks | None = None
    is_over = False
    try:
        if place.world > 1:
            ranks = join_ranks(place, cluster.rank_seconds)
        elif ray is not None:
            start = partial(_start_on_ray, ray)
            ranks = start_ranks(start, world, cluster.rank_seconds, ray.host)
        else:
            ranks = start_ranks(as_children(MODULE), world, cluster.rank_seconds)
        yield Together(ranks.channel)
        is_over = True
    finally:
        if ranks is not None:
            if is_over:
                _dismiss(ranks)
            with suppress(TemperError):
                ranks.close(at_once=not is_over)
        torch.set_num_threads(threads)


def _dismiss(ranks: Ranks) -> None:
    """All is saved, so what goes wrong here is no failure of the run. Those that a launcher started may meet in a store
    of this process, which stays until they have heard."""
    with suppress(TemperError):
        ranks.channel.tell(END)
        if not ranks.children:
            ranks.channel.confirm(LEAVING_SECONDS)


def _start_on_ray(ray: RayPlace, rank: int, name: str, environment: Mapping[str, str]) -> Process:
    return ray.start_rank(rank, name, f"{MODULE}:follow_here", {**environment, "LOCAL_RANK": "0"})


def _require_place(place: Place, cluster: ClusterConfig) -> None:
    """UserError where the recipe says another way than that in which this process was started."""
    if cluster.place == "torchrun" and not place.is_launched:
        raise UserError(
            'cluster.place = "torchrun", and no launcher started this process: torchrun --nproc_per_node N -m -- '
            'temper train RECIPE, or srun with MASTER_ADDR and MASTER_PORT. Use cluster.place = "auto" to run without'
        )
    if place.world > 1 and (cluster.is_on_ray or cluster.place == "processes"):
        told = f'cluster.place = "{cluster.place}"' + (" with an address of Ray" if cluster.place == "auto" else "")
        raise UserError(f"{told}, and a launcher started {place.world} processes. Use one of the two")


def _require_number(place: Place, wanted: int) -> int:
    """How many there are. UserError when the recipe asks for others than were started."""
    if place.world == 1:
        return wanted
    if wanted not in (1, place.world):
        raise UserError(
            f"cluster.trainers={wanted}, and {place.world} processes were started. Start as many, or leave the key out"
        )
    return place.world


def _follow(place: Place, *, is_watched: bool) -> None:
    with suppress(ValueError):  # not in the main thread of a process of Ray
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all ranks; the first ends the run in order
    if "OMP_NUM_THREADS" not in os.environ:  # whoever started us has shared the cores out
        torch.set_num_threads(max(1, torch.get_num_threads() // place.world))
    ranks = join_ranks(place, FOLLOWER_SECONDS, is_watched=is_watched)
    if is_watched:
        with suppress(ValueError):
            # A launcher tells all ranks to end. One that did before the first looked would seem to be lost; from now on
            # a thread ends it when the first has.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        follow(ranks.channel, lambda order: open_here(order)[0])
    except Exception as error:
        # Rank 0 was stopped, and took along what this rank waited for: that is no failure of its own.
        if ranks.watchdog is None or not (ranks.watchdog.is_over and is_cut_off(error)):
            raise
    ranks.close()


def follow_here() -> None:
    """For processes on other machines that rank 0 had started for this alone."""
    _follow(find_place(os.environ), is_watched=True)


def main() -> None:
    die_with_parent(int(sys.argv[1]))
    _follow(find_place(os.environ), is_watched=False)


if __name__ == "__main__":
    main()
