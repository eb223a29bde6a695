"""What rollouts cost the host as they grow: the buffer by groups, block tables by rows, row arrays by tokens.

    python benchmarks/rollouts.py buffer --groups 1024 4096     # seconds of a step at staleness 4
    python benchmarks/rollouts.py tables --rows 1024 4096       # bytes and milliseconds of a look, rows of 32k tokens
    python benchmarks/rollouts.py rows --rows 4096              # memory of rows that may become 40k tokens long
All three should grow no faster than what they are given: a group, a new block, a token that is held.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable

import numpy as np
import torch

from temper.engine.local.rows import Rows
from temper.engine.local.sequence import Sequence
from temper.engine.local.tables import BlockTables
from temper.rollout.buffer import Buffer
from temper.types import (
    Completion,
    Finish,
    Group,
    Message,
    Request,
    SamplingParams,
    Score,
    Status,
    Task,
    Trajectory,
    Turn,
)

BLOCK_SIZE = 16
STEPS = 3
PROMPTS: dict[int, tuple[int, ...]] = {}
"""By length, shared by all rows: Python objects are not what is measured."""


def buffer(count: int) -> str:
    """Every group starts, finishes in any order and is trained, at staleness 4."""
    order = np.random.default_rng(0)

    async def run() -> float:
        held, draw = Buffer(groups_per_step=count, max_staleness=4, max_rounds=10), 0
        seconds = []
        for version in range(1, STEPS + 1):
            started, running = time.thread_time(), []
            for _ in range(await held.wait_for_room(1.0)):
                await held.start(draw)
                running.append(draw)
                draw += 1
            for number in order.permutation(running).tolist():
                await held.finish(make_group(number, version - 1), None)
                assert held.room <= 0
            await held.take(60.0)
            await held.release(version)
            seconds.append(time.thread_time() - started)
        return seconds[-1]  # the first fills five steps

    return f"{count:,} groups a step: {asyncio.run(run()):.3f} s a step"


def make_group(draw: int, version: int) -> Group:
    task = Task(id="t", messages=(Message(role="user", content="?"),))
    completion = Completion(prompt_ids=(1,), token_ids=[2], logprobs=[0.0], versions=[version], finish=Finish.STOP)
    turn = Turn(completion=completion, message=Message(role="assistant", content="!"))
    member = Trajectory(task_id="t", group_id="g", index=0, turns=(turn,), status=Status.COMPLETED, score=Score.of(0.0))
    return Group(id=f"g{draw}", draw=draw, task=task, trajectories=(member,))


def enter(rows: Rows, tokens: list[int], limit: int, first_block: int) -> None:
    request = Request(id="r", prompt_ids=PROMPTS.setdefault(len(tokens), tuple(tokens)), params=SamplingParams())
    sequence = Sequence(request=request, random_key=0, deliver=lambda _: None)
    sequence.blocks = np.arange(first_block, first_block - -len(tokens) // BLOCK_SIZE, dtype=np.int64)
    rows.enter(sequence, limit)


def tables(count: int, tokens: int = 32_768) -> str:
    """A look of the host at which every sixteenth row has a new block, and one at which a row has left."""
    rows, width, text = Rows(count, BLOCK_SIZE), tokens // BLOCK_SIZE + 64, [1] * tokens
    for row in range(count):
        enter(rows, text, tokens + 512, 1 + row * width)
    held, everyone = (
        BlockTables(count, width, torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        np.arange(count),
    )
    held.seat(everyone, rows, count)

    def look() -> None:
        rows.extend(everyone[::16], np.ones(len(everyone[::16]), dtype=np.int64), everyone[::16] + 1)
        held.seat(everyone, rows, count)

    def leave() -> None:
        rows.leave(0)
        held.seat(everyone[1:], rows, count)

    plain, left = measure(held, look), measure(held, leave)
    return f"{count:,} rows of {tokens:,} tokens: {plain} a look; {left} when a row has left"


def measure(held: BlockTables, act: Callable[[], None]) -> str:
    before, started = held.bytes_sent, time.perf_counter()
    act()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return f"{held.bytes_sent - before:,} bytes, {1000 * (time.perf_counter() - started):.2f} ms"


def rows(count: int, limit: int = 40_000, tokens: int = 1_000) -> str:
    """Memory of rows that hold 1,000 tokens each and may become 40,000 long."""
    text = [1] * tokens
    before, held = resident_bytes(), Rows(count, BLOCK_SIZE)
    for _ in range(count):
        enter(held, text, limit, 1)
    reserved = held.tokens.nbytes + held.logprobs.nbytes + held.blocks.nbytes
    used = resident_bytes() - before
    sizes = f"{reserved / 2**30:.2f} GiB reserved, {used / 2**20:.0f} MiB used"
    return f"{count:,} rows of {tokens:,} of {limit:,} tokens: {sizes}"


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


PARTS: dict[str, tuple[Callable[[int], str], str, list[int]]] = {
    "buffer": (buffer, "--groups", [1024, 4096]),
    "tables": (tables, "--rows", [1024, 4096]),
    "rows": (rows, "--rows", [4096]),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="part", required=True)
    for name, (function, flag, sizes) in PARTS.items():
        command = commands.add_parser(name, help=function.__doc__)
        command.add_argument(flag, dest="sizes", type=int, nargs="+", default=sizes)
    options = parser.parse_args()
    for size in options.sizes:
        print(PARTS[options.part][0](size))


if __name__ == "__main__":
    main()
