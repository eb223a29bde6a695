"""Which rewards a recipe can name, and how a name with options becomes one.

Owns: the registry and the check of options. Refuses: rewards that live elsewhere; build.py passes them in.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping

from temper.errors import UserError, did_you_mean
from temper.protocols import RewardFn
from temper.rewards.math import MathReward
from temper.rewards.text import COMPARISONS, FormatReward, TextReward
from temper.rewards.user import UserReward
from temper.types import Scalar

RewardFactory = Callable[..., RewardFn]
"""Takes the options as keyword arguments."""

REWARDS: dict[str, RewardFactory] = {
    **{name: functools.partial(TextReward, name) for name in COMPARISONS},
    "format": FormatReward,
    "math": MathReward,
}


def make_reward(kind: str, options: Mapping[str, Scalar], rewards: Mapping[str, RewardFactory] = REWARDS) -> RewardFn:
    """The reward of that kind; "package.module:function" is one of the user's own."""
    if ":" in kind:
        _require_options(kind, UserReward, {"target": kind, **options})
        return UserReward(kind, **options)  # type: ignore[arg-type]  # checked above
    if kind not in rewards:
        known = ", ".join(sorted(rewards))
        raise UserError(
            f'reward "{kind}" is unknown.{did_you_mean(kind, rewards)} Known: {known}, or "package.module:function".'
        )
    _require_options(kind, rewards[kind], options)
    return rewards[kind](**options)


def _require_options(kind: str, factory: RewardFactory, options: Mapping[str, Scalar]) -> None:
    """Names, presence and types of the options, against the factory's signature."""
    parameters = inspect.signature(factory, eval_str=True).parameters
    for name, value in options.items():
        if name not in parameters:
            known = ", ".join(sorted(parameters)) or "none"
            raise UserError(
                f'reward "{kind}": option "{name}" is unknown.{did_you_mean(name, parameters)} Known: {known}.'
            )
        wanted = parameters[name].annotation
        is_right = isinstance(value, (int, float)) if wanted is float else isinstance(value, wanted)
        if not is_right or (isinstance(value, bool) and wanted is not bool):
            raise UserError(f'reward "{kind}": option {name}={value!r} must be of type {wanted.__name__}.')
    for name, parameter in parameters.items():
        if parameter.default is inspect.Parameter.empty and name not in options:
            raise UserError(f'reward "{kind}": option "{name}" is missing. Add options.{name} to this [[reward]].')
