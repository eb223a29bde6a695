"""Tail batching: short steps put off the groups with very long answers, and long steps do them together.

Owns: how long is very long, by the longest answers of recent groups, and that an answer is stopped there in a short
step. A group is put off as soon as one of its answers gets there; another starts in its place, without a limit once as
many wait as fill a step. Late steps (late.py) have none. Refuses: runs that train on older weights, which need not wait
for anybody. RollPacker, arXiv 2509.21009.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque

from temper.engine.wrapped import WrappedSampler
from temper.protocols import Sampler
from temper.rollout.buffer import StepGroups
from temper.rollout.controls.control import PutOff, Setting, State
from temper.rollout.controls.late import CatchingUp
from temper.rollout.episode import require_as_asked
from temper.types import Completion, Finish, Group, Request, Scalar


class Tail(CatchingUp):
    name = "tail"

    def __init__(self, setting: Setting, *, quantile: float = 0.8, window: int = 256, patience: int = 16) -> None:
        super().__init__(setting, patience)
        if not 0 < quantile < 1:
            raise self.refuse(f"puts off answers beyond quantile={quantile:g} of recent lengths. Use 0.5 to 0.95")
        if window < 2 * setting.groups_per_step:
            raise self.refuse(
                f"looks at the last window={window} groups. Use {2 * setting.groups_per_step} (two steps) or more"
            )
        if setting.max_staleness:
            raise self.refuse(
                f"is for synchronous runs: with rollout.max_staleness={setting.max_staleness} nobody waits for the "
                f'longest answer of a step. Use max_staleness = 0, or "oversample"'
            )
        if setting.order != "finished":
            raise self.refuse('lets groups be overtaken. Add rollout.order = "finished"')
        self._quantile = quantile
        self._lengths: deque[int] = deque(maxlen=window)
        """Longest answer of each group, in tokens, as groups were consumed: each once, whatever step it was in."""
        self._limit: int | None = None
        """Longest answer of a short step; None in a long one, and while little is known."""

    def begin(self, version: int) -> None:
        super().begin(version)
        is_known = len(self._lengths) >= 2 * self.setting.groups_per_step
        self._limit = None if self._rounds.is_late or not is_known else quantile_of(self._lengths, self._quantile)

    def wrap(self, draw: int, sampler: Sampler) -> Sampler:
        # Where all answers are suddenly longer than of late, a short step must not put off one after another.
        is_enough = self._rounds.num_waiting >= self.setting.groups_per_step
        return sampler if self._limit is None or is_enough else ShortSampler(sampler, self._limit)

    async def filled(self, taken: StepGroups, num_queued: int) -> None:
        self._lengths.extend(length for group in taken.everything if (length := _longest(group)))

    def metrics(self) -> dict[str, float]:
        limit = {} if self._limit is None else {"flow/tail_limit": float(self._limit)}
        return limit | super().metrics()

    def state(self) -> dict[str, Scalar | list[Scalar]]:
        return {**super().state(), "lengths": [*self._lengths]}

    def load_state(self, state: State) -> None:
        super().load_state(state)
        lengths = state["lengths"]
        assert isinstance(lengths, list), "a list of numbers"
        self._lengths.extend(int(length) for length in lengths)


def quantile_of(lengths: deque[int], quantile: float) -> int:
    """The length at rank ceil(n * quantile): that share of them is no longer."""
    return sorted(lengths)[math.ceil(len(lengths) * quantile) - 1]


def _longest(group: Group) -> int:
    """Longest answer to one request; 0: there is none."""
    everyone = (*group.trajectories, *(() if group.greedy is None else (group.greedy,)))
    return max((len(turn.completion.token_ids) for member in everyone for turn in member.turns), default=0)


class ShortSampler(WrappedSampler):
    """Another one, whose answers may not be longer than `limit`."""

    def __init__(self, sampler: Sampler, limit: int) -> None:
        super().__init__(sampler)
        self._limit = limit

    async def generate(self, request: Request) -> Completion:
        """Raises PutOff when the answer is not complete at the limit. One that the request itself cuts is complete."""
        if request.params.max_new_tokens <= self._limit:
            return await self._sampler.generate(request)
        asked = dataclasses.replace(request, params=dataclasses.replace(request.params, max_new_tokens=self._limit))
        completion = await self._sampler.generate(asked)
        require_as_asked(asked, completion)
        if completion.finish is Finish.LENGTH and len(completion.token_ids) >= self._limit:
            raise PutOff(f"request {request.id} is not complete after {self._limit} tokens")
        return completion if completion.params is None else dataclasses.replace(completion, params=request.params)
