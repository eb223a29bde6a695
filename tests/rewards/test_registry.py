from __future__ import annotations

from typing import Any

import pytest

from temper.errors import UserError
from temper.rewards.form.text import TextReward
from temper.rewards.registry import REWARDS, make_reward
from temper.sandbox import require_sandbox

NEEDED: dict[str, dict[str, Any]] = {
    "format": {"pattern": "x"},
    "json_schema": {"schema": "true"},
    "length": {"high": 9},
    **{kind: {"base_url": "http://127.0.0.1:1/v1", "model": "m"} for kind in ("judge", "pairwise", "process")},
    **{
        kind: {"base_url": "http://127.0.0.1:1/v1", "model": "m", "items": ["is polite"]}
        for kind in ("rubric", "evolving_rubric")
    },
}


@pytest.mark.parametrize("kind", sorted(REWARDS.keys() - {"reward_model", "discriminator"}))  # which need weights
def test_every_kind_can_be_made_and_carries_its_name(kind: str) -> None:
    if kind == "math":
        pytest.importorskip("math_verify")
    if kind == "code":
        try:
            require_sandbox()
        except UserError as error:
            pytest.skip(str(error))
    assert make_reward(kind, NEEDED.get(kind, {})).name == kind


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("exat", {}, 'Did you mean "exact"'),
        ("exact", {"ignore_cases": True}, 'Did you mean "ignore_case"'),
        ("exact", {"ignore_case": "yes"}, "must be of type bool"),
        ("format", {}, 'option "pattern" is missing'),
        ("length", {}, 'option "high" is missing'),
        ("format", {"pattern": "x", "workers": True}, "must be of type int"),
        ("format", {"pattern": "x", "deadline_seconds": "soon"}, "must be of type float"),
    ],
)
def test_mistakes_are_named(kind: str, options: dict[str, str | bool], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_reward(kind, options)


def test_rewards_from_elsewhere_are_passed_in() -> None:
    rewards = {**REWARDS, "other": lambda: TextReward("exact")}
    assert make_reward("other", {}, rewards).name == "exact"


def test_a_users_function_takes_worker_options(misbehaving: str) -> None:
    assert make_reward(f"{misbehaving}:reward", {"deadline_seconds": 1}).name == "reward"
    with pytest.raises(UserError, match='Did you mean "deadline_seconds"'):
        make_reward(f"{misbehaving}:reward", {"deadline": 1.0})
