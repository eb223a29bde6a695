"""One task, one attempt: ask the sampler, step the environment, until done. Then score.

Owns: the turn loop and the rim where a failure becomes a recorded status. Refuses: turning a failure into a number, and
agents that ask for themselves (agents.py).
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from temper.calls import CLOSE_SECONDS, call, explain_error, is_end_of_task, waiting_for
from temper.errors import BackendError, ContextFull, EnvironmentLost, TaskError, TemperError
from temper.protocols import Env, EnvReply, Sampler
from temper.rollout.plays import LostPlays, TimeLimit
from temper.rollout.thinking import Thinking, draw
from temper.storable import as_float, without_halves
from temper.turnstile import take_turn
from temper.types import (
    TRAINABLE_STATUSES,
    Completion,
    Event,
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
    lasting,
)

Tools = Sequence[Mapping[str, Any]]
"""JSON schemas of what an environment lets the policy call."""


class EpisodeRenderer(Protocol):
    """Messages to ids and back; tasks/render.py implements it."""

    def prompt_messages(self, task: Task) -> tuple[Message, ...]: ...
    def prompt_ids(self, messages: Sequence[Message], tools: Tools = ()) -> tuple[int, ...]: ...
    def extend_ids(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        replies: Sequence[Message],
        history: Sequence[Message],
        tools: Tools = (),
    ) -> tuple[int, ...]: ...
    def decode(self, ids: Sequence[int]) -> str: ...


class Scorer(Protocol):
    """The reward; rewards/composite.py implements it."""

    async def score(self, task: Task, trajectory: Trajectory) -> tuple[Score, Mapping[str, Score]]:
        """The score, and those of its parts."""
        ...

    async def score_turns(
        self, task: Task, trajectory: Trajectory
    ) -> tuple[Score, Mapping[str, Score], Sequence[float]]:
        """The same, and what each turn earned; that is empty when nothing pays turns."""
        ...

    def weighted(self, parts: Mapping[str, Score]) -> Mapping[str, Score]: ...
    async def evolve(self, groups: Sequence[Group]) -> None: ...


@dataclass(slots=True)
class Played:
    """What there is of an episode so far: it survives a failure."""

    before: LostPlays
    """Plays of the episode that were lost."""
    turns: list[Turn] = dataclasses.field(default_factory=list)
    opening: tuple[Message, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    result: str | None = None
    turn_order: tuple[int, ...] = ()
    replied: tuple[Event, ...] = ()
    """Of a reply that is not yet part of a turn: it may be refused."""
    lost: tuple[Event, ...] = ()
    """Of a step that did not come back, as the environment tells at its end."""
    cut: Status | None = None
    """The limit that an agent was refused for: also when it then lets its time run out. None: none was."""
    loss: EnvironmentLost | None = None
    """The process of its environment was lost. None: it was not."""

    @property
    def events(self) -> tuple[Event, ...]:
        return (*(event for turn in self.turns for event in turn.events), *self.replied, *self.lost)


class Player(Protocol):
    """Who leads an episode from its task to its end."""

    def place(self) -> AbstractAsyncContextManager[object]:
        """Held by an episode from its start to its end; waiting for it takes none of the episode's time."""
        ...

    async def play(self, setup: EpisodeSetup, task: Task, played: Played, request_id: str) -> Status:
        """How it ended. Fills `played` as it goes."""
        ...

    async def close(self) -> None: ...


class TurnLoop:
    """Implements Player: the policy speaks, the environment answers."""

    def __init__(self, given: Sequence[Turn] = ()) -> None:
        """given: turns of an earlier attempt that this one begins with; a fresh environment hears them again."""
        self._given = given

    def place(self) -> AbstractAsyncContextManager[object]:
        return nullcontext()

    async def play(self, setup: EpisodeSetup, task: Task, played: Played, request_id: str) -> Status:
        return await _play(setup, task, played, request_id, self._given)

    async def close(self) -> None:
        """Environments are closed with their episodes."""


TURN_LOOP = TurnLoop()


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSetup:
    """What every episode of a stage shares."""

    sampler: Sampler
    renderer: EpisodeRenderer
    scorer: Scorer
    make_env: Callable[[str], Env]
    params: SamplingParams
    max_turns: int
    episode_seconds: float
    max_episode_tokens: int = 0
    """Most tokens drawn over all turns of an episode; 0: no limit but that of each turn."""
    thinking: Thinking | None = None
    """When the thinking of a turn is closed; None: never."""
    seed: int
    player: Player = TURN_LOOP


