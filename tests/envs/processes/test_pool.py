"""Environments in workers are those of this process to the last value; a lost worker is an error and never a reward."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from temper import calls
from temper.build.environments import Environments
from temper.calls import DeadlinePassed
from temper.config.sections import EnvConfig
from temper.envs.processes.pool import EnvProcesses, InProcess
from temper.errors import BackendError, EnvironmentLost, TaskError
from temper.protocols import EnvReply
from temper.rollout.episode import EpisodeSetup, run_episode
from temper.types import EventKind, Message, Request, SamplingParams, Score, ScoreKind, Status, Task, Trajectory
from tests.fakes.episodes import END, FakeScorer, Letters, ask
from tests.fakes.sampler import FakeSampler

WORLD = "tests.envs.processes.worlds:World"
TASK = ask("go", answer="12")
ROOT = Path(__file__).parents[3]


class Sum(FakeScorer):
    async def score(self, task: Task, trajectory: Trajectory) -> tuple[Score, Mapping[str, Score]]:
        return Score.of(sum(turn.reward or 0.0 for turn in trajectory.turns)), {}


async def play(
    make_env: Any, scripts: Sequence[Sequence[str]], *, seconds: float = 20.0,
    before_draw: Callable[[Request], object] = lambda request: None,
) -> list[Trajectory]:  # fmt: skip
    """All scripts at once: what the policy says, turn by turn."""

    def draw(request: Request) -> list[int]:
        before_draw(request)
        place, turn = map(int, request.id.split("/"))
        return [*map(ord, scripts[place][turn]), END]

    setup = EpisodeSetup(
        sampler=FakeSampler(draw), renderer=Letters(), scorer=Sum(), make_env=make_env, max_turns=4, seed=3,
        params=SamplingParams(max_new_tokens=40, stop_ids=(END,)), episode_seconds=seconds,
    )  # fmt: skip
    tasks = [dataclasses.replace(TASK, id=f"t:{place}") for place in range(len(scripts))]
    played = await asyncio.gather(
        *(run_episode(setup, task, group_id="g", index=0, request_id=str(place)) for place, task in enumerate(tasks))
    )
    return [without_times(one) for one in played]


def without_times(trajectory: Trajectory) -> Trajectory:
    """How long a tool of ours took differs from run to run; what an environment says of its own is kept."""
    turns = [
        dataclasses.replace(turn, events=tuple(dataclasses.replace(one, seconds=0.0) for one in turn.events))
        for turn in trajectory.turns
    ]
    return dataclasses.replace(trajectory, seconds=0.0, turns=tuple(turns))


def say(env: InProcess, word: str) -> Awaitable[EnvReply]:
    return env.step(Message(role="assistant", content=word))


async def begin(workers: EnvProcesses, count: int) -> list[InProcess]:
    envs = [workers(WORLD) for _ in range(count)]
    await asyncio.gather(*(env.start(TASK, 0) for env in envs))
    return envs


def run(use: Callable[[EnvProcesses], Awaitable[None]], *, num_workers: int = 1, seconds: float = 30.0) -> None:
    async def inside() -> None:
        workers = EnvProcesses({}, num_workers=num_workers, seconds=seconds)
        await use(workers)
        pids = workers.process_ids
        await workers.close()
        assert not any(map(is_there, pids)), "nothing is left behind"

    calls.run(inside())


def is_there(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.parametrize(
    ("name", "options", "scripts"),
    [
        (
            name,
            {"size": 7},
            [("a", "free", "end"), ("a", "bad"), ("a", "b", "c", "d"), ("a", "raise"), ("leave",), ("nan",)],
        )
        for name in (WORLD, "tests.envs.processes.worlds:threaded")
    ]
    + [("calculator", {}, [("calc(4*(2+1))", "12"), ("calc(1/0)", "calc(2", "13"), ("calc()",) * 4])],
)
def test_whole_trajectories_are_those_of_this_process(name: str, options: dict[str, Any], scripts: list[Any]) -> None:
    async def both() -> list[list[Trajectory]]:
        configs = [EnvConfig(name=name, options=options, place=place) for place in ("here", "process")]
        return [await play(Environments(config), scripts) for config in configs]

    here, elsewhere = calls.run(both())
    assert here == elsewhere
    assert [one.error for one in here] == [one.error for one in elsewhere]
    assert here[0].status is Status.COMPLETED
    assert len({type(one.turns[0].reward) for one in here if one.turns}) == 1
    if name == WORLD:
        assert [event.detail for event in elsewhere[0].unplaced_events] == ["told at the end"]
        assert [turn.state for turn in elsewhere[0].turns] == ["at the start", "heard a", None]
        assert [one.status for one in here[3:]] == [Status.TOOL_ERROR] * 3
        assert "ZeroDivisionError" in str(elsewhere[3].error)
        assert "worlds.py, line" in str(elsewhere[3].error), "the line of its author"
        assert [one.score.kind for one in elsewhere[3:]] == [ScoreKind.ERROR] * 3


def lose_one(word: str, reason: str, seconds: float = 30.0) -> None:
    async def use(workers: EnvProcesses) -> None:
        culprit, apart, beside = await begin(workers, 3)
        before = workers.process_ids
        waiting = asyncio.ensure_future(say(beside, "wait"))
        await asyncio.sleep(0)
        with pytest.raises(EnvironmentLost, match=reason):
            await say(culprit, word)
        with pytest.raises(EnvironmentLost, match="every episode that it played with it: 2") as during:
            await waiting
        with pytest.raises(EnvironmentLost, match="is lost") as after:
            await say(beside, "a")
        assert (during.value.is_suspect, after.value.is_suspect) == (True, False), "who had a call under way"
        assert (await say(apart, "a")).reward is not None, "another worker goes on"
        for env in (culprit, apart, beside):
            await env.close()
        (fresh,) = await begin(workers, 1)
        assert (await say(fresh, "a")).reward is not None
        again = await play(workers_named(workers), [(word,), ("end",)])
        assert [one.status for one in again] == [Status.TOOL_ERROR, Status.COMPLETED]
        assert again[0].score.kind is ScoreKind.ERROR
        assert not is_there(before[0]) or not is_there(before[1])
        await fresh.close()

    run(use, num_workers=2, seconds=seconds)


def workers_named(workers: EnvProcesses) -> Callable[[str], InProcess]:
    return lambda name: workers(WORLD)


def test_a_killed_worker_is_an_error_of_its_episodes_and_is_replaced() -> None:
    lose_one("kill", "signal SIGKILL")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_episodes_of_a_lost_worker_are_played_anew_and_are_as_if_it_had_lived(number: signal.Signals) -> None:
    scripts = [("a", "b", "c", "end"), ("free", "d", "end"), ("a", "end")]

    async def use(workers: EnvProcesses) -> None:
        undisturbed = await play(workers_named(workers), scripts)
        hit = workers.process_ids

        def hit_once(request: Request) -> None:
            if request.id == "0/2" and workers.process_ids == hit:
                os.kill(hit[0], number)

        disturbed = await play(workers_named(workers), scripts, before_draw=hit_once)
        assert workers.process_ids != hit, "it was lost"
        assert [one.status for one in undisturbed] == [Status.COMPLETED] * 3
        assert [as_if_alone(one) for one in disturbed] == undisturbed
        assert any(one.unplaced_events != as_if_alone(one).unplaced_events for one in disturbed), "the loss is told"

    run(use, seconds=2.0)


def as_if_alone(trajectory: Trajectory) -> Trajectory:
    """Without what is told of plays that were lost."""
    kept = (event for event in trajectory.unplaced_events if event.kind is not EventKind.REPLAYED)
    return dataclasses.replace(trajectory, unplaced_events=tuple(kept))


def test_of_the_episodes_of_a_worker_only_that_which_ends_it_each_time_is_an_error() -> None:
    scripts = [("a", "kill"), ("nap", "b", "end"), ("nap", "end"), ("a", "nap", "end")]

    async def use(workers: EnvProcesses) -> None:
        _, *undisturbed = await play(workers_named(workers), [("a", "end"), *scripts[1:]])
        culprit, *others = await play(workers_named(workers), scripts)
        assert culprit.status is Status.TOOL_ERROR
        assert [one.status for one in undisturbed] == [Status.COMPLETED] * 3
        assert [as_if_alone(one) for one in others] == undisturbed
        assert len(workers.process_ids) <= 1, "a process that one episode had for itself is not kept"

    run(use)


def test_what_lost_plays_have_cost_counts_for_what_the_episode_may_cost() -> None:
    async def killed(most: float) -> tuple[Trajectory, Trajectory]:
        workers = EnvProcesses({}, num_workers=1, seconds=30.0, max_cost=most)
        make, script = lambda name: workers("tests.envs.processes.worlds:Priced"), [("buy()", "buy()", "done")]
        (undisturbed,) = await play(make, script)
        hit = workers.process_ids

        def hit_once(request: Request) -> None:
            if request.id == "0/2" and workers.process_ids == hit:
                os.kill(hit[0], signal.SIGKILL)

        (disturbed,) = await play(make, script, before_draw=hit_once)
        await workers.close()
        return undisturbed, disturbed

    for most, costs in ((9.0, 8.0), (0.0, 8.0)):
        undisturbed, disturbed = calls.run(killed(most))
        assert undisturbed.status is Status.COMPLETED
        assert as_if_alone(disturbed) == undisturbed
        assert sum(event.cost for event in disturbed.events) == costs
    for most, costs in ((7.0, 6.0), (4.0, 4.0)):
        undisturbed, disturbed = calls.run(killed(most))
        assert undisturbed.status is Status.COMPLETED
        assert (disturbed.status, disturbed.score.kind) == (Status.TOOL_ERROR, ScoreKind.ERROR), (
            "not the policy's doing"
        )
        assert sum(event.cost for event in disturbed.events) == costs


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("word", "reason", "seconds"),
    [("exit", "exit code 3", 30.0), ("segfault", "signal SIGSEGV", 30.0), ("spin", "no sign of life for 2 s", 2.0)],
)
def test_a_worker_that_ends_or_hangs_is_an_error_of_its_episodes_and_is_replaced(
    word: str, reason: str, seconds: float
) -> None:
    lose_one(word, reason, seconds)


def test_what_waits_too_long_or_cannot_be_sent_costs_one_episode() -> None:
    async def use(workers: EnvProcesses) -> None:
        late, odd, given_up, sound = await begin(workers, 4)
        with pytest.raises(DeadlinePassed, match=r"World\.step\(\) took longer than 1 s"):
            await say(late, "wait")
        with pytest.raises(TaskError, match=r'step\(\) returned cannot be sent .* env.place = "here"'):
            await say(odd, "odd")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(say(given_up, "wait"), 0.1)
        for env in (late, odd, given_up):
            await env.close()
        (reply,) = [(await say(sound, "open")).messages[0].content]
        assert reply == "1", "the others are closed"
        assert (await say(sound, "torch")).messages[0].content == "False"
        assert (await say(sound, "pid")).messages[0].content == str(workers.process_ids[0])
        await sound.close()

    run(use, seconds=1.0)


def test_episodes_spread_over_workers_and_sets_are_alike_in_all() -> None:
    async def use(workers: EnvProcesses) -> None:
        assert workers.process_ids == [], "none before it is needed"
        envs = await begin(workers, 6)
        pids = [(await say(env, "pid")).messages[0].content for env in envs]
        assert sorted(map(pids.count, set(pids))) == [3, 3]
        assert len({(await say(env, "set")).messages[0].content for env in envs}) == 1
        # Whoever ends makes room for the next where it was.
        await asyncio.gather(*(env.close() for env, pid in zip(envs, pids, strict=True) if pid == pids[0]))
        (fresh,) = await begin(workers, 1)
        assert (await say(fresh, "pid")).messages[0].content == pids[0]

    run(use, num_workers=2)


@pytest.mark.heavy
def test_steps_that_follow_each_other_without_a_pause_are_no_hang() -> None:
    async def use(workers: EnvProcesses) -> None:
        envs = await begin(workers, 8)
        replies = await asyncio.gather(*(say(env, "hold") for env in envs))  # 4 s in one turn of its event loop
        assert all(reply.reward is not None for reply in replies)

    run(use, seconds=2.0)


@pytest.mark.heavy
def test_workers_end_with_the_event_loop() -> None:
    async def leave() -> list[int]:
        workers = EnvProcesses({}, num_workers=1, seconds=30.0)
        (env,) = await begin(workers, 1)
        await asyncio.wait({asyncio.ensure_future(say(env, "long"))}, timeout=0.1)
        return workers.process_ids

    (pid,) = calls.run(leave())
    assert not is_there(pid)


DRIVER = """
import asyncio
from temper.envs.processes.pool import EnvProcesses
from temper.types import Message, Task

