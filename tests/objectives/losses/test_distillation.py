"""Worked numbers on F4: student (.5, .3, .2), teacher (.2, .5, .3); and the bound of best-of-n."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from temper.errors import UserError
from temper.objectives import MetricSums
from temper.objectives.losses.distillation import distillation_loss, gkd, top_k_forward_kl


def logits(*probabilities: float) -> Tensor:
    return torch.tensor([probabilities], dtype=torch.float64).log() + 2.0


STUDENT, TEACHER = (0.5, 0.3, 0.2), (0.2, 0.5, 0.3)


@pytest.mark.parametrize(("beta", "expected"), [(0.0, 0.193794), (1.0, 0.223805), (0.5, 0.050875), (0.1, 0.017563)])
def test_divergences_are_those_worked_out_by_hand(beta: float, expected: float) -> None:
    value = gkd(logits(*STUDENT), logits(*TEACHER), beta=beta, temperature=1.0)
    assert value.tolist() == pytest.approx([expected], abs=1e-6)


def test_the_worked_numbers_reject_student_and_teacher_swapped() -> None:
    for beta, expected in ((0.0, 0.193794), (1.0, 0.223805), (0.1, 0.017563)):
        swapped = gkd(logits(*TEACHER), logits(*STUDENT), beta=beta, temperature=1.0).item()
        assert abs(swapped - expected) > 1e-4


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
def test_only_the_student_gets_a_gradient_and_it_is_the_right_one(beta: float) -> None:
    student, teacher = logits(*STUDENT).requires_grad_(), logits(*TEACHER).requires_grad_()
    gkd(student, teacher, beta=beta).sum().backward()
    assert teacher.grad is None
    fixed = teacher.detach()
    assert torch.autograd.gradcheck(lambda x: gkd(x, fixed, beta=beta), (student,))


def test_the_gradient_of_the_forward_divergence_is_student_minus_teacher() -> None:
    student = logits(*STUDENT).requires_grad_()
    gkd(student, logits(*TEACHER), beta=0.0, temperature=1.0).sum().backward()
    assert student.grad is not None
    assert student.grad[0].tolist() == pytest.approx([0.3, -0.2, -0.1])


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_a_student_equal_to_its_teacher_is_at_zero_with_zero_gradient(beta: float) -> None:
    student = logits(*TEACHER).requires_grad_()
    value = gkd(student, logits(*TEACHER), beta=beta)
    value.sum().backward()
    assert value.item() == pytest.approx(0, abs=1e-12)
    assert student.grad is not None
    assert student.grad.abs().max() < 1e-12


def test_temperature_divides_the_logits_of_both() -> None:
    student, teacher = logits(*STUDENT), logits(*TEACHER)
    assert torch.allclose(gkd(student, teacher, temperature=0.5), gkd(2 * student, 2 * teacher, temperature=1.0))


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_tokens_that_both_exclude_and_huge_logits_stay_finite(beta: float) -> None:
    student = torch.tensor([[0.0, 1.0, -torch.inf], [3e4, 0.0, -3e4]], requires_grad=True)
    teacher = torch.tensor([[0.5, 0.0, -torch.inf], [-3e4, 0.0, 3e4]])
    value = gkd(student, teacher, beta=beta)
    value.sum().backward()
    assert value.isfinite().all()
    assert student.grad is not None
    assert student.grad.isfinite().all()


def test_top_k_with_a_rest_bucket_is_a_lower_bound_and_exact_when_one_token_is_left() -> None:
    student, teacher = torch.tensor([STUDENT]).double().log(), torch.tensor([TEACHER]).double().log()
    exact = gkd(student, teacher, beta=0.0, temperature=1.0).item()
    assert top_k_forward_kl(student[:, 1:], teacher[:, 1:]).item() == pytest.approx(exact, abs=1e-6)
    assert 0 <= top_k_forward_kl(student[:, 1:2], teacher[:, 1:2]).item() <= exact
    # Without the bucket it is not a bound: the worked number exceeds the divergence itself.
    bare = (teacher[:, 1:].exp() * (teacher[:, 1:] - student[:, 1:])).sum().item()
    assert bare == pytest.approx(0.377052, abs=1e-6)
    assert bare > exact


def test_top_k_is_a_lower_bound_on_random_distributions_and_survives_k_that_covers_everything() -> None:
    draw = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(50, 8, generator=draw, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    exact = gkd(student, teacher, beta=0.0, temperature=1.0)
    top = teacher.topk(3).indices
    bound = top_k_forward_kl(student.gather(1, top), teacher.gather(1, top))
    assert (bound >= 0).all()
    assert (bound <= exact + 1e-12).all()
    assert torch.allclose(top_k_forward_kl(student, teacher), exact, atol=1e-9)


def test_top_k_gradients_reach_the_student_only() -> None:
    student = torch.tensor([[0.3, 0.2]]).double().log().requires_grad_()
    teacher = torch.tensor([[0.5, 0.3]]).double().log().requires_grad_()
    top_k_forward_kl(student, teacher).sum().backward()
    assert teacher.grad is None
    # -Q_k + Q_rest S_k / S_rest
    assert student.grad is not None
    assert student.grad[0].tolist() == pytest.approx([-0.5 + 0.2 * 0.3 / 0.5, -0.3 + 0.2 * 0.2 / 0.5])


def test_no_split_of_positions_changes_the_loss() -> None:
    draw = torch.Generator().manual_seed(2)
    student = torch.randn(7, 5, generator=draw, dtype=torch.float64).requires_grad_()
    teacher = torch.randn(7, 5, generator=draw, dtype=torch.float64)
    weights = torch.full((7,), 1 / 7, dtype=torch.float64)
    whole, metrics = distillation_loss(gkd(student, teacher), weights)
    total, merged = torch.zeros((), dtype=torch.float64), MetricSums()
    for rows in ([6, 0], [1, 2, 3], [], [5, 4]):
        piece, sums = distillation_loss(gkd(student[rows], teacher[rows]), weights[rows])
        total, merged = total + piece, merged.merge(sums)
    assert merged.finish() == pytest.approx(metrics.finish(), abs=1e-12)
    assert torch.allclose(torch.autograd.grad(whole, student)[0], torch.autograd.grad(total, student)[0], atol=1e-12)


def test_models_with_different_vocabularies_are_refused() -> None:
    with pytest.raises(UserError, match="share one tokenizer"):
        gkd(torch.zeros(1, 3), torch.zeros(1, 4))
    for wrong in ({"beta": 1.5}, {"temperature": 0.0}):
        with pytest.raises(UserError, match="gkd"):
            gkd(torch.zeros(1, 3), torch.zeros(1, 3), **wrong)
