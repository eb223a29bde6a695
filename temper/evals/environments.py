"""Whether an environment is fit to be trained in: tried with known answers and changed ones, before any model plays.

Owns: the checks, their limits and the words of their verdicts. Refuses: playing with a policy (readiness.py), and
seeing what happens in other processes.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

from temper.calls import CLOSE_SECONDS, call, explain_error, is_end_of_task
from temper.envs.threads import check_isolation_of_episodes
from temper.envs.tool_calls import write_call
from temper.envs.tool_env import ToolEnv
from temper.errors import UserError
from temper.evals.witness import WhatWasTouched, watching
from temper.protocols import Env, EnvOpening
from temper.rollout.selection import normalised
from temper.tasks.dataset import fingerprint
from temper.types import Group, Message, Score, Status, Task, Trajectory

LEAST_RIGHT = 0.9
"""Share of tasks whose right answer must be worth more than a changed one."""
LEAST_LEARNABLE = 0.1
LEAST_DISTINCT = 0.5
MOST_OF_ONE_ANSWER = 0.9
SETTLE_SECONDS = 2.0
"""For threads and processes that are on their way out."""
PROBED = "REACHED"
PROBE = f"""
import socket
try:
    open({{secret!r}}).read()
    print("{PROBED} a file outside")
except OSError:
    pass
try:
    socket.create_connection(("192.0.2.1", 9), timeout=0.2)
    print("{PROBED} the network")
except TimeoutError:
    print("{PROBED} the network")
except OSError:
    pass
"""
"""The address answers nobody. Who has no network is refused at once; who has one waits for an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvVerdict:
    """One thing that was looked at."""

    name: str
    is_fine: bool | None
    """None: it could not be told."""
    said: str


@dataclass(frozen=True, kw_only=True)
class EnvTrial:
    """What is tried, and how it is judged."""

    make_env: Callable[[str], Env]
    tasks: Sequence[Task]
    seed: int
    seconds: float
    """Deadline of every call."""
    score: Callable[[Task, Trajectory], Awaitable[Score]] | None
    """The reward; None: there is none."""
    pays: bool
    """Whether the environment itself pays, so that answers are said to it."""


async def check_environment(trial: EnvTrial) -> list[EnvVerdict]:
    """Every verdict that needs no model. What an environment raises is the verdict of that check."""
    found = list[EnvVerdict]()
    for name, check in CHECKS.items():
        try:
            is_fine, said = await check(trial)
        except BaseException as error:  # the rim: environments and rewards are user code
            if is_end_of_task(error):
                raise
            text = str(error) if isinstance(error, UserError) else explain_error(error)
            is_fine, said = False, f"failed: {text}"
        found.append(EnvVerdict(name=name, is_fine=is_fine, said=said))
    return found


def judge_learnable(groups: Sequence[Group], *, name: str = "learnable") -> EnvVerdict:
    """Tasks that a policy solves now and then: always or never teaches nothing."""
    rates = [fmean(reward >= 1.0 - 1e-9 for reward in group.rewards) for group in groups if group.rewards]
    if not rates:
        return EnvVerdict(name=name, is_fine=False, said="no attempt could be scored")
    mixed = fmean(not group.is_degenerate for group in groups if group.rewards)
    shares = [fmean(found) for found in zip(*((0 < rate < 1, rate == 0, rate == 1) for rate in rates), strict=True)]
    said = (
        f"{mixed:.0%} of {len(rates)} tasks have answers of different worth; {shares[0]:.0%} are solved now and then, "
        f"{shares[1]:.0%} never, {shares[2]:.0%} always"
    )
    return EnvVerdict(name=name, is_fine=mixed >= LEAST_LEARNABLE, said=said)


async def _check_clean(trial: EnvTrial) -> tuple[bool, str]:
    """What an episode leaves behind. The first is not counted: what is made once, e.g. a pool, may stay."""
    await _play_all(trial, trial.tasks[:1])
    with watching() as sight:
        await _play_all(trial, trial.tasks)
        await _settle(sight)
    parts: dict[str, list[Any]] = {
        "files": sight.left_files,
        "threads": sight.left_threads,
        "processes": sight.left_processes,
    }
    left = [f"{len(found)} {what} ({', '.join(map(str, found[:3]))})" for what, found in parts.items() if found]
    return not left, f"{', '.join(left) or 'nothing'} left behind by {2 * len(trial.tasks)} episodes"


