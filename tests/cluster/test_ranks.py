"""Who a process is among trainer ranks, and how ranks that nobody started are started."""

from __future__ import annotations

import pytest
import torch

from temper.cluster import ranks
from temper.cluster.ranks import ALONE, HOST, Place, as_children, find_place, start_ranks
from temper.errors import BackendError

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


def test_a_rank_that_ends_at_once_is_shown_with_its_last_words() -> None:
    with pytest.raises(BackendError, match=r"(?s)trainer rank 1 of 2 could not be started.*No module named"):
        start_ranks(as_children("temper.no_such_module"), 2, 20)


def test_a_rank_that_never_comes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "STARTING_SECONDS", 0.5)
    with pytest.raises(BackendError, match=r"trainer ranks 1 did not come within 0.5 s"):
        start_ranks(as_children("tests.cluster.sleeping_main"), 2, 20)
