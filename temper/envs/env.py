"""Which environments a task can name.

Owns: the registry. Refuses: anything an environment does; each has its own file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from temper.envs.single_turn import SingleTurn
from temper.errors import UserError, did_you_mean
from temper.protocols import Env

EnvFactory = Callable[[], Env]
"""Makes a fresh environment for one episode."""

ENVS: dict[str, EnvFactory] = {"single_turn": SingleTurn}


def make_env(name: str, envs: Mapping[str, EnvFactory] = ENVS) -> Env:
    if name not in envs:
        raise UserError(f'env "{name}" is unknown.{did_you_mean(name, envs)} Known: {", ".join(sorted(envs))}.')
    return envs[name]()