async def _settle(sight: WhatWasTouched) -> None:
    deadline = time.monotonic() + SETTLE_SECONDS
    while (sight.left_threads or sight.left_processes) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)


async def _check_repeats(trial: EnvTrial) -> tuple[bool, str]:
    for task in trial.tasks:
        first, second = [await _play(trial, task, _right(task)) for _ in range(2)]
        pairs = enumerate(zip(first, second, strict=False))
        if (differs := next((place for place, (one, other) in pairs if one != other), None)) is not None:
            shown = " and ".join(f"{answers[differs]!r:.120}" for answers in (first, second))
            return False, f"task {task.id}: answer {differs} differs between two episodes of one seed: {shown}"
        make = partial(trial.make_env, task.env)
        said, other_said = [_right(task)], [_wrong(task)]
        await check_isolation_of_episodes(make, task, said=said, other=other_said, seed=trial.seed)
    return True, f"{len(trial.tasks)} tasks: equal seeds give equal episodes, alone, after and beside another one"


async def _check_judges(trial: EnvTrial) -> tuple[bool | None, str]:
    tasks = [task for task in trial.tasks if (task.answer or "").strip()]
    if not tasks or trial.score is None:
        return None, "no task has a known answer" if trial.score else "there is no reward"
    worth = list[tuple[Task, Score, Score]]()
    for task in tasks:
        make = trial.make_env if trial.pays else None
        right, wrong = [
            await trial.score(task, await say_once(make, task, text, seed=trial.seed, seconds=trial.seconds))
            for text in (_right(task), _wrong(task))
        ]
        worth.append((task, right, wrong))
    bad = [task.id for task, right, wrong in worth if right.value is None or right.value <= (wrong.value or 0.0)]
    values = [right.value for _, right, _ in worth if right.value is not None]
    is_fine = len(bad) <= (1 - LEAST_RIGHT) * len(tasks)
    first = f"; first of {len(bad)} that are not: {bad[0]}" if bad else ""
    mean = f"mean {fmean(values):.3g}" if values else "none scored"
    return is_fine, f"right answers ({mean}) above changed ones in {len(tasks) - len(bad)} of {len(tasks)} tasks{first}"


async def _check_diverse(trial: EnvTrial) -> tuple[bool, str]:
    openings = [(await _play(trial, task, None))[0] for task in trial.tasks]
    asked = [replace(task, messages=one.messages) for task, one in zip(trial.tasks, openings, strict=True)]
    prompts = len(set(map(fingerprint, asked)))
    answers = Counter(normalised([task.answer]) for task in trial.tasks if task.answer)
    commonest = max(answers.values(), default=0) / max(1, answers.total())
    is_fine = prompts >= LEAST_DISTINCT * len(trial.tasks)
    is_fine &= answers.total() < 4 or commonest <= MOST_OF_ONE_ANSWER
    said = f"{prompts} different prompts of {len(trial.tasks)}, {len(answers)} different answers of {answers.total()}"
    return is_fine, f"{said}, the commonest {commonest:.0%}"


async def _check_time(trial: EnvTrial) -> tuple[bool, str]:
    whole, steps = list[float](), list[float]()
    for task in trial.tasks:
        started = time.monotonic()
        await _play(trial, task, _right(task), steps=steps)
        whole.append(time.monotonic() - started)
    said = f"{fmean(whole):.3g} s an episode of one turn, {fmean(steps):.3g} s a step, at most {max(whole):.3g} s"
    return max(whole) < trial.seconds, said


