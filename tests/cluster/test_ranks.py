"""Who a process is among trainer ranks, and how ranks that nobody started are started."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]

from temper.cluster import ranks
from temper.cluster.ranks import ALONE, HOST, Place, as_children, find_place, start_ranks
from temper.errors import BackendError, UserError
from temper.trainer.ranks.channel import Channel, RankFailure

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
SLURM = {"SLURM_PROCID": "5", "SLURM_NTASKS": "16", "SLURM_LOCALID": "5"}


def test_a_launcher_says_who_a_process_is() -> None:
    assert find_place({}) == ALONE
    assert find_place(TORCHRUN) == Place(3, 8, 1)
    assert find_place({**SLURM, "MASTER_ADDR": "a"}) == Place(5, 16, 5)
    assert find_place({**SLURM, **TORCHRUN}) == Place(3, 8, 1), "torchrun inside of a job"


def test_a_job_of_many_tasks_is_no_trainer_of_many_ranks_by_itself() -> None:
    assert find_place(SLURM) == ALONE


def test_only_ranks_of_this_machine_are_told_to_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    here, elsewhere = (ranks._environment(1, 2, host, 4000) for host in (HOST, "10.0.0.7"))
    assert {name: here[name] for name in here if name.startswith("NCCL")} == {
        "NCCL_HOSTID": "rank1", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1",
    }  # fmt: skip
    assert not [name for name in elsewhere if name.startswith("NCCL")], "they may be on machines with GPUs of their own"


def test_a_rank_that_ends_at_once_is_lost_and_shown_with_its_last_words() -> None:
    with pytest.raises(RankFailure, match=r"(?s)trainer rank 1 of 2 was lost in start.*No module named") as found:
        start_ranks(as_children("temper.no_such_module"), 2, 20)
    assert found.value.is_lost, "all begin anew, as when it is lost later"


def test_a_rank_that_never_comes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "STARTING_SECONDS", 0.5)
    with pytest.raises(RankFailure, match=r"trainer ranks 1 did not come within 0.5 s") as found:
        start_ranks(as_children("tests.cluster.sleeping_main"), 2, 20)
    assert found.value.is_lost, "stopped as it started: all begin anew"


def test_ranks_of_one_machine_meet_where_no_other_machine_gets_in() -> None:
    """What they say to each other is unpickled."""
    store = ranks._listen(HOST)
    socket.create_connection((HOST, store.port), timeout=5).close()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing: it asks which address of ours would
        own = probe.getsockname()[0]
    if own.startswith("127."):
        pytest.skip("this machine has the loopback alone")
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((own, store.port), timeout=5)


def living() -> set[threading.Thread]:
    """Threads of trainer ranks; other tests may have left some."""
    return {thread for thread in threading.enumerate() if "of a trainer rank" in thread.name}


def soon(found: Callable[[], bool]) -> bool:
    end = time.monotonic() + 20
    while not found() and time.monotonic() < end:
        time.sleep(0.02)
    return found()


def refuse(*_: Any, **__: Any) -> None:
    raise RuntimeError("no route to host")


def test_of_a_group_that_could_not_connect_no_process_and_no_thread_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run begins anew in the same process."""
    monkeypatch.setattr(ranks, "_wait_for_all", lambda *_: None)
    monkeypatch.setattr(torch.distributed, "init_process_group", refuse)
    before, children, start = living(), list[Any](), as_children("tests.cluster.sleeping_main")

    def noted(*told: Any) -> Any:
        children.append(start(*told))
        return children[-1]

    with pytest.raises(RuntimeError, match="no route"):
        start_ranks(noted, 2, 20)
    assert children[0].wait(0.0) is not None
    assert soon(lambda: living() <= before)


def test_a_watched_rank_that_could_not_connect_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_wait_for_all", lambda *_: None)
    monkeypatch.setattr(torch.distributed, "init_process_group", refuse)
    before, store = living(), HashStore()
    PrefixStore("words", store).set(ranks.PATIENCE, "20")
    with pytest.raises(RuntimeError, match="no route"):
        ranks._formed(Place(1, 2, 1), store, 20, "", is_watched=True)
    assert soon(lambda: living() <= before)


def test_ranks_with_other_keys_are_told_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a launcher everybody brings a key along."""
    store, told = HashStore(), list[Exception]()

    def join(rank: int) -> None:
        channel = Channel(store, rank, 2, seconds=20, key=f"secret {rank}".encode())
        try:
            ranks._wait_for_all(Place(rank, 2, rank), channel)
        except BackendError as error:
            told.append(error)

    threads = [threading.Thread(target=join, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(told) == 2
    for error in told:
        assert "does not have their key. Where a launcher starts them, TEMPER_RANK_KEY must be the same" in str(error)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_whose_launcher_started_no_other_says_so(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "STARTING_SECONDS", 1.0)
    with socket.socket() as free:
        free.bind((HOST, 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", HOST)
    monkeypatch.setenv("MASTER_PORT", str(port))
    start, environment = time.monotonic(), dict(os.environ)
    with pytest.raises(BackendError, match="trainer ranks 1 did not come" if rank == 0 else "found nobody at MASTER"):
        ranks.join_ranks(Place(rank, 2, rank), 20)
    assert time.monotonic() - start < 30
    assert dict(os.environ) == environment, "what this process starts next is no rank"


def test_a_rank_without_an_address_is_told_which_variables_say_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(UserError, match="MASTER_ADDR"):
        ranks.join_ranks(Place(1, 2, 1), 20)
