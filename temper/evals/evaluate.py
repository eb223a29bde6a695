"""Held-out score of the weights the sampler holds, with an interval and the score of the commonest answer beside it.

Owns: what is asked, how often, under which budget, by which weights. Uses the same episodes as training but its own
request names and verifier, so an evaluation cannot change what training draws.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from temper import calls
from temper.batching.reflection import looks_back
from temper.errors import BackendError
from temper.evals.audits import HeldOutAttempt, choose, list_effects
from temper.evals.passk import clustered_interval
from temper.evals.scores import suite_metrics
from temper.rollout.episode import EpisodeSetup, Scorer
from temper.rollout.group import may_play_anew, play_attempt
from temper.rollout.thinking import was_closed
from temper.runs.records import AuditRecord, EffectRecord
from temper.runs.results import PromptResult, SampleResult
from temper.types import (
    TRAINABLE_STATUSES,
    EvaluationResult,
    SamplingParams,
    Scalar,
    Score,
    Task,
    Trajectory,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One way to ask: greedy once, or sampled several times."""

    name: str
    temperature: float
    samples: int
    max_new_tokens: int | None = None
    """None: as in training; the same below."""
    top_p: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """What every evaluation of a stage shares."""

    setup: EpisodeSetup
    """Its scorer is the training reward."""
    tasks: Sequence[Task]
    verifier: Scorer
    """Gives the score; the training reward itself when the recipe names no other."""
    verifier_name: str
    """Tells verifiers apart whose scores cannot be compared."""
    constant_scores: Mapping[str, float]
    """What the commonest answer scores, by name of the set; "" is all of them together."""
    error_limit: float = 0.0
    """Largest share of attempts that may fail without a score; they are left out and counted."""
    retries: int = 0
    """How often an attempt whose environment failed is played anew."""


async def evaluate(
    heldout: HeldOut, evaluation: Evaluation, *, stage: int, step: int, reward: float | None = None
) -> tuple[list[EvaluationResult], list[AuditRecord], list[EffectRecord]]:
    """Plays every task `samples` times with the weights of one version. A failed verifier is never a score.

    The first result is of all tasks; where they come from several sets, one of each follows, "greedy/NAME". Then what
    people should read of it: transcripts, and what was done to the world.
    reward: of the training step these weights come from, to tell how far it is from the held-out score.
    """
    setup, version = heldout.setup, heldout.setup.sampler.version
    params = _params_of(setup.params, evaluation)
    attempts = await _play(heldout, params, f"eval/{stage}/{step}/{evaluation.name}", evaluation.samples)
    _require_version(attempts, version, setup.sampler.version)
    _require_scores(attempts, heldout)
    everyone = [attempt for members in attempts for attempt in members]
    parts = {name: [m for m in attempts if not name or m[0].task.source == name] for name in heldout.constant_scores}
    results = [
        _result(dataclasses.replace(heldout, tasks=[m[0].task for m in members]), evaluation, members, name, reward)
        for name, members in parts.items()
        if any(one.heldout.value is not None for m in members for one in m)
    ]
    placed = [dataclasses.replace(result, stage=stage, step=step) for result in results]
    audits = choose(everyone, evaluation=evaluation.name, stage=stage, step=step)
    return placed, audits, list_effects(everyone, evaluation=evaluation.name, stage=stage, step=step)


def _result(
    heldout: HeldOut,
    evaluation: Evaluation,
    attempts: Sequence[Sequence[HeldOutAttempt]],
    name: str,
    reward: float | None,
) -> EvaluationResult:
    """The score of one set, or of all tasks when the name is empty."""
    scores = [[one.heldout.value for one in members if one.heldout.value is not None] for members in attempts]
    mean, low, high = clustered_interval(scores)
    everyone = [attempt for members in attempts for attempt in members]
    details: dict[str, float | Mapping[str, float]] = {**_gaps(heldout, everyone)}
    has_budget = heldout.setup.thinking is not None
    details |= suite_metrics([_prompt_result(members, has_budget) for members in attempts])
    if reward is not None and not name:
        details["reward_heldout_gap"] = reward - mean
    params = _params_of(heldout.setup.params, evaluation)
    return EvaluationResult(
        stage=0,
        step=0,
        name=f"{evaluation.name}/{name}" if name else evaluation.name,
        score=mean,
        low=low,
        high=high,
        num_prompts=len(heldout.tasks),
        samples_per_prompt=evaluation.samples,
        constant_score=heldout.constant_scores[name],
        budget=_budget(heldout, params, evaluation.samples),
        details=details,
    )


async def constant_scores(scorer: Scorer, tasks: Sequence[Task]) -> dict[str, float]:
    """constant_answer_score of all tasks (under ""), and of each set where there are several."""
    found = {"": await constant_answer_score(scorer, tasks)}
    names = dict.fromkeys(task.source for task in tasks)
    for name in names if len(names) > 1 else ():
        found[name] = await constant_answer_score(scorer, [task for task in tasks if task.source == name])
    return found


async def constant_answer_score(scorer: Scorer, tasks: Sequence[Task]) -> float:
    """Mean score of always giving the commonest gold answer. A model that beats only this has learnt nothing."""
    answers = Counter(task.answer for task in tasks if task.answer is not None)
    if not answers:
        return 0.0
    # Ties are broken by the text, so that the number does not depend on the order of the tasks.
    answer = min(answers, key=lambda text: (-answers[text], text))
    scores = [await scorer.score(task, Trajectory.saying(task.id, answer)) for task in tasks]
    values = [score.value for score, _ in scores if score.value is not None]
    return sum(values) / len(values) if values else 0.0


