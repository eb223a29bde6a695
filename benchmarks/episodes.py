"""Many episodes of a slow environment at once: is the engine kept busy, and does the event loop stay awake?

    python benchmarks/episodes.py --kinds async threads  # 512 episodes of 4 turns, 0.5 to 5 s a step; about a minute
    python benchmarks/episodes.py --kinds busy --episodes 64

Real episodes (rollout/episode.py), real threads, and an engine that takes a second for an answer. Of the three
environments "async" awaits, "threads" sleeps in a thread of its own (envs/threads.py), and "busy" computes in one for a
hundredth of its step, in Python: then all threads share one interpreter.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean

from temper.envs.threads import InThread
from temper.interpreter import quick_turns, seldom_collected
from temper.models.tiny import character_tokenizer
from temper.protocols import Env, EnvOpening, EnvReply
from temper.rollout.episode import EpisodeSetup, run_episode
from temper.tasks.render import Renderer
from temper.types import Completion, Finish, Message, Request, SamplingParams, Score, Status, Task, Trajectory

LOOK_SECONDS = 0.005
ANSWER_SECONDS = 1.0
BUSY_SHARE = 0.01


@dataclass
class IdleEngine:
    """A sampler that takes a while and says the same every time."""

    answer: list[int]
    seconds: float
    version: int = 0
    running: int = 0
    looks: list[int] = field(default_factory=list)

    async def generate(self, request: Request) -> Completion:
        self.running += 1
        await asyncio.sleep(self.seconds)
        self.running -= 1
        size = len(self.answer)
        return Completion(
            prompt_ids=request.prompt_ids, token_ids=self.answer, logprobs=[-1.0] * size, versions=[0] * size,
            finish=Finish.STOP, params=request.params,
        )  # fmt: skip


class Paid:
    """A reward that costs nothing."""

    async def score_turns(self, task: Task, said: Trajectory) -> tuple[Score, dict[str, Score], list[float]]:
        return Score.of(1.0), {}, []

    def weighted(self, parts: dict[str, Score]) -> dict[str, Score]:
        return parts


class SlowSteps:
    """Without async: each step takes between `low` and `high` seconds, by the seed."""

    def __init__(self, low: float, high: float, turns: int, is_busy: bool = False) -> None:
        self._span, self._turns, self._is_busy = (low, high), turns, is_busy

    def start(self, task: Task, seed: int) -> EnvOpening:
        self._draws = random.Random(f"{seed}/{task.id}")
        return EnvOpening(messages=task.messages)

    def seconds(self) -> float:
        self._turns -= 1
        return self._draws.uniform(*self._span)

    def step(self, message: Message) -> EnvReply:
        seconds = self.seconds()
        computes = seconds * BUSY_SHARE if self._is_busy else 0.0
        time.sleep(seconds - computes)
        until = time.thread_time() + computes
        while time.thread_time() < until:
            pass
        return self.reply()

    def reply(self) -> EnvReply:
        return EnvReply(messages=(Message(role="user", content="go on"),), is_done=self._turns == 0)

    def close(self) -> None: ...


class SlowAsync:
    """The same with async."""

    def __init__(self, low: float, high: float, turns: int) -> None:
        self._inside = SlowSteps(low, high, turns)

    async def start(self, task: Task, seed: int) -> EnvOpening:
        return self._inside.start(task, seed)

    async def step(self, message: Message) -> EnvReply:
        await asyncio.sleep(self._inside.seconds())
        return self._inside.reply()

    async def close(self) -> None: ...


KINDS: dict[str, Callable[[float, float, int], Env]] = {
    "async": SlowAsync,
    "threads": lambda low, high, turns: InThread(lambda: SlowSteps(low, high, turns), seconds=60 + high),
    "busy": lambda low, high, turns: InThread(lambda: SlowSteps(low, high, turns, is_busy=True), seconds=60 + high),
}


@dataclass(frozen=True, kw_only=True)
class Measured:
    seconds: float
    shortest: float
    """Of the longest episode, if nothing else ran."""
    num_completed: int
    busy_share: float
    """Of the time: at least one request at the engine."""
    running_mean: float
    lags: tuple[float, ...]
    """Seconds that the event loop was late, look by look, sorted."""

    def lag(self, share: float) -> float:
        return self.lags[min(len(self.lags) - 1, int(share * len(self.lags)))]


async def measure(kind: str, episodes: int, low: float, high: float, *, turns: int = 4) -> Measured:
    """Plays all episodes at once."""
    renderer = Renderer(character_tokenizer("abcdefghijklmnopqrstuvwxyz "))
    engine = IdleEngine(renderer.completion_ids("ok"), min(ANSWER_SECONDS, high))
    setup = EpisodeSetup(
        sampler=engine, renderer=renderer, scorer=Paid(), make_env=lambda name: KINDS[kind](low, high, turns),  # type: ignore[arg-type]
        params=SamplingParams(max_new_tokens=8, stop_ids=renderer.stop_ids), max_turns=turns,
        episode_seconds=600.0, seed=0,
    )  # fmt: skip
    tasks = [Task(id=f"t:{n}", messages=(Message(role="user", content="ask"),)) for n in range(episodes)]
    lags: list[float] = []
    watcher = asyncio.create_task(_watch(engine, lags))
    started = time.monotonic()
    with seldom_collected(), quick_turns():  # as the loop plays them
        played = await asyncio.gather(
            *(run_episode(setup, task, group_id=task.id, index=0, request_id=task.id) for task in tasks)
        )
    seconds = time.monotonic() - started
    watcher.cancel()
    alone = [_alone(task, low, high, turns, engine.seconds) for task in tasks]
    return Measured(
        seconds=seconds,
        shortest=max(alone),
        num_completed=sum(one.status is Status.COMPLETED for one in played),
        busy_share=fmean(count > 0 for count in engine.looks),
        running_mean=fmean(engine.looks),
        lags=tuple(sorted(lags)),
    )


def _alone(task: Task, low: float, high: float, turns: int, answer_seconds: float) -> float:
    env = SlowSteps(low, high, turns)
    env.start(task, 0)
    return sum(env.seconds() + answer_seconds for _ in range(turns))


async def _watch(engine: IdleEngine, lags: list[float]) -> None:
    while True:
        wanted = time.monotonic() + LOOK_SECONDS
        await asyncio.sleep(LOOK_SECONDS)
        lags.append(time.monotonic() - wanted)
        engine.looks.append(engine.running)


def row(kind: str, found: Measured) -> str:
    lags = " | ".join(f"{1000 * found.lag(share):.1f}" for share in (0.5, 0.99, 1.0))
    return (
        f"| {kind} | {found.num_completed} | {found.seconds:.1f} | {found.shortest:.1f} | {found.busy_share:.0%} | "
        f"{found.running_mean:.0f} | {lags} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=512)
    parser.add_argument("--low", type=float, default=0.5)
    parser.add_argument("--high", type=float, default=5.0)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    given = parser.parse_args()
    columns = (
        "completed | s | s of the longest alone | engine busy | requests at it | loop late, median ms | p99 | worst"
    )
    print(f"| environment | {columns} |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for kind in given.kinds:
        print(row(kind, asyncio.run(measure(kind, given.episodes, given.low, given.high))), flush=True)


if __name__ == "__main__":
    main()
