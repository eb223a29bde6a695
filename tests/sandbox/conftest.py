"""Shared by the sandbox tests: a pool, the same program outside it, and a mark by which its processes are found."""

from __future__ import annotations

import contextlib
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from temper.errors import UserError
from temper.sandbox import Limits, Program, Sandbox, require_sandbox


@pytest.fixture(scope="session")
def has_sandbox() -> None:
    try:
        require_sandbox()
    except UserError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def sandbox(has_sandbox: None) -> Iterator[Sandbox]:
    pool = Sandbox(size=2, limits=Limits(wall_seconds=30.0))
    yield pool
    pool.close()


@pytest.fixture
def outside(tmp_path: Path) -> Callable[..., str]:
    """Runs source unprotected, for acts that are harmless: the control that they succeed where nothing forbids them."""

    def run(source: str, seconds: float = 30.0) -> str:
        done = subprocess.run(
            [sys.executable, "-c", source], capture_output=True, text=True, timeout=seconds, cwd=tmp_path
        )
        return done.stdout

    return run


@dataclass(frozen=True)
class Mark:
    """A name that a program and all it forks carry, by which they can be found from outside."""

    name: str

    @property
    def source(self) -> str:
        return f"import os\nwith open('/proc/self/comm', 'w') as file:\n    file.write({self.name!r})\n"

    def living(self) -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if (entry / "comm").read_text().strip() == self.name:
                        found.append(int(entry.name))
        return found


@pytest.fixture
def mark() -> Mark:
    return Mark(f"box-{secrets.token_hex(5)}")


@pytest.fixture
def wait_until() -> Callable[[Callable[[], bool]], bool]:
    def wait(condition: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + 30.0
        while time.monotonic() < deadline:
            if condition():
                return True
            time.sleep(0.02)
        return condition()

    return wait


@pytest.fixture
def healthy(sandbox: Sandbox) -> Iterator[None]:
    """After whatever the test did, the pool still runs programs and the parent still stands."""
    yield
    for _ in range(2 * sandbox.size):
        outcome = sandbox.run_sync(Program("print(6 * 7)"))
        assert (outcome.status, outcome.exit_code, outcome.stdout) == ("ok", 0, "42\n"), outcome
