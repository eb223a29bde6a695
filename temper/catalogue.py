"""Everything that a recipe or a suite can name: rewards, generators of tasks, environments.

Owns: the three lists, whole, and making what a table of a recipe asks for. Refuses: the things themselves; each has its
own file, and rewards and generators that come with an environment stand beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from temper.config import RewardConfig, SourceConfig, StageSource, part_names
from temper.envs.adapters.gymnasium import gymnasium
from temper.envs.adapters.reasoning_gym import ReasoningGymReward, reasoning_gym, reasoning_gym_mix
from temper.envs.adapters.textarena import textarena
from temper.envs.adapters.verifiers import VerifiersReward, verifiers
from temper.envs.env import ENVS
from temper.envs.library.calculator import arithmetic, arithmetic_demo
from temper.envs.library.countdown import CountdownReward, countdown
from temper.envs.library.files import files
from temper.envs.library.game import game
from temper.envs.library.problems import PROBLEMS
from temper.envs.library.repair import repair, repair_demo
from temper.envs.library.search import search, search_demo
from temper.envs.library.shop import shop, shop_demo
from temper.models.lora.materialize import whole
from temper.protocols import Reward
from temper.rewards import registry
from temper.rewards.composite import CompositeReward, Part
from temper.rewards.registry import RewardFactory, make_reward
from temper.rewards.workers.pool import WorkerPool
from temper.tasks import generators
from temper.tasks.dataset import TaskSource, read_file
from temper.tasks.generators import Generator, make_source
from temper.types import Scalar

REWARDS: Mapping[str, RewardFactory] = {
    **registry.REWARDS,
    "countdown": CountdownReward,
    "reasoning_gym": partial(ReasoningGymReward, WorkerPool),
    "verifiers": VerifiersReward,
}
GENERATORS: Mapping[str, Generator] = {
    **generators.GENERATORS,
    **PROBLEMS,
    "arithmetic": arithmetic,
    "arithmetic_demo": arithmetic_demo,
    "countdown": countdown,
    "files": files,
    "game": game,
    "gymnasium": gymnasium,
    "reasoning_gym": reasoning_gym,
    "reasoning_gym_mix": reasoning_gym_mix,
    "repair": repair,
    "repair_demo": repair_demo,
    "search": search,
    "search_demo": search_demo,
    "shop": shop,
    "shop_demo": shop_demo,
    "textarena": textarena,
    "verifiers": verifiers,
}
ENVIRONMENTS = ENVS


def reward_of(parts: Sequence[RewardConfig], sources: Iterable[StageSource] = ()) -> CompositeReward:
    """The reward that some [[reward]] tables describe together; `sources` may say which of them judge their tasks."""
    names = part_names(parts)
    judges = {source.label: chosen for source in sources if (chosen := [n for n in source.rewards if n in names])}
    return CompositeReward(
        [
            Part(
                make_reward(part.kind, _options(part), REWARDS), part.weight, part.gate, part.clip, part.optional, name
            )
            for name, part in zip(names, parts, strict=True)
        ],
        judges,
    )


def source_of(config: SourceConfig) -> TaskSource:
    """The tasks that a [[train]] or [heldout] table describes."""
    if config.path:
        path = Path(config.path).expanduser()
        return read_file(
            path, config.prompt_field, config.answer_field, config.answer_pattern, config.size, config.skip_bad
        )
    return make_source(config.generator, config.options, seed=config.seed, size=config.size, generators=GENERATORS)


def _options(part: RewardConfig) -> dict[str, Scalar | list[Scalar]]:
    """Rewards read whole models only."""
    path = part.options.get("path")
    if not isinstance(path, str) or not (folder := Path(path).expanduser()).is_dir():
        return part.options
    return {**part.options, "path": str(whole(folder))}


def _make(part: RewardConfig) -> Reward:
    return make_reward(part.kind, _options(part), REWARDS)