async def _check_reach(trial: EnvTrial) -> tuple[bool, str]:
    """What these episodes called and wrote outside, what tools are declared to do, and a probe of a sandbox."""
    with watching() as sight:
        await _play_all(trial, trial.tasks)
    temporary = os.path.realpath(tempfile.gettempdir())
    outside = sorted(path for path in sight.written if not os.path.realpath(path).startswith(temporary + os.sep))
    problems = [f"calls {', '.join(sorted(sight.called)[:3])}"] if sight.called else []
    problems += [f"writes {', '.join(outside[:3])}"] if outside else []
    env = trial.make_env(trial.tasks[0].env)
    tools = list[str]()
    if isinstance(env, ToolEnv):
        problems += await _probe(trial, trial.tasks[0])
        await call(env.start(trial.tasks[0], trial.seed), trial.seconds, "start()")
        tools = [f"{name}: {what}" for name, what in env.allowed.items()]
    await call(env.close(), CLOSE_SECONDS, "close()")
    declared = f"; tools: {', '.join(tools)}" if tools else ""
    return not problems, f"{', '.join(problems) or 'no other machine was called and nothing written outside'}{declared}"


async def _probe(trial: EnvTrial, task: Task) -> list[str]:
    """Which walls a program goes through, where the policy may run programs (a tool called python that takes code)."""
    with tempfile.NamedTemporaryFile("w", suffix=".secret") as secret:
        code = PROBE.format(secret=secret.name)
        answers = await _play(trial, task, write_call("hermes", "python", {"code": code}))
    text = "\n".join(message.content for reply in answers[1:] for message in reply.messages)
    reached = [line.removeprefix(PROBED) for line in text.splitlines() if line.startswith(PROBED)]
    return [f"a program of the policy reaches{what}" for what in reached]


CHECKS: dict[str, Callable[[EnvTrial], Awaitable[tuple[bool | None, str]]]] = {
    "leaves nothing": _check_clean,
    "repeats": _check_repeats,
    "judges": _check_judges,
    "diverse": _check_diverse,
    "time": _check_time,
    "reach": _check_reach,
}


def _right(task: Task) -> str:
    return task.answer or ""


def _wrong(task: Task) -> str:
    """The answer with every digit and letter another one: as long, in the same form, and wrong."""
    answer = task.answer or ""
    changed = "".join(map(_another, answer))
    return changed if changed != answer else f"{answer}?"


def _another(character: str) -> str:
    if character.isascii() and character.isdigit():
        return str((int(character) + 1) % 10)
    if character.isalpha():
        return "b" if character.lower() == "a" else "a"
    return character


async def _play_all(trial: EnvTrial, tasks: Sequence[Task]) -> None:
    for task in tasks:
        for text in (_right(task), _wrong(task)):
            await _play(trial, task, text)


async def _play(trial: EnvTrial, task: Task, text: str | None, steps: list[float] | None = None) -> list[Any]:
    """The opening, and what the environment answers to this one message; None: nothing is said."""
    env = trial.make_env(task.env)
    name = type(env).__name__
    try:
        opening = await call(env.start(task, trial.seed), trial.seconds, f"{name}.start()")
        if not isinstance(opening, EnvOpening):
            raise UserError(f"{name}.start returned {opening!r:.60}, not an EnvOpening")
        if text is None:
            return [opening]
        started = time.monotonic()
        reply = await call(env.step(Message(role="assistant", content=text)), trial.seconds, f"{name}.step()")
        if steps is not None:
            steps.append(time.monotonic() - started)
        # How long a tool took is not part of an answer.
        return [opening, replace(reply, events=tuple(replace(event, seconds=0.0) for event in reply.events))]
    finally:
        await call(env.close(), CLOSE_SECONDS, f"{name}.close()")


async def say_once(
    make_env: Callable[[str], Env] | None, task: Task, text: str, *, seed: int, seconds: float
) -> Trajectory:
    """An episode of one turn that says the text. With an environment, what that replies and pays."""
    said = Trajectory.saying(task.id, text)
    if make_env is None:
        return said
    env = make_env(task.env)
    try:
        await call(env.start(task, seed), seconds, f"{task.env}.start()")
        reply = await call(env.step(Message(role="assistant", content=text)), seconds, f"{task.env}.step()")
    except Exception as error:
        raise UserError(f"task {task.id}: the environment fails on {text!r:.60}: {explain_error(error)}") from error
    finally:
        await call(env.close(), CLOSE_SECONDS, f"{task.env}.close()")
    status = (reply.status or Status.COMPLETED) if reply.is_done else Status.TRUNCATED_TURNS
    turn = replace(said.turns[0], replies=reply.messages, reward=reply.reward, events=reply.events)
    return replace(said, turns=(turn,), status=status)
