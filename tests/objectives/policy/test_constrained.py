"""The full step of TRPO."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from temper.errors import BackendError, UserError
from temper.objectives.policy.constrained import conjugate_gradient, trpo


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def random_system(size: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(size, size, generator=generator, dtype=torch.float64)
    return root @ root.T + torch.eye(size, dtype=torch.float64), torch.randn(size, generator=generator).double()


def test_conjugate_gradient_solves_the_worked_system() -> None:
    solution = conjugate_gradient(lambda v: vector(2, 1) * v, vector(1, 1), iterations=10, tolerance=1e-10)
    assert solution.tolist() == pytest.approx([0.5, 1.0])


def test_conjugate_gradient_is_exact_after_as_many_iterations_as_dimensions() -> None:
    fisher, gradient = random_system()
    exact = torch.linalg.solve(fisher, gradient)
    few = conjugate_gradient(lambda v: fisher @ v, gradient, iterations=3, tolerance=0.0)
    full = conjugate_gradient(lambda v: fisher @ v, gradient, iterations=8, tolerance=0.0)
    assert torch.allclose(full, exact, atol=1e-9)
    assert not torch.allclose(few, exact, atol=1e-3)


def test_conjugate_gradient_stops_at_its_tolerance() -> None:
    calls = []

    def product(v: Tensor) -> Tensor:
        calls.append(1)
        return 3.0 * v  # one eigenvalue: solved after one product

    conjugate_gradient(product, vector(1, 2, 3), iterations=10, tolerance=1e-10)
    assert len(calls) == 1


def test_the_full_step_of_the_worked_example() -> None:
    step = trpo(damping=0.0)(lambda v: vector(2, 1) * v, vector(1, 1))
    assert step.tolist() == pytest.approx([0.057735, 0.115470], abs=1e-6)
    assert (0.5 * (step * vector(2, 1) * step).sum()).item() == pytest.approx(0.01)


def test_a_step_scaled_by_the_gradient_alone_would_be_noticed() -> None:
    # The bug: sqrt(2 delta / (g^T s)) is the same number, sqrt(2 delta / (g^T g)) is not, nor is its direction.
    gradient, fisher = vector(1, 1), vector(2, 1)
    wrong = (0.02 / (gradient @ gradient)).sqrt() * gradient
    assert (0.5 * (wrong * fisher * wrong).sum()).item() != pytest.approx(0.01, rel=0.1)


def test_damping_belongs_to_the_matrix_and_to_the_scale() -> None:
    fisher, gradient = random_system()
    step = trpo(delta=0.02, damping=0.5, iterations=20)(lambda v: fisher @ v, gradient)
    damped = fisher + 0.5 * torch.eye(8, dtype=torch.float64)
    solution = torch.linalg.solve(damped, gradient)
    expected = (0.04 / (solution @ damped @ solution)).sqrt() * solution
    assert torch.allclose(step, expected, atol=1e-7)
    assert 0.5 * step @ fisher @ step < 0.02


def test_the_step_does_not_depend_on_the_scale_of_the_gradient() -> None:
    fisher, gradient = random_system()
    first, second = (trpo()(lambda v: fisher @ v, scale * gradient) for scale in (1.0, 1e-6))
    assert torch.allclose(first, second)


def test_no_gradient_no_step() -> None:
    assert trpo()(lambda v: v, torch.zeros(3)).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("curvature", [0.0, -1.0, float("nan"), float("inf")])
def test_a_matrix_that_is_not_positive_is_refused(curvature) -> None:
    with pytest.raises(BackendError, match="curvature along a step"):
        trpo(damping=0.0)(lambda v: curvature * v, vector(1, 1))


def test_damping_rescues_a_singular_matrix() -> None:
    step = trpo(damping=0.1)(lambda v: vector(1, 0) * v, vector(0, 1))
    assert step.isfinite().all()
    assert step[1] > 0


def test_settings_are_kept_for_the_line_search_and_checked() -> None:
    assert (trpo().argument("delta"), trpo().argument("backtrack"), trpo().argument("tries")) == (0.01, 0.8, 10)
    for settings, message in [
        ({"delta": 0.0}, "delta=0.0"),
        ({"iterations": 0}, "iterations=0"),
        ({"damping": -0.1}, "damping=-0.1"),
        ({"backtrack": 1.0}, "backtrack=1.0"),
    ]:
        with pytest.raises(UserError, match=message):
            trpo(**settings)