async def run_episode(setup: EpisodeSetup, task: Task, *, group_id: str, index: int, request_id: str) -> Trajectory:
    """Plays and scores one attempt. Only a broken backend raises; everything else is a status."""
    async with setup.player.place():
        await take_turn()
        started = time.monotonic()
        played, status, error = await _play_until_kept(setup, task, request_id)
    trajectory = Trajectory(
        task_id=task.id,
        group_id=group_id,
        index=index,
        turns=tuple(played.turns),
        status=status,
        score=Score.unscorable("not scored yet"),
        error=error,
        opening=played.opening,
        tools=played.tools,
        seconds=time.monotonic() - started,
        unplaced_events=(*played.before.events, *lasting((*played.replied, *played.lost))),
        result=played.result,
        turn_order=played.turn_order,
    )
    await take_turn()
    return await _scored(setup.scorer, task, trajectory)


async def _play_until_kept(setup: EpisodeSetup, task: Task, request_id: str) -> tuple[Played, Status, str | None]:
    """What there is of the episode, how it ended, and what went wrong.

    A play whose process is lost is begun anew, under the same name, so that the same is drawn: what befell a process is
    none of the episode's luck. All plays share the time of one.
    """
    limit = TimeLimit(setup.episode_seconds)
    lost = LostPlays()
    while True:
        played = Played(lost)
        status, error = await _status(setup, task, played, request_id, limit)
        if played.loss is None or lost.ends_with(played.loss):
            return played, status, error
        lost = lost.add(played.loss, played.events)


async def _status(
    setup: EpisodeSetup, task: Task, played: Played, request_id: str, limit: TimeLimit
) -> tuple[Status, str | None]:
    """How the play ended, and what went wrong."""
    try:
        async with limit.bounds():
            return await setup.player.play(setup, task, played, request_id), None
    except TimeoutError:
        if played.cut is not None:  # left out, the episodes in which the policy runs on would be the untrained ones
            played.result = ""
            return played.cut, None
        return Status.TIMEOUT, f"the episode took longer than {setup.episode_seconds:g} s"
    except BackendError:
        raise
    except EnvironmentLost as problem:
        played.loss = problem
        return Status.TOOL_ERROR, str(problem)
    except ContextFull as problem:  # on the first turn; later ones are cut
        return Status.TOO_LONG, f"task {task.id}: {problem}"
    except TemperError as problem:
        return Status.TOOL_ERROR, str(problem)
    except BaseException as problem:  # the rim: environments are user code, and one of them must not end the run
        if is_end_of_task(problem):
            raise
        return Status.TOOL_ERROR, explain_error(problem)


async def _play(setup: EpisodeSetup, task: Task, played: Played, request_id: str, given: Sequence[Turn]) -> Status:
    env = setup.make_env(task.env)
    name = type(env).__name__
    turns = played.turns
    played.before.prepare(env)
    try:
        opening = await call(env.start(task, setup.seed), setup.episode_seconds, f"{name}.start()")
        await take_turn()
        opening = dataclasses.replace(opening, messages=_readable(opening.messages))
        state = _state_name(opening.state)
        played.opening, played.tools = opening.messages, tuple(opening.tools)
        history = setup.renderer.prompt_messages(dataclasses.replace(task, messages=opening.messages))
        prompt_ids = setup.renderer.prompt_ids(history, opening.tools)
        for number in range(setup.max_turns):
            params = within_budget(setup, sum(turn.completion.num_drawn for turn in turns))
            if params is None:
                return Status.TRUNCATED_LENGTH
            request = Request(id=f"{request_id}/{number}", prompt_ids=prompt_ids, params=params)
            try:
                with waiting_for("the sampler"):
                    is_given = number < len(given)
                    completion = given[number].completion if is_given else await draw_as_asked(setup, request)
            except ContextFull:
                if not turns:
                    raise
                return Status.TRUNCATED_LENGTH  # the conversation has filled the context: cut, not broken
            await take_turn()
            if is_given:
                _require_same(completion.prompt_ids == prompt_ids, name, number)
            message = Message(role="assistant", content=setup.renderer.decode(completion.token_ids))
            if (cut := cut_status(completion)) is not None:
                turns.append(Turn(completion=completion, message=message, state=state))
                return cut
            reply = await call(env.step(message), setup.episode_seconds, f"{name}.step()")
            played.replied = tuple(reply.events)
            reply = dataclasses.replace(reply, messages=_readable(reply.messages), reward=_payable(reply.reward))
            if is_given:
                _require_same(not reply.is_done and reply.messages == given[number].replies, name, number + 1)
            turns.append(_answered(completion, message, reply, state))
            played.replied, state = (), _state_name(reply.state)
            played.result = reply.result if reply.result is not None else played.result
            if reply.is_done:
                return reply.status or Status.COMPLETED
            history = (*history, message)
            prompt_ids = setup.renderer.extend_ids(
                prompt_ids, completion.token_ids, reply.messages, history, opening.tools
            )
            history = (*history, *reply.messages)
        return Status.TRUNCATED_TURNS
    finally:
        told = await call(env.close(), CLOSE_SECONDS, f"{name}.close()")
        # Whatever else a close() of a user's own returns was never asked for.
        played.lost = tuple(event for event in told if isinstance(event, Event)) if isinstance(told, tuple) else ()


