"""A step as long as a KL bound allows: the natural gradient, scaled to the edge of the trust region.

Owns: the full step. Refuses: Fisher products and the line search (the trainer has the model). For small models.
Shapes: _P parameters of the model, laid end to end.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from temper.errors import BackendError
from temper.objectives.factor import factor, require
from temper.objectives.objective import ConstrainedStep, FisherProduct

ConstrainedStepFn = Callable[[FisherProduct, Tensor], Tensor]

TOLERANCE = 1e-6
"""Relative residual at which the system counts as solved; more is beyond float32."""


@factor()
def trpo(
    delta: float = 0.01, iterations: int = 10, damping: float = 0.1, backtrack: float = 0.8, tries: int = 10
) -> ConstrainedStepFn:
    """step = sqrt(2 delta / (s^T F s)) s with F s = g, g the gradient of the gain and F the Fisher matrix + damping I.

    The longest step whose quadratic KL(pi_old || pi) is delta. The line search then shrinks it by `backtrack`, at most
    `tries` times, until the gain grew and the measured KL is at most delta; else the step is rejected.
    Schulman et al. 2015, arXiv 1502.05477.
    """
    require(delta > 0, f"trpo: delta={delta} nats must be positive, e.g. 0.01")
    require(iterations >= 1 and tries >= 1, f"trpo: iterations={iterations} and tries={tries} must be at least 1")
    require(damping >= 0, f"trpo: damping={damping} must not be negative, e.g. 0.1")
    require(0 < backtrack < 1, f"trpo: backtrack={backtrack} must lie between 0 and 1, e.g. 0.8")

    def full_step(product: FisherProduct, gradient_P: Tensor) -> Tensor:
        def damped(vector_P: Tensor) -> Tensor:
            return product(vector_P) + damping * vector_P

        solution_P = conjugate_gradient(damped, gradient_P, iterations, TOLERANCE)
        if not solution_P.any():
            return solution_P
        curvature = _positive(solution_P @ damped(solution_P))
        return (2 * delta / curvature).sqrt() * solution_P

    return full_step


def conjugate_gradient(product: FisherProduct, gradient_P: Tensor, iterations: int, tolerance: float) -> Tensor:
    """s with F s = g, for a symmetric positive definite F that is known by its products. Hestenes and Stiefel 1952.

    Exact after as many iterations as F has distinct eigenvalues; stops when |F s - g| <= tolerance |g|.
    """
    solution_P, residual_P = torch.zeros_like(gradient_P), gradient_P.clone()
    direction_P, square = gradient_P.clone(), gradient_P @ gradient_P
    goal = square * tolerance**2
    for _ in range(iterations):
        if square <= goal:
            break
        product_P = product(direction_P)
        length = square / _positive(direction_P @ product_P)
        solution_P = solution_P + length * direction_P
        residual_P = residual_P - length * product_P
        previous, square = square, residual_P @ residual_P
        direction_P = residual_P + square / previous * direction_P
    return solution_P


def _positive(curvature: Tensor) -> Tensor:
    if curvature > 0 and curvature.isfinite():
        return curvature
    raise BackendError(
        f"trpo: the curvature along a step is {curvature.item()}, and a trust region needs a positive number: the "
        f"Fisher matrix is singular there, or the gradient is not finite. Use more damping, e.g. damping=0.1."
    )


CONSTRAINED_STEPS: dict[str, Callable[..., ConstrainedStep]] = {"trpo": trpo}
