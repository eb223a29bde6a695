"""Coefficients that follow a measurement."""

from __future__ import annotations

import dataclasses

import pytest

from temper.errors import UserError
from temper.objectives import control, resolve
from temper.objectives.policy.controllers import CONTROLLERS, adaptive_entropy, adaptive_kl, learned_length

ALL = [adaptive_kl(target=6.0), adaptive_entropy(target=0.5), learned_length(rate=0.1, initial=0.3)]


def kl_metrics(distance: float, count: float = 256.0) -> dict[str, float]:
    return {"policy/kl_ref_sequence": distance, "data/trained_trajectories": count}


def test_adaptive_kl_reproduces_the_worked_number() -> None:
    # beta 0.1, KL 8, target 6, n 256, horizon 10000 -> 0.100512; the scale multiplies the coefficient 0.1.
    state = adaptive_kl(target=6.0)({"kl": 1.0}, kl_metrics(8.0))
    assert 0.1 * state["kl"] == pytest.approx(0.100512, abs=1e-12)


def test_adaptive_kl_bounds_its_error_on_both_sides_and_rests_on_target() -> None:
    follow = adaptive_kl(target=6.0)
    assert follow({"kl": 2.0}, kl_metrics(1e9))["kl"] == pytest.approx(2 * (1 + 0.2 * 0.0256))
    assert follow({"kl": 2.0}, kl_metrics(0.0))["kl"] == pytest.approx(2 * (1 - 0.2 * 0.0256))
    assert follow({"kl": 2.0}, kl_metrics(6.0))["kl"] == 2.0


def test_adaptive_kl_may_steer_the_penalty_inside_the_reward() -> None:
    state = adaptive_kl(target=6.0, factor="kl_in_reward")({}, kl_metrics(8.0))
    assert state == pytest.approx({"kl_in_reward": 1.00512})


def test_adaptive_entropy_grows_while_entropy_is_low_and_applies_nothing_while_it_is_high() -> None:
    follow = adaptive_entropy(target=0.5)
    state = follow({}, {})
    assert state == {"entropy_bonus.coefficient": 0.0, "entropy_bonus": 0.0}
    applied, stored = [], []
    for entropy in (0.4, 0.5, 0.6, 0.4, 0.9, 0.9, 0.9, 0.9):
        state = follow(state, {"policy/entropy": entropy})
        applied.append(state["entropy_bonus"])
        stored.append(state["entropy_bonus.coefficient"])
    assert stored == pytest.approx([0.005, 0.010, 0.005, 0.010, 0.005, 0, 0, 0])
    assert applied == pytest.approx([0.005, 0.010, 0, 0.010, 0, 0, 0, 0])


def test_adaptive_entropy_stays_inside_its_bounds() -> None:
    follow = adaptive_entropy(target=0.5, step=0.3, low=0.1, high=0.5)
    state = follow({}, {})
    assert state["entropy_bonus.coefficient"] == 0.1
    for expected in (0.4, 0.5, 0.5):
        state = follow(state, {"policy/entropy": 0.0})
        assert state["entropy_bonus.coefficient"] == pytest.approx(expected)
    for expected in (0.2, 0.1):
        state = follow(state, {"policy/entropy": 1.0})
        assert state["entropy_bonus.coefficient"] == pytest.approx(expected)


def test_learned_length_descends_the_loss() -> None:
    follow = learned_length(rate=0.1, initial=0.3)
    assert follow({}, {}) == {"length_softmax": 0.3}
    assert follow({"length_softmax": 0.5}, {"loss/weight_slope": 2.0}) == pytest.approx({"length_softmax": 0.3})


@pytest.mark.parametrize("controller", ALL, ids=lambda controller: controller.name)
@pytest.mark.parametrize("missing", [{}, dict.fromkeys(["policy/entropy", "loss/weight_slope"], float("nan"))])
def test_a_step_without_its_metric_changes_nothing(controller, missing) -> None:
    start = controller({}, {})
    assert controller(start, missing) == start
    moved = {name: value + 0.25 for name, value in start.items()}
    assert controller(moved, missing) == moved


def test_control_joins_what_all_controllers_remember() -> None:
    objective = dataclasses.replace(resolve("grpo"), controllers=(adaptive_kl(6.0), adaptive_entropy(0.5)))
    start = control(objective, {}, {})
    assert start == {"kl": 1.0, "entropy_bonus.coefficient": 0.0, "entropy_bonus": 0.0}
    after = control(objective, start, kl_metrics(8.0) | {"policy/entropy": 0.1})
    assert after == pytest.approx({"kl": 1.00512, "entropy_bonus.coefficient": 0.005, "entropy_bonus": 0.005})


def test_impossible_settings_are_refused_and_doubts_declared() -> None:
    for build, settings, message in [
        (adaptive_kl, {"target": 0.0}, "target=0.0"),
        (adaptive_kl, {"target": 6.0, "horizon": 0}, "horizon=0"),
        (adaptive_kl, {"target": 6.0, "factor": "entropy_bonus"}, "no KL penalty"),
        (adaptive_entropy, {"target": -1.0}, "target=-1.0"),
        (adaptive_entropy, {"target": 0.2, "step": 0.0}, "step=0.0"),
        (adaptive_entropy, {"target": 0.2, "low": 1.0, "high": 0.5}, "must be ordered"),
        (learned_length, {"rate": 0.0}, "rate=0.0"),
    ]:
        with pytest.raises(UserError, match=message):
            build(**settings)
    assert [controller.name for controller in ALL if controller.experimental] == ["learned_length"]
    assert [controller.name for controller in ALL] == list(CONTROLLERS)
