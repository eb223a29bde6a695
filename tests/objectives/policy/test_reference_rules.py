"""When the reference follows the policy."""

from __future__ import annotations

import pytest

from temper.errors import UserError
from temper.objectives.objective import Moment, Refresh
from temper.objectives.policy.reference_rules import REFERENCE_RULES, reset, soft_update

RESET = Refresh(mix=1.0, resets_optimizer=True)


def moves(rule, steps: int, stalled: int = 0) -> list[int]:
    """The steps after which the reference moves."""
    return [step for step in range(steps) if rule(Moment(step=step, stalled_evaluations=stalled)) is not None]


def test_reset_every_n_steps_copies_the_policy_and_resets_the_optimiser() -> None:
    assert moves(reset(every=3), 10) == [3, 6, 9]
    assert reset(every=3)(Moment(step=3, stalled_evaluations=0)) == RESET


def test_reset_after_a_stall() -> None:
    rule = reset(patience=2)
    assert [rule(Moment(step=7, stalled_evaluations=count)) for count in (0, 1, 2, 3)] == [None, None, RESET, RESET]


def test_reset_by_either_condition() -> None:
    rule = reset(every=5, patience=2)
    assert moves(rule, 11) == [5, 10]
    assert moves(rule, 3, stalled=2) == [0, 1, 2]


def test_soft_update_mixes_and_keeps_the_optimiser() -> None:
    assert moves(soft_update(every=4), 9) == [4, 8]
    assert moves(soft_update(every=4), 9, stalled=100) == [4, 8]
    assert soft_update()(Moment(step=512, stalled_evaluations=0)) == Refresh(mix=0.6, resets_optimizer=False)
    assert moves(soft_update(), 512) == []


def test_rules_need_a_reference_and_refuse_to_do_nothing() -> None:
    assert all(build(every=1).needs == {"reference"} for build in REFERENCE_RULES.values())
    with pytest.raises(UserError, match="one must be set"):
        reset()
    with pytest.raises(UserError, match="patience=-1"):
        reset(every=3, patience=-1)
    with pytest.raises(UserError, match=r"mix=0\.0"):
        soft_update(mix=0.0)
    with pytest.raises(UserError, match="every=0"):
        soft_update(every=0)
