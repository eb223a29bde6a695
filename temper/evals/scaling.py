"""Test-time scaling: what a model gets right when it may spend more tokens.

Owns: drawing samples, forcing a budget of thought, refining an answer, on any Sampler; every token of every sample and
round is counted. Refuses: environments of several turns, and turning attempts into points (curves.py).
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Protocol

from temper.errors import BackendError, ContextFull, TaskError, UserError
from temper.evals.scores import CORRECT_AT, ROUNDING
from temper.protocols import Sampler
from temper.rollout.episode import EpisodeRenderer, Scorer, require_as_asked
from temper.types import Completion, Finish, Message, Request, SamplingParams, Score, Status, Task, Trajectory, Turn

CHECK = (
    "Check your answer above step by step. If something is wrong, correct it. "
    "Then state the final answer once more, in the form that was asked for."
)
"""What the user says between rounds of refinement."""


class ThinkingRenderer(EpisodeRenderer, Protocol):
    """tasks/render.py implements it."""

    def encode(self, text: str) -> list[int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingSetup:
    """What every attempt shares."""

    sampler: Sampler
    renderer: ThinkingRenderer
    scorer: Scorer
    params: SamplingParams
    answer_of: Callable[[str], str | None] = lambda text: None
    """The normalised final answer of a text, for votes; None: it states none."""
    correct_at: float = CORRECT_AT
    """Score from which an answer is right."""
    prefix: str = "scale"
    """Beginning of request ids. Randomness is keyed by them: the same ids draw the same tokens."""
    attempt_seconds: float = 600.0
    """Deadline of one attempt, all its rounds together."""
    max_running: int = 64
    """Attempts under way at once; the others wait without their deadline running."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingBudget:
    """How long a model must and may think before it answers."""

    min_tokens: int = 0
    """Fewest tokens that it thinks, injected ones not counted; a model that ends earlier is told to go on."""
    max_tokens: int
    """Drawn while thinking; then the answer is called for."""
    answer_tokens: int = 64
    """Drawn for the answer after that."""
    continuation: str = "\nWait"
    """Put in the place of an end that comes too early."""
    answer_prefix: str = "\n\nFinal answer:"
    """Put behind thoughts that are cut. A model with thinking marks wants e.g. "</think>" in front of it."""
    think_end: str = ""
    """The model's own mark of the end of its thoughts, e.g. "</think>". Empty: only the end of its turn ends them."""
    max_continuations: int = 8
    """A model that has nothing to add is let go after so many."""

    def __post_init__(self) -> None:
        if not 0 <= self.min_tokens <= self.max_tokens or self.max_tokens < 1 or self.answer_tokens < 1:
            raise UserError(
                f"a budget of {self.min_tokens} to {self.max_tokens} thinking tokens and {self.answer_tokens} for the "
                f"answer cannot be kept. Use 0 <= min <= max, with at least 1 token for each part"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingAttempt:
    """One way to an answer, with what it cost."""

    text: str
    """What was judged."""
    whole: str
    """All that was drawn and injected in the last turn."""
    score: Score
    is_right: bool
    """False also when there is no score; those who count ask the score first."""
    answer: str | None
    num_drawn: int
    """Tokens the model drew, replaced ends included: they were paid for."""
    num_injected: int = 0
    """Tokens put into its mouth. Not its own, so never among num_drawn."""
    mean_logprob: float = 0.0
    """Mean log-probability of the drawn tokens."""


@dataclass(slots=True)
class Spent:
    """What an attempt has drawn so far."""

    logprobs: list[float] = field(default_factory=list)
    num_injected: int = 0
    num_requests: int = 0


async def draw_samples(setup: ScalingSetup, tasks: Sequence[Task], count: int) -> list[list[ScalingAttempt]]:
    """`count` independent attempts at each task."""

    async def attempt(task: Task, request_id: str, spent: Spent) -> list[ScalingAttempt]:
        prompt = setup.renderer.prompt_ids(setup.renderer.prompt_messages(task))
        completion = await _draw(setup, request_id, prompt, setup.params, spent)
        text = setup.renderer.decode(completion.token_ids)
        return [await _judged(setup, task, (_turn(completion, text),), text, spent)]

    drawn = await _everyone(setup, tasks, count, attempt, "sample")
    return [[steps[-1] for steps in members] for members in drawn]


async def force_budget(
    setup: ScalingSetup, tasks: Sequence[Task], count: int, budget: ThinkingBudget
) -> list[list[ScalingAttempt]]:
    """`count` attempts at each task, each kept thinking for at least and at most so many tokens."""
    injected = {text: setup.renderer.encode(text) for text in (budget.continuation, budget.answer_prefix)}

    async def attempt(task: Task, request_id: str, spent: Spent) -> list[ScalingAttempt]:
        prompt = setup.renderer.prompt_ids(setup.renderer.prompt_messages(task))
        thoughts = await _think(setup, request_id, prompt, budget, injected[budget.continuation], spent)
        ids, said = await _answer(setup, request_id, prompt, budget, thoughts, injected[budget.answer_prefix], spent)
        completion = _as_completion(prompt, ids, thoughts.is_ended)
        turn = _turn(completion, said)
        return [await _judged(setup, task, (turn,), setup.renderer.decode(ids), spent)]

    way = f"budget {budget.min_tokens} {budget.max_tokens}"
    drawn = await _everyone(setup, tasks, count, attempt, way)
    return [[steps[-1] for steps in members] for members in drawn]


async def refine(
    setup: ScalingSetup, tasks: Sequence[Task], count: int, rounds: int, request: str = CHECK
) -> list[list[list[ScalingAttempt]]]:
    """By round, task and sample: the answer after 0, 1, ... `rounds` requests to check it. Costs add up over rounds.

    A conversation that fills the context keeps its last answer, at the cost it has by then.
    """

    async def attempt(task: Task, request_id: str, spent: Spent) -> list[ScalingAttempt]:
        history = setup.renderer.prompt_messages(task)
        prompt = setup.renderer.prompt_ids(history)
        turns: tuple[Turn, ...] = ()
        steps: list[ScalingAttempt] = []
        for _ in range(rounds + 1):
            try:
                completion = await _draw(setup, request_id, prompt, setup.params, spent)
            except ContextFull:
                if not steps:
                    raise
                return steps + [steps[-1]] * (rounds + 1 - len(steps))
            turn = _turn(completion, setup.renderer.decode(completion.token_ids))
            turns = (*turns, turn)
            steps.append(await _judged(setup, task, turns, turn.message.content, spent))
            reply = Message(role="user", content=request)
            turns = (*turns[:-1], dataclasses.replace(turn, replies=(reply,)))
            history = (*history, turn.message)
            prompt = setup.renderer.extend_ids(prompt, completion.token_ids, (reply,), history)
            history = (*history, reply)
        return steps

    drawn = await _everyone(setup, tasks, count, attempt, "refine")
    return [[[steps[number] for steps in members] for members in drawn] for number in range(rounds + 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Thoughts:
    """What was thought, in pieces: one more than the times the model was told to go on."""

    ids: list[int]
    """Own and injected, replaced ends left out."""
    pieces: list[list[int]]
    """The model's own."""
    is_ended: bool
    """The model ended its turn itself."""
    is_marked: bool = False
    """The model ended its thoughts by its own mark, and has not answered yet."""


async def _think(
    setup: ScalingSetup,
    request_id: str,
    prompt: tuple[int, ...],
    budget: ThinkingBudget,
    go_on: list[int],
    spent: Spent,
) -> Thoughts:
    stop = (*setup.params.stop, *([budget.think_end] if budget.think_end else []))
    ids: list[int] = []
    pieces: list[list[int]] = []
    drawn_before = len(spent.logprobs)
    while (room := budget.max_tokens - (len(spent.logprobs) - drawn_before)) > 0:
        params = dataclasses.replace(setup.params, max_new_tokens=room, stop=stop)
        try:
            completion = await _draw(setup, request_id, (*prompt, *ids), params, spent)
        except ContextFull:
            if not pieces:
                raise
            break
        kept = _without_end(setup, budget, completion)
        pieces.append(kept)
        if completion.finish is Finish.LENGTH:
            ids += completion.token_ids
            break
        if sum(map(len, pieces)) >= budget.min_tokens or len(pieces) > budget.max_continuations:
            ids += completion.token_ids
            is_ended = completion.token_ids[-1] in setup.params.stop_ids or not budget.think_end
            return Thoughts(ids=ids, pieces=pieces, is_ended=is_ended, is_marked=not is_ended)
        ids += [*kept, *go_on]
        spent.num_injected += len(go_on)
    return Thoughts(ids=ids, pieces=pieces, is_ended=False)


def _without_end(setup: ScalingSetup, budget: ThinkingBudget, completion: Completion) -> list[int]:
    """The drawn tokens without what ended them: a stop token, or the mark of the end of thought."""
    ids = list(completion.token_ids)
    if completion.finish is not Finish.STOP:
        return ids
    if ids[-1] in setup.params.stop_ids:
        return ids[:-1]
    before, mark, _ = setup.renderer.decode(ids).partition(budget.think_end) if budget.think_end else ("", "", "")
    while mark and ids and len(setup.renderer.decode(ids)) > len(before):
        ids.pop()  # all tokens of the mark: a half of it would be read as text
    return ids


async def _answer(
    setup: ScalingSetup,
    request_id: str,
    prompt: tuple[int, ...],
    budget: ThinkingBudget,
    thoughts: Thoughts,
    call: list[int],
    spent: Spent,
) -> tuple[list[int], str]:
    """All ids of the turn, and the text to be judged: what came last, for thoughts may hold answers given up since."""
    if thoughts.is_ended:
        said = [text for piece in thoughts.pieces if (text := setup.renderer.decode(piece)).strip()]
        return thoughts.ids, said[-1] if said else ""
    begun = [] if thoughts.is_marked else call
    params = dataclasses.replace(setup.params, max_new_tokens=budget.answer_tokens)
    try:
        completion = await _draw(setup, request_id, (*prompt, *thoughts.ids, *begun), params, spent)
    except ContextFull:
        return thoughts.ids, ""  # no room is left to answer
    spent.num_injected += len(begun)
    answer = [*begun, *completion.token_ids]
    return [*thoughts.ids, *answer], setup.renderer.decode(answer)


async def _everyone(
    setup: ScalingSetup,
    tasks: Sequence[Task],
    count: int,
    attempt: Callable[[Task, str, Spent], Awaitable[list[ScalingAttempt]]],
    way: str,
) -> list[list[list[ScalingAttempt]]]:
    """By task and sample: the steps of each attempt."""
    turns = asyncio.Semaphore(setup.max_running)

    async def guarded(task: Task, member: int) -> list[ScalingAttempt]:
        request_id = f"{setup.prefix}/{way}/{task.id}/{member}"
        async with turns:
            try:
                async with asyncio.timeout(setup.attempt_seconds):
                    return await attempt(task, request_id, Spent())
            except TimeoutError as error:
                raise BackendError(f"{request_id} took longer than {setup.attempt_seconds:g} s") from error
            except TaskError as error:
                raise UserError(f"task {task.id} cannot be asked: {error}") from error

    running = [asyncio.create_task(guarded(task, member)) for task in tasks for member in range(count)]
    try:
        drawn = await asyncio.gather(*running)
    finally:
        for one in running:
            one.cancel()  # the first failure ends all of them
        await asyncio.gather(*running, return_exceptions=True)
    return [drawn[place : place + count] for place in range(0, len(drawn), count)]


async def _draw(
    setup: ScalingSetup, request_id: str, prompt: tuple[int, ...], params: SamplingParams, spent: Spent
) -> Completion:
    request = Request(id=f"{request_id}/{spent.num_requests}", prompt_ids=prompt, params=params)
    completion = await setup.sampler.generate(request)
    require_as_asked(request, completion)
    if completion.finish not in (Finish.STOP, Finish.LENGTH):
        raise BackendError(f"the sampler gave up request {request.id}: {completion.finish}")
    spent.num_requests += 1
    spent.logprobs += completion.logprobs
    return completion


async def _judged(setup: ScalingSetup, task: Task, turns: tuple[Turn, ...], whole: str, spent: Spent) -> ScalingAttempt:
    is_cut = turns[-1].completion.finish is Finish.LENGTH
    trajectory = Trajectory(
        task_id=task.id,
        group_id=task.id,
        index=0,
        turns=turns,
        status=Status.TRUNCATED_LENGTH if is_cut else Status.COMPLETED,
        score=Score.unscorable("not scored yet"),
    )
    score, _ = await setup.scorer.score(task, trajectory)
    return ScalingAttempt(
        text=trajectory.text,
        whole=whole,
        score=score,
        is_right=score.value is not None and score.value >= setup.correct_at - ROUNDING,
        answer=setup.answer_of(trajectory.text),
        num_drawn=len(spent.logprobs),
        num_injected=spent.num_injected,
        mean_logprob=fmean(spent.logprobs) if spent.logprobs else 0.0,
    )


def _turn(completion: Completion, text: str) -> Turn:
    return Turn(completion=completion, message=Message(role="assistant", content=text))


def _as_completion(prompt: tuple[int, ...], ids: list[int], is_ended: bool) -> Completion:
    """What rewards look at: the tokens of the turn. Log-probabilities of injected ones do not exist."""
    nothing = [0.0] * len(ids)
    finish = Finish.STOP if is_ended else Finish.LENGTH
    return Completion(prompt_ids=prompt, token_ids=ids, logprobs=nothing, versions=[0] * len(ids), finish=finish)