async def main():
    workers = EnvProcesses({}, num_workers=1, seconds=600.0)
    env = workers("tests.envs.processes.worlds:World")
    await env.start(Task(id="t", messages=(Message(role="user", content="go"),)), 0)
    print(workers.process_ids[0], flush=True)
    await env.step(Message(role="assistant", content="spin"))

asyncio.run(main())
"""


@pytest.mark.heavy
def test_workers_end_with_a_driver_that_is_killed_though_they_hold_their_interpreter() -> None:
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, cwd=ROOT, env=os.environ)
    assert driver.stdout is not None
    pid = int(driver.stdout.readline())
    time.sleep(0.5)
    driver.send_signal(signal.SIGKILL)
    driver.wait(timeout=10)
    driver.stdout.close()
    deadline = time.monotonic() + 10
    while is_there(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_there(pid)


def test_an_environment_that_workers_cannot_find_stops_the_run_and_names_the_key() -> None:
    async def use(workers: EnvProcesses) -> None:
        env = workers("tests.envs.processes.worlds:Nowhere")
        with pytest.raises(BackendError, match=r'env.place = "process": .*has no function "Nowhere"'):
            await env.start(TASK, 0)
        await env.close()

    run(use)


@pytest.mark.heavy
def test_a_worker_that_cannot_start_stops_the_run_and_names_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("temper.envs.processes.pool.worker_command", lambda module: [sys.executable, "-c", "import no"])

    async def use(workers: EnvProcesses) -> None:
        env = workers(WORLD)
        with pytest.raises(BackendError, match=r'env.place = "process": a worker did not start .exit code 1'):
            await env.start(TASK, 0)

    run(use)
