"""Small Python programs per second through the sandbox, against starting a bare interpreter for each. One table.

python benchmarks/sandbox.py                 # two at a time
python benchmarks/sandbox.py --size 8
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from rich.console import Console
from rich.table import Table

from temper.sandbox import Program, Sandbox

SOURCE = "numbers = [int(word) for word in input().split()]\nprint(sum(number * number for number in numbers))\n"
STDIN, EXPECTED = "3 4 5\n", "50\n"


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
    started = time.perf_counter()
    bare = bare_seconds(options.size, options.programs)
    add("bare interpreter, unprotected", bare, time.perf_counter() - started)
    Console().print(table)


if __name__ == "__main__":
    main()
