"""Whether an environment is fit to be trained in: tried with right episodes and changed ones, before any model plays.

Owns: the checks, their limits and the words of their verdicts. Refuses: playing with a policy (readiness.py), and
seeing what happens in other processes.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import Any

from temper.calls import CLOSE_SECONDS, call, explain_error, is_end_of_task
from temper.envs.threads import check_isolation_of_episodes
from temper.envs.tool_env import ToolEnv
from temper.errors import UserError
from temper.evals.witness import WhatWasTouched, watching
from temper.protocols import Env, EnvOpening
from temper.rollout.selection import normalised
from temper.tasks.dataset import fingerprint
from temper.types import EventKind, Group, Message, Score, Status, Task, Trajectory, Turn

LEAST_RIGHT = 0.9
"""Share of tasks whose right answer must be worth more than a changed one."""
LEAST_LEARNABLE = 0.1
LEAST_DISTINCT = 0.5
MOST_OF_ONE_ANSWER = 0.9
SETTLE_SECONDS = 2.0
"""For threads and processes that are on their way out."""
PROBED = "REACHED"
LOOKED = "LOOKED ROUND"
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
print("{LOOKED}")
"""
"""The address answers nobody. Who has no network is refused at once; who has one waits for an answer."""
PROBES: dict[str, Callable[[str], dict[str, str]]] = {
    "python": lambda code: {"code": code},
    "run": lambda code: {"command": f'"$(command -v python3 || command -v python)" -c {shlex.quote(code)}'},
}
"""Tools that run programs, by name, with the arguments that make them run this Python."""
LAST_WORD = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvVerdict:
    """One thing that was looked at."""

    name: str
    is_fine: bool | None
    """None: it could not be told."""
    said: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What is said in two episodes of a task, turn by turn."""

    right: tuple[str, ...]
    wrong: tuple[str, ...]
    """The right one with its answer changed or, where the task has none, without its last call."""
    is_known: bool
    """Whether the right one is known to be right: the task has an answer, or its calls are known."""
    is_mute: bool
    """Whether there are tools and nobody knows what to call."""


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
    scripts: dict[str, Script] = field(default_factory=dict)
    """By task; each is written when it is first asked for."""


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
    for task in trial.tasks:
        await _script(trial, task)
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
    num_calls, is_mute = 0, False
    for task in trial.tasks:
        script = await _script(trial, task)
        first, second = [await _play(trial, task, script.right) for _ in range(2)]
        pairs = enumerate(zip(first, second, strict=False))
        if (differs := next((place for place, (one, other) in pairs if one != other), None)) is not None:
            shown = " and ".join(f"{answers[differs]!r:.120}" for answers in (first, second))
            return False, f"task {task.id}: answer {differs} differs between two episodes of one seed: {shown}"
        make = partial(trial.make_env, task.env)
        await check_isolation_of_episodes(make, task, said=script.right, other=script.wrong, seed=trial.seed)
        num_calls += sum(event.kind is EventKind.TOOL_CALL for reply in first[1:] for event in reply.events)
        is_mute |= script.is_mute
    tried = f"{len(trial.tasks)} tasks" + (f" with {num_calls} tool calls" if num_calls else "")
    unknown = "; what to call is not known everywhere, so tools were not called there" if is_mute else ""
    return True, f"{tried}: equal seeds give equal episodes, alone, after and beside another one{unknown}"


async def _check_judges(trial: EnvTrial) -> tuple[bool | None, str]:
    scripts = {task.id: await _script(trial, task) for task in trial.tasks}
    tasks = [task for task in trial.tasks if scripts[task.id].is_known]
    if not tasks or trial.score is None:
        return None, "no task has a known answer, or known calls" if trial.score else "there is no reward"
    has_calls = any(len(scripts[task.id].right) > 1 for task in tasks)
    say = partial(
        say_turns, trial.make_env if trial.pays or has_calls else None, seed=trial.seed, seconds=trial.seconds
    )
    worth = list[tuple[Task, Score, Score]]()
    for task in tasks:
        script = scripts[task.id]
        right, wrong = [await trial.score(task, await say(task, said)) for said in (script.right, script.wrong)]
        worth.append((task, right, wrong))
    bad = [task.id for task, right, wrong in worth if right.value is None or right.value <= (wrong.value or 0.0)]
    values = [right.value for _, right, _ in worth if right.value is not None]
    is_fine = len(bad) <= (1 - LEAST_RIGHT) * len(tasks)
    first = f"; first of {len(bad)} that are not: {bad[0]}" if bad else ""
    right_ones = (
        f"right {'episodes' if has_calls else 'answers'} ({f'mean {fmean(values):.3g}' if values else 'none scored'})"
    )
    return is_fine, f"{right_ones} above changed ones in {len(tasks) - len(bad)} of {len(tasks)} tasks{first}"


async def _check_diverse(trial: EnvTrial) -> tuple[bool, str]:
    openings = [(await _play(trial, task, ()))[0] for task in trial.tasks]
    asked = [replace(task, messages=one.messages) for task, one in zip(trial.tasks, openings, strict=True)]
    prompts = len(set(map(fingerprint, asked)))
    answers = Counter(normalised([task.answer]) for task in trial.tasks if task.answer)
    commonest = max(answers.values(), default=0) / max(1, answers.total())
    is_fine = prompts >= LEAST_DISTINCT * len(trial.tasks)
    is_fine &= answers.total() < 4 or commonest <= MOST_OF_ONE_ANSWER
    said = f"{prompts} different prompts of {len(trial.tasks)}, {len(answers)} different answers of {answers.total()}"
    return is_fine, f"{said}, the commonest {commonest:.0%}"


async def _check_time(trial: EnvTrial) -> tuple[bool, str]:
    whole, steps, costs = list[float](), list[float](), list[float]()
    for task in trial.tasks:
        script = await _script(trial, task)
        started = time.monotonic()
        answers = await _play(trial, task, script.right, steps=steps)
        whole.append(time.monotonic() - started)
        costs.append(sum(event.cost for reply in answers[1:] for event in reply.events))
    turns = f"{len(steps) / len(whole):.3g} turn{'s' if len(steps) > len(whole) else ''}"
    said = f"{fmean(whole):.3g} s an episode of {turns}, {fmean(steps):.3g} s a step, at most {max(whole):.3g} s"
    return max(whole) < trial.seconds, f"{said}; tools cost {fmean(costs):.3g} an episode"


async def _check_reach(trial: EnvTrial) -> tuple[bool, str]:
    """What these episodes called and changed outside, what tools are declared to do, and a probe of a sandbox."""
    with watching() as sight:
        await _play_all(trial, trial.tasks)
    temporary = os.path.realpath(tempfile.gettempdir())
    outside = sorted(path for path in sight.changed if not path.startswith(temporary + os.sep))
    problems = [f"calls {', '.join(sorted(sight.called)[:3])}"] if sight.called else []
    problems += [f"changes {', '.join(outside[:3])}"] if outside else []
    env = trial.make_env(trial.tasks[0].env)
    notes = list[str]()
    try:
        await call(env.start(trial.tasks[0], trial.seed), trial.seconds, "start()")
        if isinstance(env, ToolEnv):
            notes.append("tools: " + ", ".join(f"{name}: {what}" for name, what in env.allowed.items()))
            for name in sorted(PROBES.keys() & env.allowed.keys()):
                reached = await _probe(trial, env, name)
                problems += reached or []
                notes.append(f"{name} {'ran no program of ours' if reached is None else 'is probed'}")
    finally:
        await call(env.close(), CLOSE_SECONDS, "close()")
    seen = ", ".join(problems) or "no other machine was called and nothing changed outside"
    return not problems, "; ".join((seen, *notes))


async def _probe(trial: EnvTrial, env: ToolEnv, name: str) -> list[str] | None:
    """Which walls a program goes through that the policy runs with this tool; None: it did not run."""
    with tempfile.NamedTemporaryFile("w", suffix=".secret") as secret:
        # On one line, for a plain call has no more.
        code = f"exec({PROBE.format(secret=secret.name)!r})"
        said = Message(role="assistant", content=env.spell(name, PROBES[name](code)))
        reply = await call(env.step(said), trial.seconds, "step()")
    lines = [line for message in reply.messages for line in message.content.splitlines()]
    reached = [line.removeprefix(PROBED) for line in lines if line.startswith(PROBED)]
    return [f"a program of the policy reaches{what}" for what in reached] if reached or LOOKED in lines else None


CHECKS: dict[str, Callable[[EnvTrial], Awaitable[tuple[bool | None, str]]]] = {
    "leaves nothing": _check_clean,
    "repeats": _check_repeats,
    "judges": _check_judges,
    "diverse": _check_diverse,
    "time": _check_time,
    "reach": _check_reach,
}


async def _script(trial: EnvTrial, task: Task) -> Script:
    if task.id not in trial.scripts:
        trial.scripts[task.id] = await _write_script(trial, task)
    return trial.scripts[task.id]


async def _write_script(trial: EnvTrial, task: Task) -> Script:
    env = trial.make_env(task.env)
    calls, has_tools = list[str](), isinstance(env, ToolEnv)
    try:
        await call(env.start(task, trial.seed), trial.seconds, f"{type(env).__name__}.start()")
        if isinstance(env, ToolEnv):
            calls = [env.spell(name, arguments) for name, arguments in env.solution(task)]
    finally:
        await call(env.close(), CLOSE_SECONDS, f"{type(env).__name__}.close()")
    answer, is_mute = task.answer or "", has_tools and not calls
    if calls and not answer.strip():
        right, wrong = (*calls, LAST_WORD), (*calls[:-1], LAST_WORD)
        return Script(right=right, wrong=wrong, is_known=True, is_mute=is_mute)
    right, wrong = (*calls, answer), (*calls, _changed(answer))
    return Script(right=right, wrong=wrong, is_known=bool(answer.strip()), is_mute=is_mute)


def _changed(answer: str) -> str:
    """The answer with every digit and letter another one: as long, in the same form, and wrong."""
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
        script = await _script(trial, task)
        for said in (script.right, script.wrong):
            await _play(trial, task, said)


async def _play(trial: EnvTrial, task: Task, said: Sequence[str], steps: list[float] | None = None) -> list[Any]:
    """The opening, and what the environment answers to these messages, up to its end."""
    env = trial.make_env(task.env)
    name = type(env).__name__
    try:
        opening = await call(env.start(task, trial.seed), trial.seconds, f"{name}.start()")
        if not isinstance(opening, EnvOpening):
            raise UserError(f"{name}.start returned {opening!r:.60}, not an EnvOpening")
        answers: list[Any] = [opening]
        for text in said:
            started = time.monotonic()
            reply = await call(env.step(Message(role="assistant", content=text)), trial.seconds, f"{name}.step()")
            if steps is not None:
                steps.append(time.monotonic() - started)
            # How long a tool took is not part of an answer.
            answers.append(replace(reply, events=tuple(replace(event, seconds=0.0) for event in reply.events)))
            if reply.is_done:
                break
        return answers
    finally:
        await call(env.close(), CLOSE_SECONDS, f"{name}.close()")


async def say_turns(
    make_env: Callable[[str], Env] | None, task: Task, said: Sequence[str], *, seed: int, seconds: float
) -> Trajectory:
    """An episode that says these messages up to its end, with what the environment replies and pays.

    Without an environment nobody replies, and only the last one is said.
    """
    last = Trajectory.saying(task.id, said[-1])
    if make_env is None:
        return last
    env = make_env(task.env)
    turns, result, text = list[Turn](), None, said[0]
    try:
        await call(env.start(task, seed), seconds, f"{task.env}.start()")
        for text in said:
            message = Message(role="assistant", content=text)
            reply = await call(env.step(message), seconds, f"{task.env}.step()")
            own = replace(last.turns[0], message=message, replies=reply.messages, reward=reply.reward)
            turns.append(replace(own, events=reply.events))
            result = reply.result if reply.result is not None else result
            if reply.is_done:
                break
    except Exception as error:
        raise UserError(f"task {task.id}: the environment fails on {text!r:.60}: {explain_error(error)}") from error
    finally:
        await call(env.close(), CLOSE_SECONDS, f"{task.env}.close()")
    status = (reply.status or Status.COMPLETED) if reply.is_done else Status.TRUNCATED_TURNS
    return replace(last, turns=tuple(turns), status=status, result=result)
