"""Agents that only know HTTP: their endpoint over the run's own sampler.

Owns: what such an agent is wired to, and which stages cannot have one. Refuses: running them (rollout/agents.py).
"""

from __future__ import annotations

from temper.config import RunConfig
from temper.envs.agents.agent import NAME, AgentEnv
from temper.envs.agents.launch import Nursery
from temper.envs.env import find_env
from temper.errors import UserError
from temper.rollout.agents import AgentPlayer
from temper.rollout.episode import TURN_LOOP, Player
from temper.serve.agents import AgentEndpoint
from temper.serve.conversation import Conversations
from temper.stages.kinds import kind_of
from temper.stages.reading.data import StageData


def check_agent(config: RunConfig) -> None:
    """Raises UserError for what an agent cannot do."""
    if config.env.name != NAME:
        return
    find_env(NAME, config.env.options)()
    if config.rollout.max_turns == 1:
        raise UserError(
            'env "agent": rollout.max_turns is the number of calls that an agent may make in an episode, and it is 1. '
            "Say how many, e.g. rollout.max_turns = 8"
        )
    if kind_of(config).leaves == "rows":
        raise UserError(
            f'env "agent" cannot play in a stage of kind {config.stage}: an agent leads conversations of its own, and '
            "rows of text hold one. Use a stage that trains on what was drawn, e.g. rl"
        )


def may_stop_at_text(config: RunConfig) -> bool:
    """Whether requests may have stop texts: the recipe's, or those of an agent."""
    return bool(config.sampling.stop) or config.env.name == NAME


def make_player(config: RunConfig, data: StageData) -> Player:
    """Who leads the episodes of a stage."""
    if config.env.name != NAME:
        return TURN_LOOP
    env = find_env(NAME, config.env.options)()
    assert isinstance(env, AgentEnv), "a recipe cannot replace it"
    settings = env.settings
    endpoint = AgentEndpoint(
        lambda records: Conversations(data.tokenizer, data.renderer, records, settings.untold_format),
        model=settings.model,
        max_length=data.shape.max_context,
        has_socket=settings.is_sandboxed,
    )
    return AgentPlayer(endpoint, Nursery(settings), max_running=settings.max_running)
