"""Words from one rank to the others: in order, whole, and never waited for without end."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from torch.distributed import DistNetworkError, HashStore  # type: ignore[attr-defined]

from temper.errors import BackendError
from temper.trainer.ranks import beats
from temper.trainer.ranks import channel as channels
from temper.trainer.ranks.beats import Beats
from temper.trainer.ranks.channel import Channel, Failure, RankFailure


@pytest.fixture(autouse=True)
def looked_at_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beats, "EVERY_SECONDS", 0.02)
    monkeypatch.setattr(beats, "LOOK_SECONDS", 0.5)


CLOSED = RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")


def make_channels(world: int, *, seconds: float = 20.0, find_lost: Callable[[], Sequence[Failure]] = lambda: ()) -> Any:
    store = HashStore()
    first = Channel(store, 0, world, seconds=seconds, find_lost=find_lost)
    return first, [Channel(store, rank, world, seconds=seconds) for rank in range(1, world)]


def in_thread(work: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_words_come_in_order_and_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "PIECE_BYTES", 100)
    first, others = make_channels(3)
    heard: dict[int, list[Any]] = {1: [], 2: []}

    def follow(own: Channel) -> None:
        for _ in range(3):
            heard[own.rank].append(own.hear())
            own.done()

    threads = [in_thread(lambda own=own: follow(own)) for own in others]
    words = [("step", list(range(1000))), ("score", None), ("save", "x" * 99)]
    for verb, payload in words:
        first.tell(verb, payload)
        first.confirm()
    for thread in threads:
        thread.join(20)
    assert heard == {1: words, 2: words}


def test_what_was_heard_is_deleted() -> None:
    """A run says thousands of words, each with all rows of a batch."""
    store = HashStore()
    first, other = (Channel(store, rank, 2, seconds=20) for rank in (0, 1))
    counts = []
    for _ in range(4):
        first.tell("step", b"rows")
        other.hear()
        other.done()
        first.confirm()
        counts.append(store.num_keys())
    assert counts[0] == counts[-1]


def test_an_answer_is_waited_for() -> None:
    first, (other,) = make_channels(2)
    answered = []

    def follow() -> None:
        other.hear()
        time.sleep(0.2)
        answered.append(1)
        other.done()

    in_thread(follow)
    first.tell("step")
    first.confirm()
    assert answered


def test_of_several_failures_the_first_is_told() -> None:
    first, others = make_channels(4)
    first.tell("step")
    others[2].failed(ZeroDivisionError("the cause"))
    others[0].failed(ValueError("what came of it"))
    with pytest.raises(
        RankFailure, match=r"(?s)trainer rank 3 of 4 failed in step: ZeroDivisionError.*--resume"
    ) as raised:
        first.confirm()
    assert not raised.value.is_lost


def test_who_says_nothing_is_named_after_the_deadline() -> None:
    first, others = make_channels(3, seconds=0.2)
    first.tell("save")
    others[0].hear()
    others[0].done()
    with pytest.raises(
        RankFailure, match=r"trainer rank 2 of 3 was lost in save: nothing was heard of it for 0.2 s"
    ) as raised:
        first.confirm()
    assert raised.value.is_lost


def test_of_those_who_do_not_answer_the_one_that_does_not_beat_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 waits in a collective for rank 2, which is stopped."""
    monkeypatch.setattr(channels, "GRACE_SECONDS", 0.1)
    store = HashStore()
    first = Channel(store, 0, 4, seconds=0.2)
    beating = Beats(store, 1)
    beating.start()
    first.tell("step")
    with pytest.raises(RankFailure, match=r"trainer rank 2 of 4 was lost in step: nothing was heard of ranks \[2, 3\]"):
        first.confirm()
    timed_out = first.blame(RuntimeError("[gloo] Timed out waiting 5000ms for recv operation to complete"))
    assert "trainer rank 2 of 4" in str(timed_out)
    beating.close()


@pytest.mark.parametrize("name", ["word/1/0", "failure/1"])
def test_what_somebody_without_the_key_writes_is_not_read(name: str) -> None:
    """Words are pickles, and reading one runs what it says."""
    store = HashStore()
    first, other = (Channel(store, rank, 2, seconds=5, key=b"ours") for rank in (0, 1))
    stranger = Channel(store, 1, 2, seconds=5, key=b"theirs")
    first.tell("step")
    store.set(name, stranger._seal(name, Runs()))  # type: ignore[arg-type]
    with pytest.raises(BackendError, match=f'"{name.removesuffix("/0")}" .* does not have their key'):
        other.hear() if name.startswith("word") else first.confirm()
    assert not RAN
    sealed = other._seal(name, Runs())
    other._unseal(name, sealed)
    assert RAN.pop(), "the key makes the difference"
    with pytest.raises(BackendError, match="does not have their key"):
        other._unseal("word/2", sealed)


RAN: list[str] = []


def run() -> None:
    RAN.append("ran")


class Runs:
    """A pickle that runs something when it is read."""

    def __reduce__(self) -> Any:
        return run, ()


def test_a_process_that_ended_is_seen_before_the_deadline() -> None:
    first, _ = make_channels(2, find_lost=lambda: [Failure(1, "it was killed by SIGKILL", True)])
    first.tell("step")
    start = time.monotonic()
    with pytest.raises(RankFailure, match="killed by SIGKILL"):
        first.confirm()
    assert time.monotonic() - start < 5


