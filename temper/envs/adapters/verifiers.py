"""Environments of the package verifiers (0.1.14 to 0.2): their rows as tasks, their turns, their rubric's verdict.

Owns: generator, environment and reward "verifiers". Refuses: versions from 0.3 on, which have no such environments; a
rubric's habit of turning an exception into 0.0; rewards of whole groups, since an episode is scored when it ends.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import threading
from collections.abc import Iterator
from typing import Any

from temper.asking.endpoint import Endpoint
from temper.asking.verdicts import RecordLog
from temper.envs.adapters.third_party import EpisodeThread, require_package
from temper.envs.adapters.verifiers_models import POLICY, AskLimits, Judging, ModelCalls, read_judging, shared_endpoint
from temper.envs.adapters.verifiers_rollout import Rollout, group_functions, readable
from temper.envs.tool_calls import find_parser, parse
from temper.envs.tool_env import Presentation
from temper.errors import TaskError, TemperError, UserError, install_line
from temper.plugins import load_function
from temper.protocols import EnvOpening, EnvReply, Reward
from temper.types import Event, EventKind, Message, Scalar, Score, Task, Trajectory

_LOADING = threading.Lock()
KEY = "OPENAI_API_KEY"


def verifiers(
    index: int, seed: int, *, environment: str, split: str = "train", **arguments: Scalar | list[Scalar]
) -> Task:
    """Row `index` of the environment's data, in an order drawn by the seed, again and again in a new one.

    environment: an installed one's id, or "package.module:function" that returns one. arguments: its own.
    """
    text = json.dumps(arguments, sort_keys=True)
    rows = _rows(environment, text, split)
    turn, place = divmod(index, len(rows))
    number = _order(len(rows), seed, turn)[place]
    row = rows[number]
    prompt = row["prompt"] if isinstance(row["prompt"], list) else [{"role": "user", "content": row["prompt"]}]
    return Task(
        id=f"{environment}:{split}:{number}",
        messages=tuple(Message(role=part["role"], content=str(part["content"])) for part in prompt),
        env="verifiers",
        answer=None if row.get("answer") in (None, "") else str(row["answer"]),
        extra={"environment": environment, "arguments": text, "split": split, "row": number},
    )


@functools.lru_cache(maxsize=16)
def _order(count: int, seed: int, turn: int) -> list[int]:
    order = list(range(count))
    random.Random(f"verifiers/{seed}/{turn}").shuffle(order)
    return order


def _rows(environment: str, arguments: str, split: str) -> Any:
    if split not in ("train", "eval"):
        raise UserError(f'split "{split}" is unknown. Known: train, eval.')
    loaded = _environment(environment, arguments)
    try:
        rows = loaded.get_dataset() if split == "train" else loaded.get_eval_dataset()
    except Exception as error:
        raise UserError(f"{environment} has no rows for split {split}: {type(error).__name__}: {error}") from error
    if not len(rows):
        raise UserError(f"{environment} has no rows for split {split}.")
    return rows


def _environment(name: str, arguments: str) -> Any:
    with _LOADING:  # episodes start side by side, and one copy of the data is enough
        return _loaded(name, arguments)


@functools.lru_cache(maxsize=16)
def _loaded(name: str, arguments: str) -> Any:
    package = require_package("verifiers", extra="verifiers", package="verifiers", what='environment "verifiers"')
    kind = getattr(package, "MultiTurnEnv", None)
    if kind is None:
        raise UserError(
            f"verifiers {package.__version__} has no environments with rubrics; they ended with version 0.2. "
            f"Run: {install_line('verifiers')}"
        )
    try:
        with _stand_in_key():
            load = functools.partial(package.load_environment, name)
            if ":" in name:
                load = load_function(name, where="environment")  # type: ignore[assignment]
            loaded = load(**json.loads(arguments))
    except TemperError:
        raise
    except Exception as error:
        raise UserError(f"verifiers cannot load {name!r} with {arguments}: {type(error).__name__}: {error}") from error
    if not isinstance(loaded, kind):
        raise UserError(f"{name} returned {type(loaded).__name__}; it must be a SingleTurnEnv or MultiTurnEnv.")
    if groups := group_functions(loaded.rubric):
        raise UserError(
            f"{name}: {groups[0]} scores a whole group at once, and Temper scores an episode when it ends. Score each "
            "by itself: members of a group are compared by the advantage (objective.advantage)"
        )
    return loaded


@contextlib.contextmanager
def _stand_in_key() -> Iterator[None]:
    """OpenAI's client refuses to be made without a key, also where Temper answers in its place."""
    if KEY in os.environ:
        yield
        return
    os.environ[KEY] = "none"
    try:
        yield
    finally:
        os.environ.pop(KEY, None)


def _open(task: Task, calls: ModelCalls) -> Rollout:
    environment, arguments, split, row = (task.extra[key] for key in ("environment", "arguments", "split", "row"))
    rows = _rows(str(environment), str(arguments), str(split))
    return Rollout(_environment(str(environment), str(arguments)), dict(rows[int(row)]), calls)


