"""Episodes that an agent leads: it asks for completions when it likes, and what it drew becomes turns.

Owns: what an agent may draw and how, the order of what it drew, how its end becomes a status. Refuses: HTTP
(serve/agents.py), processes and services (envs/agents/), and a gradient of its own: batching/rows.py makes rows of the
turns.
"""

from __future__ import annotations

import asyncio
import bisect
import contextvars
import dataclasses
import hashlib
from array import array
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from temper.asking.quoting import quote
from temper.calls import waiting_for
from temper.envs.agents.agent import AgentEnd, task_for_agent
from temper.envs.agents.allowance import Allowance, LimitReached
from temper.errors import BackendError, ContextFull, TaskError
from temper.rollout.episode import EpisodeSetup, Played, cut_status, draw_as_asked
from temper.types import Completion, Finish, Message, Request, SamplingParams, Status, Task, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnCall:
    """One completion that an agent was given."""

    completion: Completion
    text: str
    messages: tuple[Message, ...]
    """What was said since the call that this one goes on from; all of its prompt when it goes on from none."""


class EpisodeCalls:
    """Everything that one agent draws. Its tokens go through the sampler of its own episode, as all others do."""

    def __init__(self, setup: EpisodeSetup, request_id: str, *, affordable_tokens: int = 0) -> None:
        """affordable_tokens: most that may be drawn for what the episode may cost; 0: no limit."""
        self._setup = setup
        self._request_id = request_id
        # The server of all calls was started by some episode, and would stop that one's clock while the trainer pauses.
        self._context = contextvars.copy_context()
        self._asked: Counter[str] = Counter()
        max_tokens, told = _token_limit(setup.max_episode_tokens, affordable_tokens)
        self._allowance = Allowance(
            max_calls=setup.max_turns, max_tokens=max_tokens, told=told, seconds=setup.episode_seconds
        )
        self._held: dict[str, int] = {}
        """Tokens that calls under way may draw, by request."""
        self._calls: list[DrawnCall] = []
        self.cut: Status | None = None
        """The limit that a call was refused for; None: none was, or another call was granted since."""
        self.full: ContextFull | None = None
        """A prompt that left no room for an answer; None as above."""
        self.broken: asyncio.Future[BackendError] = asyncio.get_running_loop().create_future()
        """Done when the sampler failed, or put the episode off."""

    @property
    def version(self) -> int:
        return self._setup.sampler.version

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self._setup.params.stop_ids

    async def order(
        self, prompts: Sequence[tuple[int, ...]], max_new_tokens: Sequence[int], stop: Sequence[str]
    ) -> list[Request]:
        """What is asked of the sampler for one call with these prompts, each answer at most so long as the agent wants
        it. Waits where other calls hold what is left. Raises LimitReached when the episode has had all it may; then
        nothing is used up. Each request comes back to draw() and give_back(), or to give_back() alone.

        Drawn as the recipe says, whatever the agent would like: tokens of another temperature are another policy's. Its
        random numbers are keyed by the prompt and by what was asked, not by what was left, so that calls which race
        each other draw the same in any order.
        """
        wanted = [_shortened(self._setup.params, most, stop) for most in max_new_tokens]
        try:
            granted = await self._allowance.take([params.max_new_tokens for params in wanted])
        except LimitReached as problem:
            self.cut = problem.status
            raise
        # It could go on: a crash or a hang that comes now is its own. With a stale refusal it would be judged as cut.
        self.cut = self.full = None
        return [self._request(*one) for one in zip(prompts, wanted, granted, strict=True)]

    def _request(self, prompt_ids: tuple[int, ...], params: SamplingParams, granted: int) -> Request:
        key = hashlib.blake2b(repr((prompt_ids, params)).encode(), digest_size=12).hexdigest()
        self._asked[key] += 1
        name = f"{self._request_id}/{key}/{self._asked[key]}"
        self._held[name] = granted
        return Request(id=name, prompt_ids=prompt_ids, params=dataclasses.replace(params, max_new_tokens=granted))

    async def draw(self, request: Request) -> Completion:
        try:
            drawing = draw_as_asked(self._setup, request)
            completion = await asyncio.create_task(drawing, context=self._context)
        except BackendError as error:
            if not self.broken.done():
                self.broken.set_result(error)
            raise
        except ContextFull as error:
            self.full = error
            raise
        self._allowance.end_call(self._held.pop(request.id), completion.num_drawn)
        return completion

    def give_back(self, request: Request) -> None:
        """What a request that was never drawn, or that the sampler refused, would have used up; else nothing."""
        if (held := self._held.pop(request.id, None)) is not None:
            self._allowance.give_back(held)

    def end(self) -> None:
        """From now on no call waits for others."""
        self._allowance.end()

    async def abort(self, request_id: str) -> None:
        await self._setup.sampler.abort(request_id)

    def add(self, call: DrawnCall) -> None:
        """Takes a completion that is about to be answered."""
        if was_answered(call.completion):
            self._calls.append(call)

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    def fill(self, played: Played) -> None:
        """The turns, row by row, each with what was said behind it."""
        played.opening, turns, played.turn_order = turns_of(self._calls)
        played.turns += turns

    @property
    def limit(self) -> Status | None:
        """The status of an episode that is refused for a limit, or None: it is not, or there is nothing to judge."""
        if not self._calls or (self.cut is None and self.full is None):
            return None
        return self.cut or Status.TRUNCATED_LENGTH

    def last_cut(self) -> Status | None:
        """The status of an episode whose last answer was cut at its limit, or None."""
        return cut_status(self._calls[-1].completion)


