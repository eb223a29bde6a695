"""Guarantee: whatever a verifier does, it costs one worker, which is replaced, and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from temper.rewards.workers.pool import CpuSpent, Overrun, WorkerFailed, WorkerPool, blame
from temper.types import Score


@pytest.fixture
def pool(misbehaving: str) -> Iterator[WorkerPool]:
    pool = WorkerPool(f"{misbehaving}:reward", size=1, deadline_seconds=1.0)
    yield pool
    pool.close()


def outcome(pool: WorkerPool, text: str) -> object:
    """The value, or the reason why there is none."""
    try:
        return pool.submit("p", text, "right").result(timeout=60)
    except WorkerFailed as error:
        return str(error)


def is_gone(process_id: int) -> bool:
    return not psutil.pid_exists(process_id) or psutil.Process(process_id).status() == psutil.STATUS_ZOMBIE


def wait_until_gone(process_id: int) -> bool:
    limit = time.monotonic() + 20
    while not is_gone(process_id) and time.monotonic() < limit:
        time.sleep(0.05)
    return is_gone(process_id)


@pytest.mark.parametrize("poison", ["sleep", "spin", "bomb", "tower"])
def test_a_hanging_verifier_is_killed_at_the_deadline_and_replaced(pool: WorkerPool, poison: str) -> None:
    assert outcome(pool, "right") == 1.0
    (before,) = pool.process_ids
    assert outcome(pool, poison) == "timeout after 1 s"
    assert is_gone(before)
    assert outcome(pool, "right") == 1.0
    (after,) = pool.process_ids
    assert after != before


@pytest.mark.parametrize(
    ("poison", "reason"), [("crash", "worker died (exit code 3)"), ("abort", "worker died (signal SIGABRT)")]
)
def test_a_crashing_verifier_is_named_and_replaced(pool: WorkerPool, poison: str, reason: str) -> None:
    assert outcome(pool, poison) == reason
    assert outcome(pool, "right") == 1.0


def judges_of(log: Path, num: int = 1) -> list[int]:
    """Process ids of the workers that began with the call, once there are as many."""
    limit = time.monotonic() + 20
    while time.monotonic() < limit:
        if log.exists() and len(judges := log.read_text().split()) >= num:
            return [int(judge) for judge in judges]
        time.sleep(0.02)
    raise AssertionError("nobody judges")


ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a stopped worker counts as late")


@pytest.mark.parametrize(
    "faults",
    [
        [signal.SIGKILL],
        pytest.param([signal.SIGSTOP], marks=ON_LINUX),
        pytest.param([signal.SIGSTOP, signal.SIGCONT], marks=ON_LINUX),
    ],
)
def test_a_call_whose_worker_was_hit_from_outside_is_judged_by_a_fresh_one(
    pool: WorkerPool, tmp_path: Path, faults: list[signal.Signals]
) -> None:
    log = tmp_path / "judges"
    future = pool.submit(str(log), "sleep once", "sleep once")
    (first,) = judges_of(log)
    for fault in faults:
        os.kill(first, fault)
        time.sleep(0.1)  # continued before it stands, it never stopped
    assert future.result(timeout=60) == 1.0
    assert [judge == first for judge in judges_of(log)] == [True, False]
    assert is_gone(first)


def test_a_worker_killed_while_it_waited_costs_the_next_call_nothing(pool: WorkerPool) -> None:
    assert outcome(pool, "right") == 1.0
    os.kill(pool.process_ids[0], signal.SIGKILL)
    assert outcome(pool, "right") == 1.0


def test_an_answer_that_kills_every_judge_is_an_error_after_the_second(pool: WorkerPool, tmp_path: Path) -> None:
    failed = pool.submit(str(tmp_path / "judges"), "die", None).exception(timeout=60)
    assert str(failed) == "worker died (signal SIGKILL)"
    assert len(judges_of(tmp_path / "judges")) == 2


def test_a_verifier_that_is_merely_late_is_not_asked_again(pool: WorkerPool, tmp_path: Path) -> None:
    late = pool.submit(str(tmp_path / "judges"), "sleep once", None).exception(timeout=60)
    assert str(late) == "timeout after 1 s"
    assert outcome(pool, "right") == 1.0
    assert len(judges_of(tmp_path / "judges")) == 1


@pytest.mark.parametrize(("poison", "reason"), [("raise", "ValueError: verifier bug"), ("exit", "SystemExit: 0")])
def test_an_exception_travels_as_text_and_costs_no_worker(pool: WorkerPool, poison: str, reason: str) -> None:
    assert outcome(pool, "right") == 1.0
    before = pool.process_ids
    said, _, place = str(outcome(pool, poison)).partition(", in ")
    assert said == reason
    assert ".py, line " in place
    assert pool.process_ids == before


@pytest.fixture
def pure_pool(misbehaving: str) -> Iterator[WorkerPool]:
    pool = WorkerPool(f"{misbehaving}:reward", size=2, deadline_seconds=0.5, is_pure=True, memory_bytes=2**30)
    yield pool
    pool.close()


def failure(pool: WorkerPool, text: str, prompt: str = "p") -> BaseException | None:
    return pool.submit(prompt, text, "right").exception(timeout=60)


@pytest.mark.parametrize("poison", ["spin", "bomb", "tower"])
def test_a_pure_call_that_spends_its_cpu_seconds_is_to_blame_itself(pure_pool: WorkerPool, poison: str) -> None:
    spent = failure(pure_pool, poison)
    assert isinstance(spent, CpuSpent)
    assert blame(spent) == Score.of(0.0, str(spent))
    assert outcome(pure_pool, "right") == 1.0


@pytest.mark.parametrize("poison", ["memory", "recursion"])
def test_a_pure_call_that_needs_too_much_memory_or_depth_is_to_blame_itself(pure_pool: WorkerPool, poison: str) -> None:
    assert isinstance(failure(pure_pool, poison), Overrun)
    assert outcome(pure_pool, "right") == 1.0


@pytest.mark.parametrize(
    ("poison", "reason"), [("raise", "ValueError"), ("crash", "exit code 3"), ("sleep", "timeout after 0.8 s")]
)
def test_what_the_verifier_or_the_machine_did_is_an_error(misbehaving: str, poison: str, reason: str) -> None:
    pool = WorkerPool(f"{misbehaving}:reward", deadline_seconds=0.1, is_pure=True)
    failed = failure(pool, poison)
    pool.close()
    assert isinstance(failed, WorkerFailed)
    assert not isinstance(failed, Overrun)
    assert reason in str(failed)
    assert blame(failed) == Score.error(str(failed))


def test_a_pure_call_that_lost_its_worker_is_repeated_once_with_no_other_beside_it(
    pure_pool: WorkerPool, tmp_path: Path
) -> None:
    """Every call notes when it began and ended; the first attempt at one of them crashes."""
    log = tmp_path / "log"
    texts = ["crash once", *["note"] * 12]
    futures = [pure_pool.submit(str(log), text, "right") for text in texts]
    assert [future.result(timeout=60) for future in futures] == [0.0] * len(texts)
    events = log.read_text().split()
    assert events.count("again+") == 1
    assert events[events.index("again+") + 1] == "again-", "another call began or ended while one was to be alone"


def test_printing_verifiers_do_not_disturb_the_protocol(pool: WorkerPool) -> None:
    assert outcome(pool, "print") == 0.0
    assert outcome(pool, "right") == 1.0


def test_workers_do_not_import_torch(pool: WorkerPool) -> None:
    assert outcome(pool, "modules") == 0.0


def test_arguments_larger_than_a_pipe_arrive_whole(misbehaving: str) -> None:
    pool, text = WorkerPool(f"{misbehaving}:reward", size=1, deadline_seconds=30), "x" * 3_000_000
    try:
        assert pool.submit("p", text, text).result(timeout=60) == 1.0
    finally:
        pool.close()


def test_nothing_starts_before_the_first_call_and_nothing_is_left_after_close(misbehaving: str) -> None:
    pool = WorkerPool(f"{misbehaving}:reward", size=2, deadline_seconds=30)
    assert pool.process_ids == []
    assert outcome(pool, "right") == 1.0
    stuck = [pool.submit("p", "spin", None) for _ in range(5)]
    limit = time.monotonic() + 20
    while len(pool.process_ids) < 2 and time.monotonic() < limit:
        time.sleep(0.05)
    ids = pool.process_ids
    assert len(ids) == 2
    pool.close()
    assert all(is_gone(process_id) for process_id in ids)
    assert all(isinstance(future.exception(timeout=10), WorkerFailed) for future in stuck)
    pool.close()
    with pytest.raises(WorkerFailed, match="is closed"):
        pool.submit("p", "right", "right")


def test_importing_the_verifier_does_not_count_against_the_first_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_import_here.py").write_text("import time\ntime.sleep(2)\ndef reward(): return 1.0")
    monkeypatch.syspath_prepend(str(tmp_path))
    pool = WorkerPool("slow_import_here:reward", size=1, deadline_seconds=1.0)
    value = pool.submit().result(timeout=60)
    pool.close()
    assert value == 1.0


def test_close_also_ends_a_worker_that_is_still_importing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_to_import.py").write_text("import time\ntime.sleep(3600)\ndef reward(): return 1.0")
    monkeypatch.syspath_prepend(str(tmp_path))
    pool = WorkerPool("slow_to_import:reward", size=1, deadline_seconds=1)
    future = pool.submit()
    limit = time.monotonic() + 20
    while not pool.process_ids and time.monotonic() < limit:
        time.sleep(0.02)
    (process_id,) = pool.process_ids
    pool.close()
    assert is_gone(process_id)
    assert isinstance(future.exception(timeout=10), WorkerFailed)


def test_a_verifiers_own_children_die_with_it(pool: WorkerPool, tmp_path: Path) -> None:
    note = tmp_path / "child"
    pool.deadline_seconds = 3.0
    with pytest.raises(WorkerFailed, match="timeout"):
        pool.submit(str(note), "child", None).result(timeout=60)
    assert wait_until_gone(int(note.read_text()))


def test_deadlines_hold_in_asyncio_and_one_hang_does_not_block_the_others(misbehaving: str) -> None:
    pool = WorkerPool(f"{misbehaving}:reward", size=2, deadline_seconds=1.0)

    async def go() -> list[object]:
        calls = [pool.call("p", text, "right") for text in ["sleep", *["right"] * 8, "spin"]]
        return list(await asyncio.gather(*calls, return_exceptions=True))

    results = asyncio.run(go())
    pool.close()
    assert results[1:9] == [1.0] * 8
    assert str(results[0]) == str(results[9]) == "timeout after 1 s"


def test_a_call_that_was_cancelled_in_asyncio_leaves_the_pool_usable(pool: WorkerPool) -> None:
    async def go() -> object:
        stuck = asyncio.create_task(pool.call("p", "sleep", None))
        queued = asyncio.create_task(pool.call("p", "sleep", None))
        await asyncio.sleep(0.05)
        stuck.cancel()
        queued.cancel()
        return await asyncio.wait_for(pool.call("p", "right", "right"), timeout=60)

    assert asyncio.run(go()) == 1.0


def test_deadlines_hold_in_other_threads_and_the_worker_outlives_the_calling_thread(pool: WorkerPool) -> None:
    seen: list[object] = []
    for text in ("right", "sleep", "right"):
        thread = threading.Thread(target=lambda text=text: seen.append(outcome(pool, text)))
        thread.start()
        thread.join(timeout=60)
    assert seen == [1.0, "timeout after 1 s", 1.0]
    # Were the worker tied to the thread that asked for it, it would be shot now.
    before = pool.process_ids
    assert outcome(pool, "right") == 1.0
    assert pool.process_ids == before


def test_a_target_that_cannot_be_imported_is_an_error_and_not_a_hang() -> None:
    pool = WorkerPool("no_such_module_anywhere:reward", size=1, deadline_seconds=1)
    reason = outcome(pool, "right")
    pool.close()
    assert "could not import no_such_module_anywhere:reward" in str(reason)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's die-with-parent signal is Linux only")
def test_workers_stuck_in_c_code_die_with_their_parent(misbehaving: str, tmp_path: Path) -> None:
    program = f"""
import os, signal, time
from temper.rewards.workers.pool import WorkerPool
pool = WorkerPool("{misbehaving}:reward", size=1, deadline_seconds=600)
pool.submit("p", "right", "right").result(timeout=60)
pool.submit("p", "tower", None)
print(pool.process_ids[0], flush=True)
time.sleep(0.3)
os.kill(os.getpid(), signal.SIGKILL)
"""
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == -9, done.stderr
    assert wait_until_gone(int(done.stdout))