def prompts_hash(tasks: Sequence[Task]) -> str:
    digest = hashlib.sha256()
    for task in tasks:
        digest.update(repr((task.messages, task.answer)).encode())
    return digest.hexdigest()


def _params_of(trained: SamplingParams, evaluation: Evaluation) -> SamplingParams:
    """Nobody trains on an evaluation, so nobody needs its most likely tokens; greedy needs no truncation either."""
    is_greedy = evaluation.temperature == 0
    top_p = trained.top_p if evaluation.top_p is None else evaluation.top_p
    return dataclasses.replace(
        trained,
        temperature=evaluation.temperature,
        max_new_tokens=evaluation.max_new_tokens or trained.max_new_tokens,
        top_p=1.0 if is_greedy else top_p,
        top_k=0 if is_greedy else trained.top_k,
        min_p=0.0 if is_greedy else trained.min_p,
        top_logprobs=0,
        entropy=False,
    )


async def _play(heldout: HeldOut, params: SamplingParams, prefix: str, samples: int) -> list[list[HeldOutAttempt]]:
    setup = dataclasses.replace(heldout.setup, params=params)

    async def attempt(task: Task, index: int) -> HeldOutAttempt:
        name = f"{prefix}/{task.id}/{index}"
        trajectory = await play_attempt(setup, task, task.id, index, name, retries=heldout.retries)
        score = trajectory.score
        if heldout.verifier is not setup.scorer and trajectory.status in TRAINABLE_STATUSES:
            score, _ = await heldout.verifier.score(task, trajectory)
        return HeldOutAttempt(task=task, trajectory=trajectory, heldout=score)

    try:
        async with asyncio.TaskGroup() as group:
            running = [[group.create_task(attempt(task, k)) for k in range(samples)] for task in heldout.tasks]
    except BaseExceptionGroup as errors:  # of a broken sampler there are as many as attempts
        raise calls.first_error(errors) from errors
    return [[member.result() for member in members] for members in running]


def _require_version(attempts: Sequence[Sequence[HeldOutAttempt]], version: int, version_now: int) -> None:
    turns = (turn for members in attempts for one in members for turn in one.trajectory.turns)
    drawn = (turn.completion.drawn(turn.completion.versions).tolist() for turn in turns)
    others = {found for versions in drawn for found in versions} - {version}
    if others or version_now != version:
        found = ", ".join(map(str, sorted(others or {version_now})))
        raise BackendError(
            f"weights of version {version} were to be evaluated, and the sampler loaded version {found} meanwhile: the "
            f"score would be of no weights at all"
        )


def _require_scores(attempts: Sequence[Sequence[HeldOutAttempt]], heldout: HeldOut) -> None:
    everyone = [one for members in attempts for one in members]
    failed = [one for one in everyone if one.heldout.value is None]
    if len(failed) <= heldout.error_limit * len(everyone) and len(failed) < len(everyone):
        return
    said = [
        f"held-out task {failed[0].task.id} could not be scored: {failed[0].heldout.reason} ({len(failed)} of "
        f"{len(everyone)} attempts)"
    ]
    if any(may_play_anew(one.trajectory) for one in failed):
        said.append(f"rollout.retries={heldout.retries} is how often an episode that fails is played anew")
    if len(failed) < len(everyone):
        said.append(f"rollout.error_limit={heldout.error_limit:g} is the share of attempts that may be left out")
    raise BackendError(". ".join(said))


def _prompt_result(members: Sequence[HeldOutAttempt], has_budget: bool) -> PromptResult:
    """`has_budget`: thinking may have been closed."""
    samples = tuple(_sample_result(one.trajectory, one.heldout, has_budget) for one in members)
    return PromptResult(task_id=members[0].task.id, prompt="", gold=members[0].task.answer, samples=samples)


def _sample_result(trajectory: Trajectory, score: Score, has_budget: bool) -> SampleResult:
    events = trajectory.events
    reflects, backtracks = looks_back(trajectory)
    return SampleResult(
        score=score.value,
        reason=score.reason if score.value is None else None,
        num_tokens=trajectory.num_tokens,
        num_turns=len(trajectory.turns),
        status=trajectory.status.value,
        events=Counter(event.kind.value for event in events),
        cost=sum(event.cost for event in events),
        is_closed=was_closed(trajectory) if has_budget else None,
        reflects=reflects,
        backtracks=backtracks,
    )


def _gaps(heldout: HeldOut, attempts: Sequence[HeldOutAttempt]) -> dict[str, float]:
    """What the training reward says of the same attempts; and by how much it flatters, if another verifier judges."""
    rewards = [(one.trajectory.score.value, one.heldout.value) for one in attempts]
    gaps: dict[str, float] = {}
    if known := [reward for reward, _ in rewards if reward is not None]:
        gaps["reward_mean"] = fmean(known)
    both = [reward - score for reward, score in rewards if reward is not None and score is not None]
    if both and heldout.verifier is not heldout.setup.scorer:
        gaps["proxy_gap"] = fmean(both)
    return gaps


def _budget(heldout: HeldOut, params: SamplingParams, samples: int) -> dict[str, Scalar]:
    return {
        "prompts_sha256": prompts_hash(heldout.tasks),
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "max_new_tokens": params.max_new_tokens,
        "max_turns": heldout.setup.max_turns,
        **({} if heldout.setup.thinking is None else {"thinking_budget": heldout.setup.thinking.budget}),
        "samples": samples,
        "seed": heldout.setup.seed,
        "verifier": heldout.verifier_name,
    }
