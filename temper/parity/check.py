"""The proof before step 1 and the canary after every publication: sampler and trainer must agree on log-probabilities.

Owns: what is sampled and scored to find out, and the refusal. Refuses: training when they differ: a run that is
silently off-policy does not start and does not go on.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from temper.batching.rows import rows_of
from temper.errors import BackendError, UserError
from temper.parity.budgets import Budget
from temper.parity.diagnosis import (
    MOST_MOVED,
    NO_ROUTES,
    Agreement,
    Evidence,
    Probe,
    diagnose,
    has_wrong_routes,
    measure,
    moved_share,
    rounded_head,
)
from temper.protocols import Sampler
from temper.rollout.episode import EpisodeSetup, run_episode
from temper.types import (
    Column,
    Completion,
    Message,
    Ragged,
    Request,
    Sample,
    SamplingParams,
    Score,
    Status,
    Task,
    Trajectory,
    Turn,
)

Recompute = Callable[[Sequence[Sample], Literal["policy", "routers"]], Sequence[Sequence[float]]]
"""Trainer.score."""
FindStale = Callable[[], Sequence[str]]
"""Returns the names of tensors that differ between sampler and trainer."""
AskStale = Callable[[], Awaitable[Sequence[str]]]
"""The same of samplers elsewhere, which have to be asked."""

NUM_PROBES = 4
"""Contexts that are looked at when a gap was found: so many whole prompts and so many single tokens."""
NUM_CANDIDATES = 8
"""Most likely next tokens that are looked at in each of these contexts."""
CANARY_TOKENS = 8
"""Tokens drawn after each prompt of a canary; fewer, down to two, when training draws fewer than eight times as many.
One token would come from the prefill alone."""
CANARY_CONTEXT = 64
"""Longest context of a canary. Long ones were compared before step 1; what a publication can break shows in any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """Whose log-probabilities are compared, and how much they may differ."""

    sampler: Sampler
    recompute: Recompute
    params: SamplingParams
    """Sampling parameters of training: what is drawn otherwise proves nothing."""
    budget: Budget
    find_stale: FindStale | None = None
    """None: the sampler's weights cannot be looked at from here."""
    ask_stale: AskStale | None = None
    """Asked when a gap was found. None: nobody can be."""
    bos_id: int | None = None
    """Token that the sampler may add in front in secret; the diagnosis tries it. None: the tokenizer has none."""
    replays_routes: bool = False
    """Whether the trainer replays the routes that the sampler tells."""
    seconds: float = 600.0
    """Deadline of one comparison's sampling."""


SECOND_LOOK = 16
"""A canary that was too far off is repeated with this many times as many prompts before it stops a run. It then ends at
stop tokens as training does: behind them rounding is that of texts that nobody draws."""