def _answered(completion: Completion, message: Message, reply: EnvReply, state: str | None) -> Turn:
    return Turn(
        completion=completion,
        message=message,
        replies=reply.messages,
        reward=reply.reward,
        events=reply.events,
        state=state,
    )


def _require_same(is_same: bool, env: str, turn: int) -> None:
    """Before turn `turn` of an attempt that repeats another's first turns."""
    if not is_same:
        raise TaskError(
            f"{env} cannot be forked: told the same again, it was in another state before turn {turn + 1}. Make it a "
            f"function of the task, the seed and what it is told, or use an advantage without step values"
        )


async def draw_as_asked(setup: EpisodeSetup, request: Request) -> Completion:
    """One completion through the sampler of this episode, its thinking closed in time."""
    return await draw(partial(_generate, setup.sampler), request, setup.thinking, setup.renderer.decode)


async def _generate(sampler: Sampler, request: Request) -> Completion:
    completion = await sampler.generate(request)
    require_as_asked(request, completion)
    return completion


def _readable(messages: Sequence[Message]) -> tuple[Message, ...]:
    """What an environment says, without halves of characters: a policy can make a tool repeat one, and no tokenizer
    takes it."""
    return tuple(
        message if message.content.isascii() else dataclasses.replace(message, content=without_halves(message.content))
        for message in messages
    )


def _payable(reward: float | None) -> float | None:
    if reward is not None and not math.isfinite(as_float(reward)):
        raise TaskError(f"the environment paid {as_float(reward)} for a turn: a reward is a finite number, or None")
    return reward


def _state_name(state: str | None) -> str | None:
    if not isinstance(state, str | None):
        raise TaskError(f"the environment named its state {state!r:.60}: a name is text, or None")
    return state


def within_budget(setup: EpisodeSetup, num_drawn: int) -> SamplingParams | None:
    """The parameters of the next turn, shortened to what the episode has left; None when that is nothing."""
    if not setup.max_episode_tokens:
        return setup.params
    left = setup.max_episode_tokens - num_drawn
    longest = min(setup.params.max_new_tokens, left)
    return dataclasses.replace(setup.params, max_new_tokens=longest) if left > 0 else None


def require_as_asked(request: Request, completion: Completion) -> None:
    """Raises BackendError unless the tokens were drawn as asked and their log-probabilities are of the kind to expect.

    A sampler with defaults of its own, or one that renormalises where the trainer does not, makes a run silently
    off-policy.
    """
    asked, applied, name = (
        request.params,
        completion.params,
        f"the sampler answered request {request.id}",
    )
    for field in dataclasses.fields(asked) if applied is not None else ():
        wanted, found = getattr(asked, field.name), getattr(applied, field.name)
        if wanted != found:
            raise BackendError(f"{name} with {field.name}={found!r}, asked for was {field.name}={wanted!r}")
    if not completion.token_ids:
        return
    if asked.is_truncated and completion.keep_ids is None:
        raise BackendError(
            f"{name} without the tokens it kept: with top_k={asked.top_k}, top_p={asked.top_p}, min_p={asked.min_p} "
            f"the trainer cannot renormalise as the sampler did. Set them to 0, 1 and 0 for this engine"
        )
    if not asked.is_truncated and completion.keep_ids is not None:
        raise BackendError(f"{name} with keep-sets, although nothing was to be left out: top_k=0, top_p=1, min_p=0")


def cut_status(completion: Completion) -> Status | None:
    """The status of an episode that this completion ended before its time, or None."""
    if completion.finish is Finish.LENGTH:
        return Status.TRUNCATED_LENGTH
    if completion.finish in (Finish.ABORT, Finish.INTERRUPT):
        return Status.ABORTED
    return None


async def _scored(scorer: Scorer, task: Task, trajectory: Trajectory) -> Trajectory:
    reason = f"{trajectory.status}: {trajectory.error}"
    if trajectory.status is Status.TOO_LONG:  # no part of the system failed, and there is nothing to judge
        return dataclasses.replace(trajectory, score=Score.unscorable(reason))
    if trajectory.status not in TRAINABLE_STATUSES:
        return dataclasses.replace(trajectory, score=Score.error(reason))
    score, parts, turn_rewards = await scorer.score_turns(task, trajectory)
    scored = dataclasses.replace(
        trajectory,
        score=score,
        score_parts=parts,
        weighted_parts=scorer.weighted(parts),
    )
    return dataclasses.replace(scored, turn_rewards=tuple(turn_rewards)) if turn_rewards else scored
