"""What a recipe says about limits reaches the credit that is given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from temper.build import resolve_objective
from temper.config import resolve
from temper.stages.sampling import credit_rules


def test_limits_of_turns_and_of_episodes_reach_credit() -> None:
    table: dict[str, Any] = {
        "model": {"new": {}},
        "train": [{"generator": "spell_backward"}],
        "reward": [{"kind": "edit"}],
        "sampling": {"max_new_tokens": 7},
        "rollout": {"max_turns": 3, "max_episode_tokens": 15},
    }
    (config,) = resolve(table, [], where="test")
    data = cast(Any, SimpleNamespace(rubric=SimpleNamespace(weights={"edit": 1.0})))
    rules = credit_rules(config, resolve_objective(config), data)
    assert (rules.max_new_tokens, rules.max_episode_tokens) == (7, 15)
    assert rules.part_weights == {"edit": 1.0}
