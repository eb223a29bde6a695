from __future__ import annotations

import asyncio

import pytest

from temper.envs.env import make_env
from temper.envs.single_turn import SingleTurn
from temper.errors import UserError


def test_environments_are_fresh_and_unknown_names_get_a_suggestion() -> None:
    assert isinstance(make_env("single_turn"), SingleTurn)
    assert make_env("single_turn") is not make_env("single_turn")
    with pytest.raises(UserError, match='Did you mean "single_turn"'):
        make_env("singleturn")
    assert asyncio.run(make_env("single_turn").close()) is None