def _token_limit(max_episode_tokens: int, affordable_tokens: int) -> tuple[int, str]:
    """The smaller of both (0: there is none), and what is said when it is reached."""
    limits = {
        f"the episode has drawn its {max_episode_tokens} tokens (rollout.max_episode_tokens)": max_episode_tokens,
        "the episode has cost what it may (rollout.max_episode_cost)": affordable_tokens,
    }
    return min(((most, told) for told, most in limits.items() if most), default=(0, ""))


def _shortened(params: SamplingParams, max_new_tokens: int, stop: Sequence[str]) -> SamplingParams:
    """As the recipe has them, at most as long as the agent wants, ended by its texts as well."""
    longest = min(max_new_tokens, params.max_new_tokens)
    return dataclasses.replace(params, max_new_tokens=longest, stop=tuple(dict.fromkeys((*params.stop, *stop))))


def was_answered(completion: Completion) -> bool:
    """False for one that was cut off because nobody waited for it any more: nothing came of it."""
    return bool(completion.token_ids) and completion.finish not in (Finish.ABORT, Finish.INTERRUPT)


def turns_of(calls: Sequence[DrawnCall]) -> tuple[tuple[Message, ...], list[Turn], tuple[int, ...]]:
    """What was said first, the turns, row by row, each with what was said behind it, and Trajectory.turn_order."""
    ordered = in_rows(calls)
    said = [call.messages for call in ordered]
    turns = [
        Turn(completion=call.completion, message=Message(role="assistant", content=call.text), replies=replies)
        for call, replies in zip(ordered, [*said[1:], ()], strict=False)
    ]
    place = {id(call): number for number, call in enumerate(calls)}
    return said[0] if said else (), turns, tuple(place[id(call)] for call in ordered)


def in_rows(calls: Sequence[DrawnCall]) -> list[DrawnCall]:
    """The calls row by row: each behind the one whose prompt and answer its own prompt begins with, id by id.

    Conversations that an agent leads side by side come one after the other. A call that goes on from a place where
    another has gone on already, or from a history that was rewritten, begins a row of its own; what that repeats of
    earlier answers is prompt there, so that every token is trained once.
    """
    rows: list[list[DrawnCall]] = []
    ends: dict[tuple[int, bytes], list[int]] = {}
    """Places of rows, the first one first, by how many ids they hold and a digest of them."""
    for call in calls:
        prompt, drawn = call.completion.prompt_ids, call.completion.token_ids
        *starts, whole = _digests((*prompt, *drawn), {length for length, _ in ends if length <= len(prompt)})
        fitting = [start for start in starts if start in ends]
        place = _take_first(ends, fitting[-1]) if fitting else len(rows)
        if not fitting:
            rows.append([])
        rows[place].append(call)
        bisect.insort(ends.setdefault(whole, []), place)
    return [call for row in rows for call in row]


def _digests(ids: Sequence[int], lengths: Collection[int]) -> Iterator[tuple[int, bytes]]:
    """Of so many of the first ids, shortest first, and then of all; each with its length. Every id is read once: rows
    compared id by id would each cost the whole prompt, which conversations of one agent mostly share."""
    data, digest, done = memoryview(array("q", ids)), hashlib.blake2b(digest_size=16), 0
    for length in (*sorted(lengths), len(ids)):
        digest.update(data[done:length])
        yield length, digest.digest()
        done = length


def _take_first(ends: dict[tuple[int, bytes], list[int]], end: tuple[int, bytes]) -> int:
    place = ends[end].pop(0)
    if not ends[end]:
        del ends[end]
    return place


Posted = asyncio.Future["str | TaskError"]
"""The result that an agent has posted, or what was wrong with the one it tried to post."""


