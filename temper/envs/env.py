"""Which environments a recipe or a task can name.

Owns: the registry, and finding a user's own. Refuses: anything an environment does; each has its own file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from temper.envs.adapters.gymnasium import GymnasiumEnv
from temper.envs.adapters.mcp import McpEnv
from temper.envs.adapters.openenv import OpenEnv
from temper.envs.adapters.textarena import TextArenaEnv
from temper.envs.adapters.verifiers import VerifiersEnv
from temper.envs.agents.agent import AgentEnv
from temper.envs.library.calculator import Calculator
from temper.envs.library.files import FilesEnv
from temper.envs.library.game import Game
from temper.envs.library.python_tool import Python
from temper.envs.library.search import SearchEnv
from temper.envs.library.shell import ShellEnv
from temper.envs.library.shop import ShopEnv
from temper.envs.single_turn import SingleTurn
from temper.envs.tool_env import NO_COST
from temper.errors import UserError, did_you_mean
from temper.plugins import load_function, require_options
from temper.protocols import Charges, Env, HasTools
from temper.types import Scalar

EnvFactory = Callable[..., Env]
"""Makes a fresh environment for one episode; takes the recipe's env.options as keyword arguments."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """What a recipe's env.allow says."""

    names: tuple[str, ...]
    must_exist: bool
    """Whether all environments have these tools: the recipe names one environment, not each task its own."""


ENVS: dict[str, EnvFactory] = {
    "agent": AgentEnv,
    "calculator": Calculator,
    "files": FilesEnv,
    "game": Game,
    "gymnasium": GymnasiumEnv,
    "mcp": McpEnv,
    "openenv": OpenEnv,
    "python": Python,
    "search": SearchEnv,
    "shell": ShellEnv,
    "shop": ShopEnv,
    "single_turn": SingleTurn,
    "textarena": TextArenaEnv,
    "verifiers": VerifiersEnv,
}


def find_env(
    name: str,
    options: Mapping[str, Scalar | list[Scalar]] | None = None,
    envs: Mapping[str, EnvFactory] = ENVS,
    allowed: Allowed | None = None,
) -> Callable[[], Env]:
    """What makes environments of this name; "package.module:Class" is a user's own. Options are checked now."""
    where, options = f'env "{name}"', options or {}
    if ":" in name:
        factory: EnvFactory = load_function(name, where=where)
    elif name in envs:
        factory = envs[name]
    else:
        known = ", ".join(sorted(envs))
        raise UserError(f'{where} is unknown.{did_you_mean(name, envs)} Known: {known}, or "package.module:Class".')
    require_options(factory, options, where=where)
    make = partial(factory, **options)
    return partial(_allowing, make, allowed, where) if allowed and allowed.names else make


def _allowing(make: Callable[[], Env], allowed: Allowed, where: str) -> Env:
    env = make()
    if isinstance(env, HasTools):
        env.allow(allowed.names, must_exist=allowed.must_exist)
    elif allowed.must_exist:
        raise UserError(f"{where} has no tools of Temper's, so env.allow says nothing to it. Leave env.allow out")
    return env


def limit_cost(env: Env, most: float) -> Env:
    """The environment, told what its episode may cost; 0: it has no limit."""
    if most and not isinstance(env, Charges):
        raise UserError(f"rollout.max_episode_cost={most:g}: nothing in {type(env).__name__} has a cost. {NO_COST}")
    if most:
        assert isinstance(env, Charges), "just looked"
        env.limit_cost(most)
    return env


def make_env(name: str) -> Env:
    """An environment without options."""
    return find_env(name)()