class Canary:
    """A few fixed prompts and a few tokens after every publication.

    Randomness is keyed by request id and the canary has ids of its own, so it cannot change what training draws.
    """

    def __init__(self, sides: Sides, prompts: Sequence[tuple[int, ...]], *, name: str, every: int = 1) -> None:
        """`every`: publications between two checks; 0: never. `prompts` come from canary_prompts()."""
        num_tokens = min(CANARY_TOKENS, max(2, sides.params.max_new_tokens // 8))
        params = dataclasses.replace(sides.params, max_new_tokens=num_tokens, stop=(), top_logprobs=0, entropy=False)
        # Without stop tokens: every check compares as many tokens as the last.
        self._sides = dataclasses.replace(sides, params=dataclasses.replace(params, stop_ids=()))
        self._second_look = dataclasses.replace(sides, params=params)
        self._prompts = tuple(prompts)
        self._name = name
        self._every = every

    async def check(self, version: int) -> Agreement | None:
        """Call it when `version` was published and is the trainer's own. None: not this time.

        Raises BackendError when sampler and trainer disagree, or when the sampler draws with other weights.
        """
        if not self._every or version % self._every:
            return None
        name, sides = f"{self._name}/{version}", self._sides
        rows = _rows(await _draw(sides, self._prompts, name), name)
        agreement = await _compare(sides, rows, version)
        is_off = 0 < sides.budget.mean_gap < agreement.mean_gap or agreement.moved > MOST_MOVED
        if is_off and not await _asked_stale(sides):
            # One unlucky token among a few tips their mean; a broken publication is as far off on many.
            sides = self._second_look
            rows = _rows(await _draw(sides, self._prompts * SECOND_LOOK, f"{name}/again"), name)
            agreement = await _compare(sides, rows, version)
        return await _judge(sides, rows, agreement, version=version, name=name)


def canary_prompts(rows: Sequence[Sample], count: int = 4) -> list[tuple[int, ...]]:
    """Short prompts for a canary, from rows that were really sampled: of long ones the end, where answers begin.

    Without their first token: were a canary's prompt the start of a training prompt, the prefix cache would hand its
    blocks on, and in fast mode what is computed together decides the last bits.
    """
    prompts = {_prompt_of(row) for row in rows}
    shortest = sorted(prompts, key=lambda prompt: (len(prompt), prompt))[:count]
    return list(dict.fromkeys(prompt[1:][-CANARY_CONTEXT:] or prompt for prompt in shortest))


async def prove_parity(
    setup: EpisodeSetup, tasks: Sequence[Task], sides: Sides, *, name: str
) -> tuple[Agreement, list[Sample]]:
    """Plays a few episodes and compares what was drawn with the trainer. Raises BackendError when they differ, and
    UserError when no episode can be played.

    Returns the rows too: real prompts, from which a canary can take its own.
    """
    version = sides.sampler.version
    episodes = (
        run_episode(setup, task, group_id=f"{name}/{place}", index=0, request_id=f"{name}/{place}")
        for place, task in enumerate(tasks)
    )
    trajectories = await asyncio.gather(*episodes)
    if all(trajectory.error is not None for trajectory in trajectories):
        first = trajectories[0]
        raise UserError(f"none of {len(trajectories)} episodes could be played. Task {first.task_id}: {first.error}")
    for turn in (turn for trajectory in trajectories for turn in trajectory.turns):
        _require_echo(turn.completion, setup.params)
    rows = [row for trajectory in trajectories if trajectory.num_tokens for row in rows_of(trajectory)]
    if sides.replays_routes and any(row.routes is None for row in rows):
        raise BackendError(f"{name}: the sampler tells no routes, and model.replay_routes asks for them")
    agreement = await _compare(sides, rows, version)
    agreement = await _judge(sides, rows, agreement, version=version, name=name)
    await require_float32_heads(sides, [_prompt_of(row) for row in rows], name=name)
    return agreement, rows


async def require_float32_heads(sides: Sides, prompts: Sequence[tuple[int, ...]], *, name: str) -> None:
    """A head that rounds its logits on one side hides in the noise of large models in half precision, and no budget
    for that noise can see it. But its logits lie on a grid. Raises BackendError when those of one side do."""
    probes = await _probe(sides, prompts, name)
    if (found := rounded_head(probes, sides.params.temperature or 1.0)) is not None:
        raise BackendError(f"{name}: sampler and trainer disagree. {found}")


def require_agreement(agreement: Agreement, *, budget: Budget, when: str) -> None:
    """Raises BackendError with the numbers and the cause when a gap is above the budget, a tensor is stale or routes
    are not those that were taken."""
    is_within = agreement.mean_gap <= budget.mean_gap and agreement.max_gap <= budget.max_gap
    if is_within and not agreement.stale and not has_wrong_routes(agreement):
        return
    moved = f"Of the experts that the sampler tells, the trainer's routers would not choose {agreement.moved:.0%}. "
    raise BackendError(
        f"{when}: sampler and trainer disagree. Over {agreement.num_tokens} tokens their log-probabilities differ by "
        f"{agreement.mean_gap:.3g} on average and by {agreement.max_gap:.3g} at most; the budget is "
        f"{budget.mean_gap:.3g} and {budget.max_gap:.3g}. {moved if agreement.moved > MOST_MOVED else ''}"
        f"{diagnose(agreement)}. Training on this would be silently off-policy"
        f"{'' if is_within else '. If the gap is expected, set engine.max_logprob_gap'}"
    )


def stale_tensors(published: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> list[str]:
    """Names of tensors that are missing on one side or differ in a bit. Shared storage costs nothing."""
    stale, differs = [], {}
    for name in sorted({*published, *held}):
        ours, theirs = published.get(name), held.get(name)
        if ours is None or theirs is None or (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
            stale.append(name)
        elif ours.data_ptr() != theirs.data_ptr():
            # The sampler's may be on another device. NaN equals nothing, and weights that hold one should be named.
            differs[name] = (ours != theirs.to(ours.device)).any()
    if differs:  # one look at the device for all: while others compute there, each would wait for them
        stale += [
            name for name, is_other in zip(differs, torch.stack([*differs.values()]).tolist(), strict=True) if is_other
        ]
    return sorted(stale)


async def _judge(sides: Sides, rows: Sequence[Sample], agreement: Agreement, *, version: int, name: str) -> Agreement:
    """Looks for the cause only when the budget is not kept: a check that passes costs one forward."""
    is_within = agreement.mean_gap <= sides.budget.mean_gap and agreement.max_gap <= sides.budget.max_gap
    stale = None if sides.find_stale is None else tuple(await asyncio.to_thread(sides.find_stale))
    if not is_within and sides.find_stale is None:
        stale = await _asked_stale(sides)
    agreement = dataclasses.replace(agreement, stale=stale)
    if not stale and (not is_within or agreement.moved > MOST_MOVED):
        evidence = await _gather(sides, rows, version=version, name=name)
        agreement = dataclasses.replace(agreement, evidence=evidence)
    require_agreement(agreement, budget=sides.budget, when=f"{name}, weights version {version}")
    return agreement


async def _compare(sides: Sides, rows: Sequence[Sample], version: int) -> Agreement:
    agreement = measure(rows, await _score(sides, rows), version=version)
    return dataclasses.replace(agreement, moved=await _moved(sides, rows)) if sides.replays_routes else agreement


async def _moved(sides: Sides, rows: Sequence[Sample]) -> float:
    return moved_share(rows, await asyncio.to_thread(sides.recompute, rows, "routers"))


async def _asked_stale(sides: Sides) -> tuple[str, ...] | None:
    return None if sides.ask_stale is None else tuple(await sides.ask_stale())


async def _gather(sides: Sides, rows: Sequence[Sample], *, version: int, name: str) -> Evidence:
    """Experiments, each of which takes one possible cause away or lays it bare."""
    alone = [(await _score(sides, [row]))[0] for row in rows]
    other_starts = {}
    for change, changed in _other_starts(rows, sides.bos_id):
        other_starts[change] = measure(changed, await _score(sides, changed), version=version).mean_gap
    other_routes, other_moved = {}, {}
    for change, changed in _other_routes(rows) if sides.replays_routes else ():
        other_routes[change] = measure(changed, await _score(sides, changed), version=version).mean_gap
        if change != NO_ROUTES:
            other_moved[change] = await _moved(sides, changed)
    return Evidence(
        temperature=sides.params.temperature or 1.0,
        probes=tuple(await _probe(sides, [_prompt_of(row) for row in rows], name)),
        alone_gap=measure(rows, alone, version=version).mean_gap,
        other_starts=other_starts,
        other_routes=other_routes,
        other_moved=other_moved,
    )


def _other_starts(rows: Sequence[Sample], bos_id: int | None) -> Iterator[tuple[str, list[Sample]]]:
    """The rows as a sampler may have seen them that adds a token of its own, or takes one away."""
    yield "with their first token twice", [_started(row, row.token_ids[0]) for row in rows]
    if bos_id is not None:
        yield f"with a BOS (id {bos_id}) in front", [_started(row, bos_id) for row in rows]
    if all(row.loss_mask.index(1) > 1 for row in rows):
        yield "without their first token", [_mapped(row, lambda column: column[1:]) for row in rows]


def _other_routes(rows: Sequence[Sample]) -> Iterator[tuple[str, list[Sample]]]:
    """The rows with routes of other tokens, and with the choice of the trainer's own routers."""

    def routed(change: Callable[[Sequence[Sequence[int]]], Sequence[Sequence[int]]]) -> list[Sample]:
        return [dataclasses.replace(row, routes=None if row.routes is None else change(row.routes)) for row in rows]

    yield "one token earlier", routed(lambda routes: [*routes[1:], ()])
    yield "one token later", routed(lambda routes: [(), *routes[:-2], ()])
    yield NO_ROUTES, [dataclasses.replace(row, routes=None) for row in rows]


def _started(row: Sample, token: int) -> Sample:
    longer = _mapped(row, lambda column: [column[0], *column])
    return dataclasses.replace(longer, token_ids=[token, *row.token_ids])


def _mapped(row: Sample, change: Callable[[Sequence[object]], Sequence[object]]) -> Sample:
    """The row with every column changed alike."""
    columns = {
        field.name: change(column)
        for field in dataclasses.fields(row)
        if isinstance(column := getattr(row, field.name), Column | Ragged)
    }
    return dataclasses.replace(row, **columns)  # type: ignore[arg-type]


async def _probe(sides: Sides, prompts: Sequence[tuple[int, ...]], name: str) -> list[Probe]:
    """What both sides say about the most likely next tokens, after whole prompts and after single tokens."""
    tokens = list(dict.fromkeys(token for prompt in prompts for token in prompt))[:NUM_PROBES]
    prompts = list(dict.fromkeys(prompts))[:NUM_PROBES]
    params = dataclasses.replace(sides.params, max_new_tokens=1, top_logprobs=NUM_CANDIDATES)
    contexts = [*prompts, *((token,) for token in tokens)]
    drawn = await _draw(dataclasses.replace(sides, params=params), contexts, f"{name}/probe")
    probes = []
    for completion in drawn:
        candidates = list(_candidates(completion))
        if len(candidates) > 1:
            scored = await _score(sides, _rows(candidates, "probe"))
            probes.append(
                Probe(
                    num_context=len(completion.prompt_ids),
                    sampled=tuple(candidate.logprobs[0] for candidate in candidates),
                    recomputed=tuple(row[-1] for row in scored),
                )
            )
    return probes


def _candidates(completion: Completion) -> Iterator[Completion]:
    """One completion for each token that could have been drawn instead."""
    if not completion.top_ids or not completion.top_logprobs:
        return
    kept = None if completion.keep_ids is None else set(completion.keep_ids[0])
    for token, logprob in zip(completion.top_ids[0], completion.top_logprobs[0], strict=True):
        if logprob > float("-inf") and (kept is None or token in kept):
            yield dataclasses.replace(
                completion, token_ids=[token], logprobs=[logprob], top_ids=None, top_logprobs=None, entropies=None
            )


def _prompt_of(row: Sample) -> tuple[int, ...]:
    """What stands before the first drawn token."""
    return tuple(row.token_ids[: row.loss_mask.index(1)])


async def _draw(sides: Sides, prompts: Sequence[tuple[int, ...]], name: str) -> list[Completion]:
    """One completion per prompt, as the sampler says it made them."""
    requests = [
        Request(id=f"{name}/{place}", prompt_ids=prompt, params=sides.params) for place, prompt in enumerate(prompts)
    ]
    try:
        async with asyncio.timeout(sides.seconds):
            completions = await asyncio.gather(*(sides.sampler.generate(request) for request in requests))
    except TimeoutError as error:
        raise BackendError(f"{name}: the sampler drew nothing for {sides.seconds:g} s") from error
    for completion, prompt in zip(completions, prompts, strict=True):
        _require_echo(completion, sides.params)
        if completion.prompt_ids != prompt:
            raise BackendError(
                f"{name}: the sampler was given {len(prompt)} prompt ids, {list(prompt[:4])} ..., and saw "
                f"{len(completion.prompt_ids)}, {list(completion.prompt_ids[:4])} ...: look for an extra BOS"
            )
    return completions


def _require_echo(completion: Completion, asked: SamplingParams) -> None:
    """What the sampler says it applied must be what it was asked for."""
    if completion.params is None:
        return
    differing = [
        f"{name} {getattr(completion.params, name):g} instead of {getattr(asked, name):g}"
        for name in ("temperature", "top_k", "top_p", "min_p")
        if getattr(completion.params, name) != getattr(asked, name)
    ]
    if differing:
        raise BackendError(f"the sampler drew with {', '.join(differing)}: look for defaults in generation_config.json")


def _rows(completions: Sequence[Completion], name: str) -> list[Sample]:
    """Rows as training makes them, so that whatever column scoring needs is there."""
    rows = []
    for place, completion in enumerate(completions):
        turn = Turn(completion=completion, message=Message(role="assistant", content=""))
        trajectory = Trajectory(
            task_id=name,
            group_id=f"{name}/{place}",
            index=0,
            turns=(turn,),
            status=Status.COMPLETED,
            score=Score.unscorable("a canary"),
        )
        rows += rows_of(trajectory)
    return rows


async def _score(sides: Sides, rows: Sequence[Sample]) -> Sequence[Sequence[float]]:
    return await asyncio.to_thread(sides.recompute, rows, "policy")
