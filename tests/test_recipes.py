"""Every recipe in the repository is one that Temper accepts: keys, objective, environment, rewards, tasks."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from temper.build import check_stages
from temper.catalogue import source_of
from temper.config import load_recipe
from temper.envs.env import find_env
from temper.rewards.registry import REWARDS, make_reward

RECIPES = sorted((Path(__file__).parent.parent / "recipes").rglob("*.toml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_accepted(path: Path) -> None:
    stages = load_recipe(path)
    check_stages(stages)
    for config in stages:
        for source in (*config.train, *config.heldout):
            if source.path or source.options.get("path"):
                continue  # the user's own file
            task = source_of(source).task(0)
            find_env(config.env.name or task.env, config.env.options)
        for part in config.reward:
            if part.kind in REWARDS:
                asyncio.run(make_reward(part.kind, part.options).close())
