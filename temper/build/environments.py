"""Where the environments of a stage or a suite are made: in this process, or in workers.

Owns: what a recipe's [env] becomes, and what cannot be placed elsewhere. Refuses: playing (rollout/episode.py).
"""

from __future__ import annotations

from functools import cache

from temper.config import RunConfig
from temper.config.sections import EnvConfig
from temper.envs.agents.agent import NAME as AGENT
from temper.envs.env import ENVS, Allowed, find_env, limit_cost
from temper.envs.processes.pool import EnvProcesses
from temper.errors import UserError
from temper.plugins import UNNAMED
from temper.protocols import Env


class Environments:
    """Makes fresh environments by name: the recipe's, or those that tasks name. Each kind is looked up once."""

    def __init__(self, config: EnvConfig, *, max_cost: float = 0.0) -> None:
        """max_cost: what an episode may cost; 0: no limit."""
        check_place(config)
        self._name = config.name
        self._max_cost = max_cost
        allowed = Allowed(tuple(config.allow), must_exist=bool(config.name))
        self._find = cache(lambda name: find_env(name, config.options, allowed=allowed))
        self._processes: EnvProcesses | None = None
        if config.place == "process":
            self._processes = EnvProcesses(
                config.options,
                num_workers=config.workers,
                seconds=config.call_seconds,
                allowed=allowed,
                max_cost=max_cost,
            )

    def __call__(self, name: str) -> Env:
        name = self._name or name
        make = self._find(name)  # also for workers: a wrong name or option is said here
        return limit_cost(make(), self._max_cost) if self._processes is None else self._processes(name)

    async def close(self) -> None:
        """Ends the workers. What nobody closes ends with the event loop."""
        if self._processes is not None:
            await self._processes.close()


def check_cost(config: RunConfig) -> None:
    """Raises UserError for a bound of cost where nothing costs. What tools cost that are made for each episode shows
    when one begins."""
    most, name = config.rollout.max_episode_cost, config.env.name
    if not most or name == AGENT:
        return
    if name in ("", *ENVS):
        raise UserError(
            f'rollout.max_episode_cost={most:g}: nothing in env "{name or "single_turn"}" has a cost. Name an '
            "environment of your own whose tools have one, e.g. @tool(cost=0.5), or leave it out"
        )
    limit_cost(find_env(name, config.env.options)(), most)


def check_place(config: EnvConfig) -> None:
    """Raises UserError for an environment that no other process can make."""
    if config.place == "here":
        return
    if config.name == AGENT:
        raise UserError('env.place = "process": an agent has processes of its own. Leave env.place out')
    if config.name.startswith(UNNAMED):
        raise UserError(
            f'env.place = "process": {config.name.removeprefix(UNNAMED)} was handed over in Python and stands in no '
            'file, so no other process can make it. Put it into a file, or use env.place = "here"'
        )
