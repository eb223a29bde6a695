"""Episodes whose environment asks a model of this run by itself, as a judge or to play a user.

Owns: an endpoint for each of them, and that nothing drawn there is trained. Refuses: HTTP (serve/agents.py), and
deciding what may be asked (the environment's adapter).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from temper.envs.adapters.verifiers_models import AskLimits
from temper.protocols import Env, Sampler
from temper.rollout.agents import AgentDoor, EpisodeCalls
from temper.rollout.episode import TURN_LOOP, EpisodeSetup, Played
from temper.types import Status, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeModel:
    """A model that answers environments, and is not the policy."""

    sampler: Sampler
    stop_ids: tuple[int, ...]


class JudgedPlayer:
    """Implements episode.Player: the turn loop, and beside it an endpoint that this episode's environment asks.

    What it is told there is drawn greedily. It is nobody's turn, so it is in no row that is trained.
    """

    def __init__(
        self,
        door: AgentDoor,
        limits: AskLimits,
        serve: Callable[[Env, Mapping[str, str]], Env],
        model: JudgeModel | None = None,
    ) -> None:
        """serve: tells an environment where it may ask, by the variables that agents are told. model: who answers;
        None: the policy."""
        self._door = door
        self._limits = limits
        self._serve = serve
        self._model = model

    def place(self) -> AbstractAsyncContextManager[object]:
        return TURN_LOOP.place()

    async def play(self, setup: EpisodeSetup, task: Task, played: Played, request_id: str) -> Status:
        calls = EpisodeCalls(self._judging(setup), f"{request_id}/judge")
        key, variables = await self._door.open(calls)
        served = dataclasses.replace(setup, make_env=lambda name: self._serve(setup.make_env(name), variables))
        try:
            return await TURN_LOOP.play(served, task, played, request_id)
        finally:
            await self._door.shut(key)
            if calls.broken.done():  # of the sampler, which no episode survives, whatever its environment made of it
                raise calls.broken.result()

    async def close(self) -> None:
        await self._door.close()
        if self._model is not None:
            await self._model.sampler.close()

    def _judging(self, setup: EpisodeSetup) -> EpisodeSetup:
        params = dataclasses.replace(setup.params.greedy(), max_new_tokens=self._limits.max_tokens, stop=())
        sampler = setup.sampler
        if self._model is not None:
            params, sampler = dataclasses.replace(params, stop_ids=self._model.stop_ids), self._model.sampler
        return dataclasses.replace(
            setup,
            sampler=sampler,
            params=params,
            max_turns=self._limits.max_calls,
            max_episode_tokens=self._limits.max_episode_tokens,
            thinking=None,
        )