def _missing(task: Task) -> str | None:
    missing = {"environment", "arguments", "split", "row"} - set(task.extra)
    return f"it does not come from the generator verifiers (no {', '.join(sorted(missing))})" if missing else None


def _calls(judging: Judging | None, own: Endpoint | None = None) -> ModelCalls:
    """own: where the run itself answers."""
    if judging is None:
        return ModelCalls(AskLimits(), None)
    if judging.endpoint is not None:
        return ModelCalls(judging.limits, shared_endpoint(judging.endpoint))
    unserved = f'judge = "{judging.folder or POLICY}" is answered by temper train only. Name an address instead'
    return ModelCalls(judging.limits, own, unserved)


class VerifiersEnv:
    """One episode. The rubric judges the state the episode ended in, and its verdict is the last turn's reward.

    call_format, show_tools: how the policy writes tool calls and sees tools, see tool_env.Presentation. Calls are JSON.
    judge: who answers when the environment asks a model by itself: an address, the directory of a model, or "policy".
    """

    def __init__(
        self,
        *,
        call_format: str = "auto",
        show_tools: str = "auto",
        step_seconds: float = 60.0,
        judge: str = "",
        **judge_options: Scalar,
    ) -> None:
        find_parser(call_format)
        shown_format = "hermes" if call_format == "auto" else call_format  # in words, one way of writing JSON is named
        self._presentation = Presentation(call_format=shown_format, show_tools=show_tools)
        self._call_format = call_format
        self._thread = EpisodeThread("verifiers", seconds=step_seconds)
        self._rollout: Rollout | None = None
        self.judging = read_judging('env "verifiers"', judge, judge_options)
        self._own: Endpoint | None = None
        self._calls: ModelCalls | None = None

    def serve(self, own: Endpoint) -> None:
        """Where the run answers this episode, before start()."""
        self._own = own

    async def start(self, task: Task, seed: int) -> EnvOpening:
        if (reason := _missing(task)) is not None:
            raise TaskError(f"task {task.id} cannot be played by verifiers: {reason}")
        self._calls = _calls(self.judging, self._own)
        self._rollout = await self._calls.during(self._thread.call(_open, task, self._calls))
        return self._presentation.open(self._rollout.messages, self._rollout.tools)

    async def step(self, message: Message) -> EnvReply:
        assert self._rollout is not None, "step() before start()"
        assert self._calls is not None, "step() before start()"
        calls, bad = readable(parse(message.content, self._call_format).calls) if self._rollout.tools else ([], [])
        events = [Event(kind=EventKind.TOOL_CALL, name=call.name, detail=str(call.arguments)[:200]) for call in calls]
        events += [Event(kind=EventKind.BAD_CALL, name="", detail=reason) for reason in bad]
        replies = await self._calls.during(self._thread.call(self._rollout.say, message.content, calls))
        is_done = replies is None
        reward = await self._calls.during(self._thread.call(self._rollout.score)) if is_done else None
        events += self._calls.take()
        return EnvReply(messages=replies or (), is_done=is_done, reward=reward, events=tuple(events))

    async def close(self) -> None:
        rollout, self._rollout = self._rollout, None
        await self._thread.close(None if rollout is None else rollout.close)
        if self._own is not None:
            await self._own.close()


class VerifiersReward(Reward):
    """The rubric's verdict on the conversation alone: for single-turn environments, cut answers included.

    Rubrics that read what a multi-turn environment wrote into its state need the reward "env" instead. judge: the
    address of a model that answers when the rubric asks one by itself.
    """

    name = "verifiers"
    log: RecordLog

    def __init__(self, *, deadline_seconds: float = 60.0, judge: str = "", **judge_options: Scalar) -> None:
        self._seconds = deadline_seconds
        self._judging = read_judging('reward "verifiers"', judge, judge_options)
        if self._judging is not None and self._judging.endpoint is None:
            raise UserError(
                f'reward "verifiers": judge = "{judge}" is answered during an episode, and this reward scores it '
                f'afterwards. Use the reward "env" with env.options.judge = "{judge}", or name an address'
            )
        self.log = RecordLog()

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        thread, calls = EpisodeThread("verifiers rubric", seconds=self._seconds), _calls(self._judging)
        try:
            score = Score.of(await calls.during(thread.call(_judged, task, trajectory, calls)))
        except TaskError as error:
            score = Score.error(str(error))
        finally:
            await thread.close()
        if self._judging is None:
            return score
        said = {f"call {number}": event.detail for number, event in enumerate(calls.take(), 1)}
        return self.log.add(trajectory, score, **said)

    def check(self, task: Task) -> str | None:
        return _missing(task)


def _judged(task: Task, trajectory: Trajectory, calls: ModelCalls) -> float:
    rollout = _open(task, calls)
    try:
        for turn in trajectory.turns:
            rollout.append(turn.message.content, turn.replies)
        return rollout.score()
    finally:
        rollout.close()
