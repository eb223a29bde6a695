"""What a state in the middle of an answer is worth: the mean reward of fresh continuations from it (VinePPO).

In episodes of several turns a step is a turn: a fresh environment hears the turns before it again, and the attempt goes
on from there.
Owns: where steps begin, and the value of each beginning. Refuses: what is made of the values (objectives/), and agents
that lead their own episodes. arXiv 2410.01679.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from temper.errors import BackendError, TemperError, UserError
from temper.rollout.episode import EpisodeSetup, TurnLoop, cut_status, require_as_asked, run_episode
from temper.types import Completion, Event, Finish, Message, Request, Score, Status, Task, Trajectory, Turn, lasting


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSplit:
    """How an answer is cut into steps, and how many continuations estimate each of them."""

    separator: str = "\n"
    """A new step begins after it. Several in a row are one: a step of nothing but separators teaches nothing."""
    tokens: int = 0
    """Above 0: steps of this many tokens, whatever the text."""
    samples: int = 9

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise UserError(f"steps of {self.tokens} tokens: use 0 (split at the separator) or more, e.g. 64.")
        if not self.separator and self.tokens == 0:
            raise UserError('steps need a separator, e.g. "\\n", or a number of tokens above 0.')
        if self.samples < 1:
            raise UserError(f"{self.samples} continuations per step: use 1 or more, e.g. 9.")


@dataclass(frozen=True, slots=True, kw_only=True)
class FreshEnd:
    """What one continuation came to."""

    score: Score
    num_drawn: int
    events: tuple[Event, ...] = ()


async def estimate_steps(
    setup: EpisodeSetup, task: Task, trajectory: Trajectory, split: StepSplit, request_id: str
) -> Trajectory:
    """The trajectory with its steps and their values, or unscorable when a state has none. All states at once."""
    if not trajectory.is_trainable:
        return trajectory
    if setup.max_turns > 1:
        starts, fresh = turn_starts(trajectory), _play_fresh
    else:
        completion = trajectory.turns[0].completion
        starts, fresh = step_starts(completion, split, setup.renderer.decode), _score_fresh
    async with asyncio.TaskGroup() as states:
        running = [
            [
                states.create_task(fresh(setup, task, trajectory, start, f"{request_id}/step {step}/{sample}"))
                for sample in range(split.samples)
            ]
            for step, start in enumerate(starts)
        ]
    fresh_ends = [[await continuation for continuation in continuations] for continuations in running]
    done = tuple(
        event for ends in fresh_ends for end in ends for event in lasting(end.events, "played for step values")
    )
    trajectory = dataclasses.replace(trajectory, unplaced_events=(*trajectory.unplaced_events, *done))
    values, num_extra = [], 0
    for step, ends in enumerate(fresh_ends):
        num_extra += sum(end.num_drawn for end in ends)
        scores = [end.score for end in ends]
        known = [score.value for score in scores if score.value is not None]
        if not known:
            reason = f"step {step} has no value: {scores[0].reason}"
            return dataclasses.replace(trajectory, score=Score.unscorable(reason), extra_tokens=num_extra)
        values.append(sum(known) / len(known))
    return dataclasses.replace(trajectory, step_starts=tuple(starts), step_values=tuple(values), extra_tokens=num_extra)


def step_starts(completion: Completion, split: StepSplit, decode: Callable[[Sequence[int]], str]) -> list[int]:
    """First drawn token of each step; the first is 0. The stop token never begins one: it belongs to the last."""
    ids = completion.token_ids
    end = len(ids) - 1 if completion.finish is Finish.STOP else len(ids)
    if split.tokens > 0:
        return list(range(0, max(end, 1), split.tokens))
    text, starts = decode(ids), [0]
    for separators in re.finditer(f"(?:{re.escape(split.separator)})+", text):
        begun = text[: separators.end()]
        # The first token whose own first character lies behind the separators: all before it is in the tokens before.
        # By the text and not its length, for a character cut in two decodes to as many others.
        start = bisect_left(range(end), True, lo=starts[-1], key=lambda i: decode(ids[:i]).startswith(begun))
        if starts[-1] < start < end:
            starts.append(start)
    return starts


def turn_starts(trajectory: Trajectory) -> list[int]:
    """First drawn token of each turn; one that drew nothing begins no step."""
    sizes = [turn.completion.num_drawn for turn in trajectory.turns]
    return [start for start, size in zip(accumulate(sizes, initial=0), sizes, strict=False) if size]


async def _play_fresh(setup: EpisodeSetup, task: Task, trajectory: Trajectory, start: int, request_id: str) -> FreshEnd:
    """Plays the episode anew from the turn that begins with this drawn token."""
    sizes = accumulate((turn.completion.num_drawn for turn in trajectory.turns), initial=0)
    before = trajectory.turns[: list(sizes).index(start)]
    attempt = await run_episode(
        dataclasses.replace(setup, player=TurnLoop(before)),
        task,
        group_id=trajectory.group_id,
        index=trajectory.index,
        request_id=request_id,
    )
    num_drawn = sum(turn.completion.num_drawn for turn in attempt.turns[len(before) :])
    return FreshEnd(score=attempt.score, num_drawn=num_drawn, events=attempt.events)


async def _score_fresh(
    setup: EpisodeSetup, task: Task, trajectory: Trajectory, start: int, request_id: str
) -> FreshEnd:
    """Draws a new end for the answer from this token on and scores the whole.

    Only a broken backend raises.
    """
    try:
        async with asyncio.timeout(setup.episode_seconds):
            completion = await _continue(setup, trajectory.turns[0].completion, start, request_id)
    except TimeoutError:
        reason = f"a continuation took longer than {setup.episode_seconds:g} s"
        return FreshEnd(score=Score.error(reason), num_drawn=0)
    except BackendError:
        raise
    except TemperError as problem:
        return FreshEnd(score=Score.error(str(problem)), num_drawn=0)
    status, num_drawn = cut_status(completion) or Status.COMPLETED, len(completion.token_ids) - start
    if status is Status.ABORTED:
        return FreshEnd(score=Score.error("a continuation was aborted"), num_drawn=num_drawn)
    message = Message(role="assistant", content=setup.renderer.decode(completion.token_ids))
    attempt = Trajectory(
        task_id=trajectory.task_id,
        group_id=trajectory.group_id,
        index=trajectory.index,
        turns=(Turn(completion=completion, message=message),),
        status=status,
        score=Score.unscorable("not scored yet"),
    )
    score, _ = await setup.scorer.score(task, attempt)
    return FreshEnd(score=score, num_drawn=num_drawn)


async def _continue(setup: EpisodeSetup, completion: Completion, start: int, request_id: str) -> Completion:
    """The completion up to `start` and what the sampler drew after it, within what is left of the token budget."""
    budget = setup.params.max_new_tokens - start
    params = dataclasses.replace(setup.params, max_new_tokens=budget, top_logprobs=0)
    prompt_ids = (*completion.prompt_ids, *completion.token_ids[:start])
    request = Request(id=request_id, prompt_ids=prompt_ids, params=params)
    drawn = await setup.sampler.generate(request)
    require_as_asked(request, drawn)
    return Completion(
        prompt_ids=completion.prompt_ids,
        token_ids=[*completion.token_ids[:start], *drawn.token_ids],
        logprobs=[*completion.logprobs[:start], *drawn.logprobs],
        versions=[*completion.versions[:start], *drawn.versions],
        finish=drawn.finish,
    )
