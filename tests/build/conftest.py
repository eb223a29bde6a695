"""A stage of the tiny recipe, opened, and workloads of larger models."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from temper.build.check import check_stage
from temper.build.models import first_model
from temper.config import RunConfig, resolve, to_toml
from temper.stages.kinds import kind_of
from temper.stages.reading.data import StageData, open_data
from tests.planning.conftest import make_workload

__all__ = ["make_workload"]


@pytest.fixture
def config(tiny_recipe: dict[str, Any]) -> RunConfig:
    return resolve({**tiny_recipe, "stage": tiny_recipe["stage"][1:]}, [], where="tiny")[0]


@pytest.fixture
def opened(config: RunConfig, tmp_path: Path) -> Callable[[RunConfig], tuple[Any, StageData, Path]]:
    def open_one(changed: RunConfig) -> tuple[Any, StageData, Path]:
        folder, objective = first_model(changed, tmp_path), check_stage(changed)
        return objective, open_data(changed, objective, kind_of(changed).reading, folder), folder

    return open_one


def with_keys(config: RunConfig, *overrides: str) -> RunConfig:
    return resolve(tomllib.loads(to_toml([config])), overrides, where="test")[0]
