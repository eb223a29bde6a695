"""A rank without a rank 0 ends itself, and one that is silent is told from those who wait for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed import DistNetworkError, HashStore  # type: ignore[attr-defined]

from temper.trainer.ranks import beats
from temper.trainer.ranks.beats import OVER, Beats, Watchdog, end_others, find_silent


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("EVERY_SECONDS", 0.02), ("LOOK_SECONDS", 0.5), ("GRACE_SECONDS", 0.1)):
        monkeypatch.setattr(beats, name, seconds)


class Gone:
    """A store whose server has ended."""

    def clone(self) -> Gone:
        return self

    def check(self, keys: Any) -> bool:
        raise DistNetworkError("Connection was closed")


class Cut:
    """A store behind a cable that was cut: no answer, and no error."""

    def clone(self) -> Cut:
        return self

    def check(self, keys: Any) -> bool:
        time.sleep(3600)
        return False


def soon(found: Callable[[], Any], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not found() and time.monotonic() < end:
        time.sleep(0.01)
    return bool(found())


def test_those_who_stopped_beating_and_those_who_never_did_are_silent() -> None:
    store = HashStore()
    living, stopped = Beats(store, 1), Beats(store, 2)
    living.start()
    stopped.start()
    assert soon(lambda: store.check(["beat/1", "beat/2"]))
    assert find_silent(store, [1, 2, 3]) == [3]
    stopped.close()
    time.sleep(0.1)
    assert find_silent(store, [1, 2]) == [2]
    living.close()


def test_a_rank_whose_rank_0_beats_stays_and_one_that_hears_nothing_more_ends() -> None:
    store, left = HashStore(), list[int]()
    leader, watchdog = Beats(store, 0), Watchdog(store, 1, 0.5, left.append)
    leader.start()
    watchdog.start()
    time.sleep(1.0)
    assert not left
    leader.close()
    assert soon(lambda: left)
    assert left[0] == beats.GONE_CODE


@pytest.mark.parametrize("store", [Gone(), Cut()])
def test_a_store_that_is_gone_or_cut_off_ends_the_rank(store: Any) -> None:
    left: list[int] = []
    Watchdog(store, 1, 0.3, left.append).start()
    assert soon(lambda: left)
    assert left[0] == beats.GONE_CODE


def test_a_rank_ends_in_order_when_rank_0_has_left_the_run() -> None:
    """Ctrl-C under a launcher: this rank may be in a collective, and hears no word."""
    store, left = HashStore(), list[int]()
    Beats(store, 0).start()
    Watchdog(store, 1, 60.0, left.append).start()
    store.set(OVER, "")
    assert soon(lambda: left)
    assert left == [0]


def test_rank_0_stays_until_the_living_have_seen_that_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may keep the store, and one that finds it gone reports a failure."""
    store, left = HashStore(), list[int]()
    watchdogs = [Watchdog(store, rank, 60.0, left.append) for rank in (1, 2)]
    for watchdog in watchdogs:
        watchdog.start()
    end_others(store, [1, 2])
    assert all(watchdog.is_over for watchdog in watchdogs)
    assert store.check(["heard/1", "heard/2"])
    monkeypatch.setattr(beats, "HEARD_SECONDS", 0.2)
    began = time.monotonic()
    end_others(store, [1, 2, 3])
    assert time.monotonic() - began < 10, "rank 3 is gone"


def test_a_rank_that_ends_by_itself_is_not_ended() -> None:
    """Its watchdog may see the store of rank 0 go while it leaves."""
    left: list[int] = []
    watchdog = Watchdog(Gone(), 1, 60.0, left.append)  # type: ignore[arg-type]
    watchdog.start()
    time.sleep(0.05)
    watchdog.close()
    time.sleep(0.3)
    assert not left
