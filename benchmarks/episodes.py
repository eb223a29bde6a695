"""Many episodes of a slow environment at once: is the engine kept busy, and does the event loop stay awake?

    python benchmarks/episodes.py --kinds async threads processes  # 512 episodes of 4 turns, 0.5 to 5 s a step
    python benchmarks/episodes.py --kinds burn-threads burn-processes --episodes 64 --low 0 --high 0

Real episodes (rollout/episode.py), real threads and workers, and an engine that takes a second for an answer. Of the
environments "async" awaits, "threads" sleeps in a thread of its own (envs/threads.py), "processes" in one of a worker
(envs/processes/). The other two compute for 50 ms of each step, in Python: threads share one interpreter.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Literal

from slow_worlds import SlowSteps

from temper.build.environments import Environments
from temper.config.sections import EnvConfig
from temper.interpreter import quick_turns, seldom_collected
from temper.models.tiny import character_tokenizer
from temper.rollout.episode import EpisodeSetup, run_episode
from temper.tasks.render import Renderer
from temper.types import Completion, Finish, Message, Request, SamplingParams, Score, Status, Task, Trajectory

LOOK_SECONDS = 0.005
ANSWER_SECONDS = 1.0
BURN_SECONDS = 0.05


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


WORLDS = Path(__file__).with_name("slow_worlds.py")


@dataclass(frozen=True)
class Kind:
    """Where environments live, and how long a step of one computes."""

    env: str
    place: Literal["here", "process"]
    burns: float = 0.0


KINDS = {
    "async": Kind("SlowAsync", "here"),
    "threads": Kind("threaded", "here"),
    "processes": Kind("threaded", "process"),
    "burn-threads": Kind("threaded", "here", BURN_SECONDS),
    "burn-processes": Kind("threaded", "process", BURN_SECONDS),
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
    """Seconds that the event loop was late for what was due every 5 ms, sorted."""

    def lag(self, share: float) -> float:
        return self.lags[min(len(self.lags) - 1, int(share * len(self.lags)))]


async def measure(kind: str, episodes: int, low: float, high: float, *, turns: int = 4) -> Measured:
    """Plays all episodes at once."""
    renderer = Renderer(character_tokenizer("abcdefghijklmnopqrstuvwxyz "))
    engine = IdleEngine(renderer.completion_ids("ok"), min(ANSWER_SECONDS, high) or ANSWER_SECONDS)
    options = {"low": low, "high": high, "turns": turns, "burns": KINDS[kind].burns}
    env = EnvConfig(name=f"{WORLDS}:{KINDS[kind].env}", options=options, place=KINDS[kind].place)
    environments = Environments(env)
    setup = EpisodeSetup(
        sampler=engine, renderer=renderer, scorer=Paid(), make_env=environments,  # type: ignore[arg-type]
        params=SamplingParams(max_new_tokens=8, stop_ids=renderer.stop_ids), max_turns=turns,
        episode_seconds=600.0, seed=0,
    )  # fmt: skip
    tasks = [Task(id=f"t:{n}", messages=(Message(role="user", content="ask"),)) for n in range(episodes)]
    lags: list[float] = []
    with seldom_collected(), quick_turns():  # as the loop plays them
        watcher = asyncio.create_task(_watch(engine, lags))
        started = time.monotonic()
        played = await asyncio.gather(
            *(run_episode(setup, task, group_id=task.id, index=0, request_id=task.id) for task in tasks)
        )
    seconds = time.monotonic() - started
    watcher.cancel()
    await environments.close()
    alone = [_alone(task, options, engine.seconds) for task in tasks]
    return Measured(
        seconds=seconds,
        shortest=max(alone),
        num_completed=sum(one.status is Status.COMPLETED for one in played),
        busy_share=fmean(count > 0 for count in engine.looks),
        running_mean=fmean(engine.looks),
        lags=tuple(sorted(lags)),
    )


def _alone(task: Task, options: dict[str, float], answer_seconds: float) -> float:
    env = SlowSteps(**options)  # type: ignore[arg-type]
    env.start(task, 0)
    return sum(env.seconds() + options["burns"] + answer_seconds for _ in range(int(options["turns"])))


async def _watch(engine: IdleEngine, lags: list[float]) -> None:
    while True:
        wanted = time.monotonic() + LOOK_SECONDS
        await asyncio.sleep(LOOK_SECONDS)
        late = time.monotonic() - wanted
        # Whatever else was due meanwhile was late, too: else a loop that stands still would be looked at only once.
        lags += [late - LOOK_SECONDS * place for place in range(1 + int(late / LOOK_SECONDS))]
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