class AgentDoor(Protocol):
    """Where agents ask; serve/agents.py implements it."""

    async def open(self, calls: EpisodeCalls, posted: Posted | None = None) -> tuple[str, Mapping[str, str]]:
        """A key that is this episode's alone, and the variables that tell an agent where to ask. posted: takes the
        first result that comes with the key, or what was wrong with it, as it came; None: results are not taken."""
        ...

    async def shut(self, key: str) -> None:
        """Ends what is under way for the key. Nothing is added to its calls afterwards."""
        ...

    async def close(self) -> None: ...


class AgentRunner(Protocol):
    """What lets an agent play; envs/agents/launch.py and service.py implement it."""

    async def run(self, task: Mapping[str, Any], variables: Mapping[str, str], posted: Posted) -> AgentEnd:
        """Plays one episode, to its end or until it is cancelled."""
        ...

    @property
    def keys(self) -> Sequence[str]:
        """What it shows to others and nobody else may see: taken out of what they say."""
        ...

    async def tell_over(self, key: str) -> None:
        """Says to whoever may still play the episode of a key that it is over. Called when the key opens nothing more:
        who hears of the end must not be able to hand in a result."""
        ...

    async def close(self) -> None: ...


class AgentPlayer:
    """Implements episode.Player."""

    def __init__(self, door: AgentDoor, runner: AgentRunner, *, max_running: int, affordable_tokens: int = 0) -> None:
        """affordable_tokens: most that an episode may draw for what it may cost; 0: no limit."""
        self._affordable_tokens = affordable_tokens
        self._door = door
        self._runner = runner
        self._places = asyncio.Semaphore(max_running)

    def place(self) -> AbstractAsyncContextManager[object]:
        return self._places

    async def play(self, setup: EpisodeSetup, task: Task, played: Played, request_id: str) -> Status:
        calls = EpisodeCalls(setup, request_id, affordable_tokens=self._affordable_tokens)
        posted: Posted = asyncio.get_running_loop().create_future()
        key, variables = await self._door.open(calls, posted)
        told = task_for_agent(task, setup.renderer.prompt_messages(task), setup.seed)
        running = asyncio.ensure_future(self._runner.run(told, variables, posted))
        try:
            async with AsyncExitStack() as ending:  # the last one first
                ending.push_async_callback(self._runner.tell_over, key)
                ending.push_async_callback(_stop, running)
                ending.push_async_callback(self._door.shut, key)
                with waiting_for("the agent"):
                    end = await _until_ended(calls, running, setup.episode_seconds)
        finally:
            calls.fill(played)
            played.cut = calls.limit
        return _judge(calls, _with_posted(end, posted, (key, *self._runner.keys)), played)

    async def close(self) -> None:
        await self._runner.close()
        await self._door.close()


async def _until_ended(calls: EpisodeCalls, running: asyncio.Future[AgentEnd], seconds: float) -> AgentEnd:
    """Waits for: the agent. Unblocked by: its end, a failure of the sampler, the deadline of the episode."""
    await asyncio.wait((running, calls.broken), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    if calls.broken.done():
        raise calls.broken.result()
    return await running


async def _stop(running: asyncio.Future[AgentEnd]) -> None:
    """Waits for: nothing of the agent to be left here. Unblocked by: its end, a deadline."""
    running.cancel()
    await asyncio.wait((running,), timeout=1.0 if running.done() else 20.0)


def _with_posted(end: AgentEnd, posted: Posted, keys: Sequence[str]) -> AgentEnd:
    """The end of an agent, with the result that it has posted in place of any other."""
    found = posted.result() if posted.done() else end.result
    if isinstance(found, TaskError):
        return AgentEnd(problem=end.problem or quote(f"the agent posted no result: {found}", keys))
    return AgentEnd(problem=end.problem, result=found)


def _judge(calls: EpisodeCalls, end: AgentEnd, played: Played) -> Status:
    """The status, and the result of an agent that ended as it should.

    An agent that was refused for a limit, and was granted nothing since, may end as it likes: the policy used its limit
    up, and is judged by what was handed in, '' where that is nothing. Every other end but a good one is a failure of
    the episode.
    """
    problem = end.problem
    if not calls.num_calls:
        raise calls.full or TaskError(problem or "the agent ended without asking the model: is OPENAI_BASE_URL used?")
    if problem is not None and calls.limit is None:
        raise TaskError(problem)
    played.result = "" if problem is not None else end.result
    if problem is not None or calls.cut is not None:
        assert calls.limit is not None, "every other problem has been raised"
        return calls.limit
    # An agent that was told that its context is full may have cut it, and ended well.
    return calls.last_cut() or Status.COMPLETED
