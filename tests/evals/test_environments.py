"""Every verdict on an environment, each provoked by one that is wrong in that way and in no other."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import socket
import subprocess
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from temper.envs.env import Allowed, find_env
from temper.envs.library.calculator import Calculator, arithmetic
from temper.envs.library.files import FilesEnv, files
from temper.envs.library.repair import repair
from temper.envs.library.search import SearchEnv, search
from temper.envs.library.shell import ShellEnv
from temper.envs.library.shop import ShopEnv, read_shop, shop, write_shop
from temper.envs.permissions import Permissions
from temper.envs.tool_env import Presentation, ToolEnv
from temper.envs.tools import Tool, make_tool
from temper.errors import UserError
from temper.evals.environments import EnvTrial, EnvVerdict, check_environment, judge_learnable
from temper.protocols import Env, EnvOpening, EnvReply
from temper.sandbox import require_sandbox
from temper.types import Group, Message, Score, Task, Trajectory


def missing() -> str:
    try:
        require_sandbox()
    except UserError as error:
        return str(error)
    return ""


needs_sandbox = pytest.mark.skipif(bool(missing()), reason=missing() or "the sandbox is there")
TASKS = [
    Task(id=f"t:{place}", messages=(Message(role="user", content=f"{place}+1"),), answer=str(place + 1))
    for place in range(6)
]


class Sums:
    """A good one: says what it thinks of an answer, and ends."""

    async def start(self, task: Task, seed: int) -> EnvOpening:
        self.task = task
        return EnvOpening(messages=task.messages)

    async def step(self, message: Message) -> EnvReply:
        return EnvReply(is_done=True, reward=float(message.content == self.task.answer))

    async def close(self) -> None: ...


async def paid(task: Task, said: Trajectory) -> Score:
    return Score.of(said.turns[-1].reward or 0.0)


async def judged_by_words(task: Task, said: Trajectory) -> Score:
    return Score.of(float(said.text == task.answer))


async def judged_by_files(task: Task, said: Trajectory) -> Score:
    """As reward code does, with the files that are known to pass in place of tests."""
    return Score.of(float(json.loads(said.result or "{}") == json.loads(str(task.extra["solution"]))))


SCORES = {"calculator": judged_by_words, "shell": judged_by_files}


def verdicts(make: Callable[[], Env], tasks: list[Task] = TASKS, *, seconds: float = 5.0) -> dict[str, EnvVerdict]:
    score = SCORES.get(tasks[0].env, paid)
    trial = EnvTrial(
        make_env=lambda name: make(), tasks=tasks, seed=0, seconds=seconds, score=score, pays=score is paid
    )
    return {verdict.name: verdict for verdict in asyncio.run(check_environment(trial))}


def wrong(found: dict[str, EnvVerdict]) -> dict[str, str]:
    return {name: verdict.said for name, verdict in found.items() if verdict.is_fine is False}


def test_a_good_environment_passes_every_check() -> None:
    found = verdicts(Sums)
    assert wrong(found) == {}
    assert {verdict.is_fine for verdict in found.values()} == {True}
    assert found["judges"].said == "right answers (mean 1) above changed ones in 6 of 6 tasks"


def test_a_file_that_stays_is_found(tmp_path: Path) -> None:
    names = itertools.count()

    class Litters(Sums):
        async def close(self) -> None:
            (tmp_path / f"left-{next(names)}").write_text("x")

    assert "files" in wrong(verdicts(Litters))["leaves nothing"]
    assert str(tmp_path) in wrong(verdicts(Litters))["leaves nothing"]


def test_a_file_that_is_taken_away_is_none(tmp_path: Path) -> None:
    class Tidy(Sums):
        async def close(self) -> None:
            with tempfile.NamedTemporaryFile("w") as file:
                file.write("x")

    assert wrong(verdicts(Tidy)) == {}


def test_a_thread_that_stays_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("temper.evals.environments.SETTLE_SECONDS", 0.1)
    is_over = threading.Event()

    class Spins(Sums):
        async def close(self) -> None:
            threading.Thread(target=is_over.wait, args=(30,), name="spinner", daemon=True).start()

    assert "threads (spinner" in wrong(verdicts(Spins))["leaves nothing"]
    is_over.set()


def test_a_process_that_stays_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("temper.evals.environments.SETTLE_SECONDS", 0.1)
    started: list[subprocess.Popen[bytes]] = []

    class Forks(Sums):
        async def close(self) -> None:
            started.append(subprocess.Popen(["sleep", "30"]))

    try:
        assert "processes" in wrong(verdicts(Forks, TASKS[:2]))["leaves nothing"]
    finally:
        for process in started:
            process.kill()
            process.wait(10)


def test_an_opening_by_chance_is_found() -> None:
    class Moody(Sums):
        async def start(self, task: Task, seed: int) -> EnvOpening:
            await super().start(task, seed)
            return EnvOpening(messages=(*task.messages, Message(role="user", content=str(random.random()))))

    found = wrong(verdicts(Moody))
    assert found.keys() == {"repeats"}
    assert "answer 0 differs between two episodes of one seed" in found["repeats"]


def test_state_that_episodes_share_is_found() -> None:
    said: list[str] = []

    class Gossip(Sums):
        async def step(self, message: Message) -> EnvReply:
            first = said[0] if said else message.content
            said[:] = [message.content]
            return EnvReply(messages=(Message(role="user", content=first),), is_done=True, reward=1.0)

    assert "repeats" in wrong(verdicts(Gossip))


def test_a_reward_that_never_changes_is_found() -> None:
    class Generous(Sums):
        async def step(self, message: Message) -> EnvReply:
            return EnvReply(is_done=True, reward=1.0)

    found = wrong(verdicts(Generous))
    assert found.keys() == {"judges"}
    assert found["judges"].endswith("above changed ones in 0 of 6 tasks; first of 6 that are not: t:0")


def test_tasks_that_are_all_the_same_are_found() -> None:
    assert "1 different prompts of 6" in wrong(verdicts(Sums, [TASKS[0]] * 6))["diverse"]
    same_answer = [Task(id=task.id, messages=task.messages, answer="7") for task in TASKS]
    assert "the commonest 100%" in wrong(verdicts(Sums, same_answer))["diverse"]


def test_a_slow_environment_and_one_that_raises_are_found() -> None:
    class Slow(Sums):
        """Each call is in time, and both together are not."""

        async def start(self, task: Task, seed: int) -> EnvOpening:
            await asyncio.sleep(0.12)
            return await super().start(task, seed)

        async def step(self, message: Message) -> EnvReply:
            await asyncio.sleep(0.12)
            return await super().step(message)

    assert "s an episode" in wrong(verdicts(Slow, TASKS[:1], seconds=0.22))["time"]

    class Breaks(Sums):
        async def step(self, message: Message) -> EnvReply:
            raise ZeroDivisionError("no")

    assert "ZeroDivisionError: no" in wrong(verdicts(Breaks))["time"]


def test_calls_to_other_machines_and_files_outside_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Phones(Sums):
        async def step(self, message: Message) -> EnvReply:
            with socket.socket() as line:
                line.setblocking(False)
                line.connect_ex(("192.0.2.7", 9))
            return await super().step(message)

    assert wrong(verdicts(Phones)) == {"reach": "calls 192.0.2.7"}
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "allowed"))

    class Writes(Sums):
        async def step(self, message: Message) -> EnvReply:
            (tmp_path / "note").write_text("x")
            os.remove(tmp_path / "note")
            return await super().step(message)

    assert wrong(verdicts(Writes)) == {"reach": f"changes {tmp_path / 'note'}"}


def test_tools_are_listed_with_what_they_may_do_and_programs_are_probed() -> None:
    def python(code: str) -> str:
        """Runs a program, without any wall."""
        done = subprocess.run(["python3", "-c", code], capture_output=True, text=True, timeout=20)
        return done.stdout

    def wipe() -> None:
        """Cannot be undone."""

    def make() -> Env:
        tools = [make_tool(python, seconds=20), make_tool(wipe, effect="irreversible")]
        return ToolEnv(tools, permissions=Permissions())

    found = verdicts(make, TASKS[:1], seconds=30)["reach"]
    assert found.is_fine is False
    assert "a program of the policy reaches a file outside" in found.said
    assert "tools: python: read, permitted, wipe: irreversible, only described" in found.said


@pytest.mark.parametrize("call_format", ["auto", "plain"])
def test_a_shell_is_probed_too(call_format: str) -> None:
    def run(command: str) -> str:
        """Runs a line of shell, without any wall."""
        return subprocess.run(command, shell=True, capture_output=True, text=True, timeout=20).stdout

    def make(does: Callable[[str], str] = run) -> Env:
        return ToolEnv([make_tool(does, name="run", seconds=20)], presentation=Presentation(call_format=call_format))

    found = verdicts(make, TASKS[:1], seconds=30)["reach"]
    assert found.is_fine is False
    assert "a program of the policy reaches a file outside" in found.said
    assert found.said.endswith("tools: run: read, permitted; run is probed")

    def treadmill(command: str) -> str:
        """Runs, but not programs."""
        return "ran"

    found = verdicts(lambda: make(treadmill), TASKS[:1])["reach"]
    assert found.said.endswith("run ran no program of ours"), "a probe that did not run proves nothing"


@needs_sandbox
def test_the_shell_of_the_library_lets_no_probe_out() -> None:
    found = verdicts(ShellEnv, [repair(0, 1, level=2)], seconds=60)["reach"]
    assert found.is_fine is True
    assert found.said.endswith("run is probed")


PAYING = Allowed(("pay",), must_exist=True)
SOUND: dict[str, tuple[Callable[[], Env], list[Task], int]] = {
    "calculator": (Calculator, [arithmetic(place, 1) for place in range(6)], 6),
    "files": (FilesEnv, [files(place, 1) for place in range(6)], 6),
    "search": (SearchEnv, [search(place, 1) for place in range(6)], 12),
    "shop": (
        find_env("shop", {"call_format": "plain", "show_tools": "no"}, allowed=PAYING),
        [shop(place, 1) for place in range(6)],
        12,
    ),
    "repair": (
        partial(ShellEnv, tools=["line"], call_format="plain", show_tools="no"),
        [repair(place, 1) for place in range(6)],
        6,
    ),
    # Branches that are left out: lines are to be added, which only a whole file can do.
    "repair, level 2": (partial(ShellEnv, tools=["read", "write"]), [repair(place, 1, level=2) for place in (0, 1)], 2),
}


@pytest.mark.parametrize("name", SOUND)
def test_sound_environments_of_tools_pass_with_real_calls(name: str) -> None:
    make, tasks, least_calls = SOUND[name]
    found = verdicts(make, tasks)
    assert wrong(found) == {}
    assert int(found["repeats"].said.split(" tool calls")[0].split()[-1]) >= least_calls
    assert found["judges"].said == f"right episodes (mean 1) above changed ones in {len(tasks)} of {len(tasks)} tasks"


class Forgetless(ShopEnv):
    """Its shops outlive their episodes. Who only looks, or says something, sees no difference."""

    def __init__(self, kept: dict[str, str]) -> None:
        super().__init__()
        self._kept = kept

    def _open(self, task: Task, seed: int) -> Iterable[Tool]:
        tools = list(super()._open(task, seed))
        self._shop = read_shop(self._kept.get(task.id, str(task.extra["start"])))
        return [replace(tool, run=partial(self._act, task, tool.name)) for tool in tools]

    def _act(self, task: Task, name: str, **arguments: object) -> str:
        said: str = getattr(self._shop, name)(**arguments)
        self._kept[task.id] = write_shop(self._shop)
        return said


def test_state_that_outlives_an_episode_is_found_though_only_writes_show_it() -> None:
    tasks, kept = [shop(place, 1) for place in range(3)], dict[str, str]()
    assert "differs between two episodes of one seed" in wrong(verdicts(partial(Forgetless, kept), tasks))["repeats"]
    unsolved = [replace(task, extra={**task.extra, "solution": "not told"}) for task in tasks]
    found = verdicts(partial(Forgetless, {}), unsolved)
    assert found["repeats"].is_fine is True
    assert found["repeats"].said.endswith("; what to call is not known everywhere, so tools were not called there")
    assert found["judges"].is_fine is None


def test_a_judge_that_pays_an_unfinished_visit_is_found() -> None:
    class Trusting(ShopEnv):
        """Takes what lies in the cart for bought."""

        def reward(self, answer: str) -> float | None:
            return float(self._shop.bought + Counter(self._shop.cart) == self._goal.bought)

    found = wrong(verdicts(Trusting, [shop(place, 1) for place in range(6)]))
    assert found.keys() == {"judges"}
    assert "above changed ones in 0 of 6 tasks" in found["judges"]


def test_what_calls_cost_is_added_up_over_an_episode() -> None:
    def ask(question: str) -> str:
        """Asks somebody who charges for it."""
        return "no"

    solution = json.dumps([["ask", {"question": "now"}], ["ask", {"question": "then"}]])
    tasks = [replace(task, answer=None, extra={"solution": solution}) for task in TASKS]
    found = verdicts(lambda: ToolEnv([make_tool(ask, cost=0.25)]), tasks)
    assert found["time"].said.endswith("; tools cost 0.5 an episode")
    assert "an episode of 3 turns" in found["time"].said


def group_of(*rewards: float) -> Group:
    members = tuple(Trajectory.saying("t", str(place)) for place in range(len(rewards)))
    scored = [
        Trajectory(
            task_id="t", group_id="t", index=place, turns=member.turns, status=member.status, score=Score.of(reward)
        )
        for place, (member, reward) in enumerate(zip(members, rewards, strict=True))
    ]
    return Group(id="t", draw=0, task=TASKS[0], trajectories=tuple(scored))


def test_tasks_that_are_always_or_never_solved_cannot_be_learned() -> None:
    found = judge_learnable([group_of(0, 0), group_of(1, 1)])
    assert found.is_fine is False
    assert "0% of 2 tasks" in found.said
    found = judge_learnable([group_of(0, 1), group_of(1, 1), group_of(0, 0.5)])
    assert found.is_fine is True
    assert "67% of 3 tasks have answers of different worth; 33% are solved now and then, 33% never" in found.said
