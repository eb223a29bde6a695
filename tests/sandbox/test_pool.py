"""The pool: the same outcome from everywhere, cancellation and closing that leave nothing, refusal without a wall."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import pytest

from temper.errors import TaskError, UserError
from temper.sandbox import Limits, Program, Sandbox, SandboxFailed, require_sandbox, requirement

WaitUntil = Callable[[Callable[[], bool]], bool]


class Mark(Protocol):
    name: str
    source: str

    def living(self) -> list[int]: ...


def is_running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.parametrize(
    ("program", "status", "exit_code", "stdout"),
    [
        (Program("print(input())", stdin="hello\n"), "ok", 0, "hello\n"),
        (Program("import sys; print(sys.argv)", arguments=("a", "b c")), "ok", 0, "['main.py', 'a', 'b c']\n"),
        (Program("import part.one; print(open('x').read())", files={"part/one.py": "", "x": "é"}), "ok", 0, "é\n"),
        (Program("print(__name__, __file__)"), "ok", 0, "__main__ /tmp/box/main.py\n"),
        (Program("import threading\nthreading.Thread(target=lambda: print('late')).start()"), "ok", 0, "late\n"),
        (Program("import sys\nprint(1)\nsys.exit(3)"), "error", 3, "1\n"),
        (Program("exit('no')"), "error", 1, ""),
        (Program("1 / 0"), "error", 1, ""),
        (Program("def"), "error", 1, ""),
        (Program("a\0b"), "error", 1, ""),
        (Program("print('\ud800')"), "error", 1, ""),
        (Program("import os; os.abort()"), "killed", -signal.SIGABRT, ""),
        (Program("x = [0] * 10 ** 11"), "memory", 1, ""),
    ],
)  # fmt: skip
def test_a_program_runs_like_a_main_file(
    sandbox: Sandbox, program: Program, status: str, exit_code: int, stdout: str
) -> None:
    outcome = sandbox.run_sync(program)
    assert (outcome.status, outcome.exit_code, outcome.stdout) == (status, exit_code, stdout), outcome


def test_tracebacks_show_the_program_and_nothing_else(sandbox: Sandbox) -> None:
    lines = sandbox.run_sync(Program("def f():\n    return 1 / 0\nf()")).stderr.splitlines()
    assert [line for line in lines if "File" in line] == [
        '  File "/tmp/box/main.py", line 3, in <module>',
        '  File "/tmp/box/main.py", line 2, in f',
    ]


def test_programs_share_nothing(sandbox: Sandbox) -> None:
    leave = "import os\nprint(os.listdir('.'), os.listdir('/tmp'), os.listdir('/dev/shm'))\n" + "".join(
        f"open('{path}', 'w').write('x')\n" for path in ("left", "/tmp/left", "/dev/shm/left")
    )
    said = {sandbox.run_sync(Program(leave)).stdout for _ in range(6)}
    assert said == {"['main.py'] ['box'] []\n"}


def test_main_thread_worker_thread_and_asyncio_agree(sandbox: Sandbox) -> None:
    programs = [Program("print(sum(range(10)))"), Program("raise SystemExit(5)"), Program("while True: pass")]
    limits = Limits(wall_seconds=1.0)

    def seen(pool_run: Callable[[Program, Limits], object]) -> list[object]:
        return [(o.status, o.exit_code, o.stdout) for o in (pool_run(program, limits) for program in programs)]  # type: ignore[attr-defined]

    expected = [("ok", 0, "45\n"), ("error", 5, ""), ("timeout", None, "")]
    assert seen(sandbox.run_sync) == expected
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(seen, sandbox.run_sync).result(timeout=60) == expected
    assert seen(lambda program, limits: asyncio.run(sandbox.run(program, limits))) == expected


def test_many_programs_at_once_each_get_their_own_outcome(sandbox: Sandbox) -> None:
    async def run() -> list[str]:
        outcomes = await asyncio.gather(*(sandbox.run(Program(f"print({number})")) for number in range(24)))
        return [outcome.stdout for outcome in outcomes]

    assert asyncio.run(run()) == [f"{number}\n" for number in range(24)]


def test_no_more_programs_run_at_once_than_the_size(has_sandbox: None, mark: Mark) -> None:
    pool = Sandbox(size=1)
    try:
        source = mark.source + "import time\ntime.sleep(0.3)"
        with ThreadPoolExecutor(3) as threads:
            running = [threads.submit(pool.run_sync, Program(source)) for _ in range(3)]
            most = 0
            while not all(future.done() for future in running):
                most = max(most, len(mark.living()))
        assert most == 1
    finally:
        pool.close()


def test_cancelling_kills_the_program_and_not_the_pool(sandbox: Sandbox, mark: Mark, wait_until: WaitUntil) -> None:
    async def run() -> None:
        task = asyncio.create_task(sandbox.run(Program(mark.source + "import time\ntime.sleep(60)")))
        while not mark.living():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert wait_until(lambda: mark.living() == [])
    assert sandbox.run_sync(Program("print(1)")).stdout == "1\n"


def test_a_cancelled_program_that_still_waits_never_starts(has_sandbox: None, mark: Mark) -> None:
    pool = Sandbox(size=1)

    async def run() -> None:
        first = asyncio.create_task(pool.run(Program("import time\ntime.sleep(0.5)")))
        second = asyncio.create_task(pool.run(Program(mark.source + "print('ran')")))
        await asyncio.sleep(0.05)
        second.cancel()
        assert (await first).status == "ok"
        assert (await pool.run(Program("print(1)"))).stdout == "1\n"
        assert second.cancelled()

    try:
        asyncio.run(run())
    finally:
        pool.close()


def test_closing_leaves_no_process_and_fails_what_runs(has_sandbox: None, mark: Mark, wait_until: WaitUntil) -> None:
    pool = Sandbox(size=2)
    failures: list[BaseException] = []

    def run() -> None:
        try:
            pool.run_sync(Program(mark.source + "import time\ntime.sleep(60)"))
        except SandboxFailed as error:
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert wait_until(lambda: len(mark.living()) == 2)
    pids = pool.process_ids
    pool.close()
    assert mark.living() == []
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []
    assert pool.process_ids == []
    for thread in threads:
        thread.join(timeout=30.0)
    assert len(failures) == 4
    pool.close()
    with pytest.raises(SandboxFailed, match="closed"):
        pool.run_sync(Program(""))


def test_closing_at_once_leaves_no_process(has_sandbox: None) -> None:
    pool = Sandbox(size=2)
    pool.run_sync(Program(""))
    pool.close()
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children")
    assert pool.process_ids == []
    assert "bwrap" not in [Path(f"/proc/{pid}/comm").read_text().strip() for pid in children.read_text().split()]


def test_a_killed_parent_takes_its_sandboxes_along(has_sandbox: None, mark: Mark, wait_until: WaitUntil) -> None:
    source = (
        "from temper.sandbox import Limits, Program, Sandbox\n"
        f"Sandbox(size=1).run_sync(Program({mark.source!r} + 'import time; time.sleep(60)'), Limits(wall_seconds=90))"
    )
    parent = subprocess.Popen([sys.executable, "-c", source])
    try:
        assert wait_until(lambda: len(mark.living()) == 1)
    finally:
        parent.kill()
        parent.wait(timeout=30)
    assert wait_until(lambda: mark.living() == [])


def test_a_warm_sandbox_that_died_is_replaced(has_sandbox: None, wait_until: WaitUntil) -> None:
    pool = Sandbox(size=1)
    try:
        assert pool.run_sync(Program("print(1)")).stdout == "1\n"
        assert wait_until(lambda: len(pool.process_ids) == 4)
        pids = pool.process_ids
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # some die with the one before
                os.kill(pid, signal.SIGKILL)
        assert wait_until(lambda: not any(map(is_running, pids)))
        assert pool.run_sync(Program("print(2)")).stdout == "2\n"
    finally:
        pool.close()


def test_a_broken_wall_is_a_failure_of_the_task_and_not_an_outcome(has_sandbox: None) -> None:
    pool = Sandbox(size=1)
    try:
        with pytest.raises(SandboxFailed, match=r"without a result: .*space"):
            pool.run_sync(Program("", files={"big": "x" * (2 << 20)}), Limits(file_bytes=1 << 20))
        object.__setattr__(pool._boundary, "bwrap", "/bin/false")
        with pytest.raises(SandboxFailed, match="could not be built"):
            pool.run_sync(Program(""), Limits(file_bytes=1 << 20))
        assert issubclass(SandboxFailed, TaskError)
    finally:
        pool.close()


def test_without_bubblewrap_nothing_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(requirement, "_has_built", {})
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="apt-get install bubblewrap"):
        require_sandbox()
    with pytest.raises(UserError, match="apt-get install bubblewrap"):
        Sandbox()


def test_without_permission_nothing_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_sandbox: None) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    for folder in (tmp_path, *tmp_path.parents[:-2]):
        folder.chmod(0o755)
    monkeypatch.setattr(requirement, "_has_built", {})
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(UserError, match=r"No permissions to create new namespace.*never run unprotected"):
        Sandbox()


@pytest.mark.parametrize("name", ["wall_seconds", "memory_bytes", "processes"])
def test_a_limit_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"{name}=0 must be above 0"):
        Limits(**{name: 0})
