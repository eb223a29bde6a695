"""Guarantee: what credit owes to the order in which turns stand is declared. Those of an agent stand in another."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from temper.objectives import Credit, advantages_of, resolve, targets_of
from temper.objectives.combinations import wants_time_order
from temper.objectives.objective import PolicyObjective
from temper.objectives.resolve import REGISTRY
from tests.objectives.test_partition import LARGE, built, with_factor

KINDS = ("advantage", "normalizers", "critic")
FACTORS = [
    (kind, name) for kind in KINDS for name in REGISTRY[kind] if "step_values" not in built(REGISTRY[kind][name]).needs
]
"""Those with step values are refused for agents: an episode cannot be taken back to a turn."""


def shuffled(credit: Credit) -> tuple[Credit, Tensor]:
    """The same trajectories with their tokens in another order, and where each token stood."""
    order, start = [], 0
    for length in credit.lengths.tolist():
        order += [start + place for place in random.Random(length).sample(range(length), length)]
        start += length
    places, total = torch.tensor(order), int(credit.lengths.sum())
    columns = {
        field.name: value[places]
        for field in dataclasses.fields(credit)
        if isinstance(value := getattr(credit, field.name), Tensor) and len(value) == total != len(credit.lengths)
    }
    return dataclasses.replace(credit, **columns), places


def depends_on_order(objective: Any, *, pays_tokens: bool = False) -> bool:
    credit = LARGE.credit if pays_tokens else dataclasses.replace(LARGE.credit, token_rewards=None)
    other, places = shuffled(credit)
    given, found = advantages_of(objective, credit), advantages_of(objective, other)
    targets, others = targets_of(objective, credit), targets_of(objective, other)
    is_same = torch.allclose(given.tokens[places], found.tokens, atol=1e-10, rtol=0)
    if targets is not None and others is not None:
        is_same = is_same and torch.allclose(targets[places], others, atol=1e-10, rtol=0)
    return not is_same


def alone(kind: str, factor: Any) -> Any:
    """An objective in which nothing else gives credit."""
    return dataclasses.replace(with_factor(kind, factor, base="reinforce"), shaping=())


@pytest.mark.parametrize(("kind", "name"), FACTORS)
def test_a_factor_declares_every_argument_by_which_it_depends_on_the_order_of_turns(kind: str, name: str) -> None:
    build, own = REGISTRY[kind][name], dict(built(REGISTRY[kind][name]).arguments)
    along = built(build).along
    still = build(**(own | dict(along)))
    assert not depends_on_order(alone(kind, still)), "with the values that it declares"
    assert wants_time_order(alone(kind, still)) == []
    for argument, neutral in along.items():
        changed = alone(kind, build(**(own | dict(along) | {argument: 1 if neutral == 0 else 0.3})))
        assert depends_on_order(changed), argument
        assert len(wants_time_order(changed)) == 1
    assert not depends_on_order(alone(kind, still), pays_tokens=True) or along


@pytest.mark.parametrize(
    ("preset", "words"),
    [
        ("ppo", ["gae with lam = 1, not 0.95", "gae_targets with lam = 1, not 0.95", "kl_in_reward"]),
        ("vapo", ["gae_by_length with alpha = inf, not 0.05"]),
        ("reinforce_pp", ["kl_in_reward"]),
        ("grpo", []),
        ("rloo", []),
        ("opd", []),
    ],
)
def test_what_a_preset_owes_to_the_order_of_turns_is_told_with_what_to_do(preset: str, words: list[str]) -> None:
    objective = resolve(preset)
    found = wants_time_order(objective)
    assert len(found) == len(words)
    assert all(word in said for word, said in zip(words, found, strict=True))
    assert isinstance(objective, PolicyObjective)


def test_a_discount_of_the_distance_from_a_teacher_is_told_wherever_it_stands() -> None:
    changes: dict[str, Any] = {"normalizers": [{"name": "add_distillation", "discount": 0.9}]}
    assert wants_time_order(resolve("dr_grpo", changes)) == ["add_distillation with discount = 0, not 0.9"]
