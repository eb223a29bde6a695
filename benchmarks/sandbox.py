"""Small Python programs per second through the sandbox, against starting a bare interpreter for each; shell commands
over 20 files; and how long env "shell" takes to begin an episode. One table.

python benchmarks/sandbox.py                 # two at a time
python benchmarks/sandbox.py --size 8
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from rich.console import Console
from rich.table import Table

from temper.envs.library.shell import ShellEnv
from temper.sandbox import Command, Program, Sandbox
from temper.types import Message, Task

SOURCE = "numbers = [int(word) for word in input().split()]\nprint(sum(number * number for number in numbers))\n"
STDIN, EXPECTED = "3 4 5\n", "50\n"
FILES = {f"module_{number}.py": "x = 1\n" * 200 for number in range(20)}


def bare_seconds(size: int, programs: int) -> list[float]:
    """Unprotected, for comparison: a new `python -I -S` for this program, which we wrote."""

    def run(_: int) -> float:
        started = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", SOURCE], input=STDIN, capture_output=True, text=True, timeout=60
        )
        assert done.stdout == EXPECTED, done
        return time.perf_counter() - started

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(programs)))


async def sandbox_seconds(sandbox: Sandbox, programs: int) -> list[float]:
    async def run() -> float:
        outcome = await sandbox.run(Program(SOURCE, stdin=STDIN))
        assert (outcome.status, outcome.stdout) == ("ok", EXPECTED), outcome
        return outcome.seconds

    return await asyncio.gather(*(run() for _ in range(programs)))


async def command_seconds(sandbox: Sandbox, commands: int) -> list[float]:
    files = {path: text.encode() for path, text in FILES.items()}

    async def run() -> float:
        outcome = await sandbox.run(Command("sed -i s/1/2/ module_0.py && wc -l *.py | tail -1", files))
        assert (outcome.status, len(outcome.files or {})) == ("ok", len(FILES)), outcome
        return outcome.seconds

    return await asyncio.gather(*(run() for _ in range(commands)))


async def reset_seconds(episodes: int) -> list[float]:
    """From nothing to an episode that takes calls: what a reset is."""
    task = Task(id="t", messages=(Message(role="user", content="go"),), extra={"files": json.dumps(FILES)})
    seconds = []
    for seed in range(episodes):
        started = time.perf_counter()
        await ShellEnv().start(task, seed)
        seconds.append(time.perf_counter() - started)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=2, help="programs at a time")
    parser.add_argument("--programs", type=int, default=200)
    options = parser.parse_args()

    table = Table(title=f"{options.programs} programs, {options.size} at a time, {os.cpu_count()} cores")
    for column in ("", "programs/s", "median ms", "p95 ms"):
        table.add_column(column, justify="left" if not column else "right")

    def add(name: str, seconds: list[float], elapsed: float) -> None:
        p95 = statistics.quantiles(seconds, n=20)[-1]
        rate = f"{len(seconds) / elapsed:.1f}"
        table.add_row(name, rate, f"{1e3 * statistics.median(seconds):.1f}", f"{1e3 * p95:.1f}")

    sandbox = Sandbox(size=options.size)
    try:
        asyncio.run(sandbox_seconds(sandbox, 2 * options.size))  # fills the pool
        started = time.perf_counter()
        inside = asyncio.run(sandbox_seconds(sandbox, options.programs))
        add("sandbox", inside, time.perf_counter() - started)
    finally:
        sandbox.close()
    shell = Sandbox(size=options.size, has_shell=True)
    try:
        asyncio.run(command_seconds(shell, 2 * options.size))
        started = time.perf_counter()
        inside = asyncio.run(command_seconds(shell, options.programs))
        add("shell commands", inside, time.perf_counter() - started)
    finally:
        shell.close()
    started = time.perf_counter()
    resets = asyncio.run(reset_seconds(options.programs))
    add('resets of env "shell"', resets, time.perf_counter() - started)
    started = time.perf_counter()
    bare = bare_seconds(options.size, options.programs)
    add("bare interpreter, unprotected", bare, time.perf_counter() - started)
    Console().print(table)


if __name__ == "__main__":
    main()
