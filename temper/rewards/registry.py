"""Which rewards a recipe can name, and how a name with options becomes one.

Owns: the registry and the check of options. Refuses: rewards that live elsewhere (catalogue.py lists
them all).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from temper.errors import UserError, did_you_mean
from temper.plugins import require_options
from temper.protocols import Reward
from temper.rewards.code.code import CodeReward
from temper.rewards.env import EnvReward
from temper.rewards.form.format import FormatReward, JsonSchemaReward, TagsReward
from temper.rewards.form.instructions import InstructionReward
from temper.rewards.form.language import LanguageReward
from temper.rewards.form.length import LengthReward
from temper.rewards.form.repetition import RepetitionReward
from temper.rewards.form.text import COMPARISONS, TextReward
from temper.rewards.judges.criteria import RubricReward
from temper.rewards.judges.evolving import EvolvingRubricReward
from temper.rewards.judges.judge import JudgeReward, PairwiseReward
from temper.rewards.learned.discriminator import DiscriminatorReward
from temper.rewards.learned.model import RewardModelReward
from temper.rewards.learned.process import ProcessReward
from temper.rewards.mathematics.math import MathReward
from temper.rewards.user import UserReward
from temper.types import Scalar

RewardFactory = Callable[..., Reward]
"""Takes the options as keyword arguments."""

REWARDS: dict[str, RewardFactory] = {
    **{name: functools.partial(TextReward, name) for name in COMPARISONS},
    "code": CodeReward,
    "env": EnvReward,
    "evolving_rubric": EvolvingRubricReward,
    "format": FormatReward,
    "ifeval": InstructionReward,
    "json_schema": JsonSchemaReward,
    "judge": JudgeReward,
    "language": LanguageReward,
    "length": LengthReward,
    "math": MathReward,
    "pairwise": PairwiseReward,
    "discriminator": DiscriminatorReward,
    "process": ProcessReward,
    "repetition": RepetitionReward,
    "reward_model": RewardModelReward,
    "rubric": RubricReward,
    "tags": TagsReward,
}


def make_reward(
    kind: str, options: Mapping[str, Scalar | list[Scalar]], rewards: Mapping[str, RewardFactory] = REWARDS
) -> Reward:
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
