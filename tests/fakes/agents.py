"""Episodes of agents over a sampler that says what it is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from temper.envs.agents.agent import AgentEnv
from temper.envs.agents.launch import Nursery
from temper.envs.agents.service import AgentService
from temper.rollout.agents import AgentPlayer
from temper.rollout.episode import EpisodeSetup, run_episode
from temper.serve.agents import AgentEndpoint
from temper.serve.conversation import Conversations
from temper.tasks.render import Renderer
from temper.types import SamplingParams, Score, Task, Trajectory
from tests.fakes.episodes import FakeScorer
from tests.fakes.sampler import FakeSampler

CONTEXT = 512


class RightAnswer(FakeScorer):
    """Pays for a result that is the gold answer."""

    async def score(self, task: Task, trajectory: Trajectory) -> tuple[Score, Mapping[str, Score]]:
        return Score.of(float(trajectory.text == task.answer)), {}


def play_agent(
    task: Task,
    sampler: FakeSampler,
    tokenizer: Any,
    options: Mapping[str, Any],
    *,
    seconds: float = 30.0,
    max_new_tokens: int = 80,
    scorer: Any = None,
    affordable_tokens: int = 0,
    afterwards: Callable[[], object] = lambda: None,
    **limits: Any,
) -> Trajectory:
    """One episode, through a real endpoint and a real process or service. options: of env "agent"; afterwards: done
    while the endpoint still stands; limits: of EpisodeSetup."""

    async def main() -> Trajectory:
        settings, renderer = AgentEnv(**options).settings, Renderer(tokenizer)
        endpoint = AgentEndpoint(
            lambda records: Conversations(tokenizer, renderer, records, settings.untold_format),
            (settings.addresses.host, settings.addresses.port),
            model="",
            max_length=CONTEXT,
            address=settings.addresses.told,
        )
        service = settings.addresses.service
        runner = AgentService(service, settings.service_key) if service is not None else Nursery(settings)
        player = AgentPlayer(endpoint, runner, max_running=2, affordable_tokens=affordable_tokens)
        setup = EpisodeSetup(
            sampler=sampler,
            renderer=renderer,
            scorer=scorer or RightAnswer(),
            make_env=lambda name: pytest.fail("an agent needs no environment"),
            params=SamplingParams(temperature=0.7, max_new_tokens=max_new_tokens, stop_ids=renderer.stop_ids),
            episode_seconds=seconds,
            seed=0,
            player=player,
            **{"max_turns": 8, **limits},
        )
        try:
            played = await run_episode(setup, task, group_id="g", index=0, request_id="r")
            await asyncio.to_thread(afterwards)
            return played
        finally:
            await player.close()

    return asyncio.run(main())
