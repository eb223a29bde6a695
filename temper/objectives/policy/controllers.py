"""Coefficients that follow a measurement: after every step, a few numbers and its metrics give the next numbers.

Owns: the rules and their start. Refuses: storage (a run checkpoints the state) and metrics (policy/measures.py).
A metric that is missing, as after a step without tokens, or not finite leaves the numbers as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from temper.objectives.factor import factor, require
from temper.objectives.objective import Controller, State

ControllerFn = Callable[[State, State], State]


@factor(needs=("reference",))
def adaptive_kl(target: float, horizon: int = 10_000, factor: str = "kl") -> ControllerFn:
    """scale <- scale (1 + clip(KL / target - 1, -0.2, 0.2) n / horizon): steers a KL penalty towards `target` nats.

    `factor` names the penalty, "kl" or "kl_in_reward"; its coefficient is multiplied by scale, which starts at 1.
    KL = mean over trajectories of their summed log pi - log ref, n = trajectories trained in the step.
    Ziegler et al. 2019; verl, TRL.
    """
    require(target > 0, f"adaptive_kl: target={target} nats per trajectory must be positive, e.g. 6.0")
    require(horizon > 0, f"adaptive_kl: horizon={horizon} trajectories must be positive, e.g. 10000")
    penalties = ("kl", "kl_in_reward")
    require(factor in penalties, f'adaptive_kl: factor="{factor}" is no KL penalty. Use one of {", ".join(penalties)}.')

    def follow(state: State, metrics: State) -> State:
        scale = state.get(factor, 1.0)
        distance, count = (_measured(metrics, name) for name in ("policy/kl_ref_sequence", "data/trained_trajectories"))
        if distance is None or count is None:
            return {factor: scale}
        error = min(max(distance / target - 1, -0.2), 0.2)
        return {factor: scale * (1 + error * count / horizon)}

    return follow


@factor(needs=("entropy",))
def adaptive_entropy(target: float, step: float = 0.005, low: float = 0.0, high: float = 1.0) -> ControllerFn:
    """c <- clip(c + step, low, high) when the mean entropy H <= target, else clip(c - step, low, high); the next step
    applies c only if H <= target, else 0: an entropy bonus that is there only when it is needed.

    Scales entropy_bonus(coefficient=1.0). c starts at `low` and nothing is applied before the first measurement.
    Skywork-OR1, arXiv 2505.22312; TRL.
    """
    require(target > 0, f"adaptive_entropy: target={target} nats must be positive, e.g. 0.2")
    require(step > 0, f"adaptive_entropy: step={step} must be positive, e.g. 0.005")
    require(0 <= low <= high, f"adaptive_entropy: {low} to {high} must be ordered and not negative, e.g. 0.0 to 1.0")
    coefficient_key, applied_key = "entropy_bonus.coefficient", "entropy_bonus"

    def follow(state: State, metrics: State) -> State:
        coefficient = state.get(coefficient_key, low)
        entropy = _measured(metrics, "policy/entropy")
        if entropy is None:
            return {coefficient_key: coefficient, applied_key: state.get(applied_key, 0.0)}
        is_low = entropy <= target
        coefficient = min(max(coefficient + (step if is_low else -step), low), high)
        return {coefficient_key: coefficient, applied_key: coefficient if is_low else 0.0}

    return follow


@factor(experimental="gradient, learning rate and sign convention of lambda are not public; here it descends the loss")
def learned_length(rate: float, initial: float = 0.0) -> ControllerFn:
    """lambda <- lambda - rate dL/dlambda: learns the length preference of the weighting length_softmax with the model.

    0 weighs as DAPO does, more than 0 favours long answers, less than 0 short ones. lambda-GRPO,
    arXiv 2510.06870.
    """
    require(rate > 0, f"learned_length: rate={rate} must be positive, e.g. 0.01")

    def follow(state: State, metrics: State) -> State:
        preference = state.get("length_softmax", initial)
        slope = _measured(metrics, "loss/weight_slope")
        return {"length_softmax": preference if slope is None else preference - rate * slope}

    return follow


def _measured(metrics: State, name: str) -> float | None:
    value = metrics.get(name)
    return value if value is not None and math.isfinite(value) else None


CONTROLLERS: dict[str, Callable[..., Controller]] = {
    "adaptive_kl": adaptive_kl,
    "adaptive_entropy": adaptive_entropy,
    "learned_length": learned_length,
}