def test_an_error_of_ours_gives_way_to_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "GRACE_SECONDS", 0.1)
    first, (other,) = make_channels(2)
    first.tell("step")
    other.failed(ValueError("the cause"))
    assert "the cause" in str(first.blame(CLOSED))


def test_an_error_of_ours_alone_stays_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "GRACE_SECONDS", 0.1)
    first, _ = make_channels(2)
    first.tell("step")
    own = ValueError("a mistake of this rank")
    assert first.blame(own) is own
    silent = first.blame(RuntimeError("[gloo] Timed out waiting 5000ms for recv operation to complete"))
    assert isinstance(silent, RankFailure)
    assert silent.is_lost


def test_who_was_cut_off_first_is_not_the_cause() -> None:
    first, others = make_channels(3)
    first.tell("step")
    others[0].failed(CLOSED)
    threading.Timer(0.3, others[1].failed, (ZeroDivisionError("the cause"),)).start()
    with pytest.raises(RankFailure, match=r"(?s)trainer rank 2 of 3 failed in step.*the cause"):
        first.confirm()


def test_of_processes_that_ended_the_one_that_said_nothing_is_the_cause() -> None:
    """Who is cut off by a rank that was killed says so, and ends, too."""
    ended = [Failure(1, "it ended with code 3", True), Failure(2, "it was killed by SIGKILL", True)]
    first, others = make_channels(3, find_lost=lambda: ended)
    first.tell("step")
    others[0].failed(CLOSED)
    with pytest.raises(RankFailure, match=r"trainer rank 2 of 3 was lost in step: it was killed by SIGKILL") as found:
        first.confirm()
    assert found.value.is_lost, "all begin anew"


@pytest.mark.parametrize("beats_on", [True, False], ids=["all are there", "one is silent"])
def test_where_nobody_says_why_the_silent_one_is_named_and_else_who_was_cut_off(
    beats_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "GRACE_SECONDS", 0.1)
    store = HashStore()
    first, cut_off = (Channel(store, rank, 3, seconds=20) for rank in (0, 1))
    beating = Beats(store, 2)
    if beats_on:
        beating.start()
    first.tell("step")
    cut_off.failed(CLOSED)
    told = (
        "trainer rank 1 of 3 failed in step: .*closed by peer" if beats_on else "rank 2 of 3 was lost in step: nothing"
    )
    with pytest.raises(RankFailure, match=told):
        first.confirm()
    assert re.search(told, str(first.blame(CLOSED)))
    gone = first.find_gone()
    assert gone is not None
    assert gone.rank == (1 if beats_on else 2)
    beating.close()


def test_a_failure_that_was_told_comes_before_silence() -> None:
    """A launcher stops rank 0 after another has failed and left."""
    first, (other,) = make_channels(2)
    other.failed(ValueError("the cause"))
    gone = first.find_gone()
    assert gone is not None
    assert "the cause" in gone.report
    assert not gone.is_lost


def test_nobody_is_gone_where_all_beat() -> None:
    store = HashStore()
    beating = Beats(store, 1)
    beating.start()
    assert Channel(store, 0, 2, seconds=20).find_gone() is None
    beating.close()


class Gone:
    """A store whose server has ended."""

    def __getattr__(self, name: str) -> Any:
        def ask(*_: Any) -> Any:
            raise DistNetworkError("failed to recv, got 0 bytes")

        return ask


@pytest.mark.parametrize(
    "speak",
    [
        lambda own: own.tell("step"), lambda own: own.confirm(), lambda own: own.hear(), lambda own: own.done(),
        lambda own: own.failed(ValueError()), lambda own: own.find_failure(), lambda own: own.find_gone(),
        lambda own: own.blame(CLOSED),
    ],
    ids=["tell", "confirm", "hear", "done", "failed", "find_failure", "find_gone", "blame"],
)  # fmt: skip
def test_a_store_that_is_gone_is_told_in_words(speak: Callable[[Channel], Any]) -> None:
    for rank, keeper in ((0, "its launcher"), (1, "rank 0 or its launcher")):
        own = Channel(Gone(), rank, 2, seconds=20)  # type: ignore[arg-type]
        with pytest.raises(BackendError, match=f"the store in which trainer ranks meet is gone, and {keeper} with it"):
            speak(own)


def test_a_key_may_be_of_any_length() -> None:
    store = HashStore()
    keys = [b"a secret " * 40, b"a secret " * 40 + b"!"]
    first, other = (Channel(store, rank, 2, seconds=5, key=keys[0]) for rank in (0, 1))
    first.tell("step", 1)
    assert other.hear() == ("step", 1)
    with pytest.raises(BackendError, match="does not have their key"):
        Channel(store, 1, 2, seconds=5, key=keys[1]).hear()


def test_who_follows_waits_as_long_as_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "LISTENING_SECONDS", 0.05)
    first, (other,) = make_channels(2)
    heard = []
    thread = in_thread(lambda: heard.append(other.hear()))
    time.sleep(0.3)
    first.tell("observe", (0.5,))
    thread.join(20)
    assert heard == [("observe", (0.5,))]
