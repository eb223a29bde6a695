"""Which rewards a recipe can name, and how a name with options becomes one.

Owns: the registry and the check of options. Refuses: rewards that live elsewhere; build.py passes them in.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from temper.errors import UserError, did_you_mean
from temper.named import require_options
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
    where = f'reward "{kind}"'
    if ":" in kind:
        require_options(UserReward, {"target": kind, **options}, where=where)
        return UserReward(kind, **options)  # type: ignore[arg-type]  # checked above
    if kind not in rewards:
        known = ", ".join(sorted(rewards))
        raise UserError(
            f'{where} is unknown.{did_you_mean(kind, rewards)} Known: {known}, or "package.module:function".'
        )
    require_options(rewards[kind], options, where=where)
    return rewards[kind](**options)
