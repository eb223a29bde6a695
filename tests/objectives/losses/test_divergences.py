"""Direct losses from a teacher through Tokens: worked numbers on F4, weights, gradients, refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from temper.errors import UserError
from temper.objectives import MetricSums, Objective, Tokens, TopTokens, objective_loss
from temper.objectives.losses.divergences import DIVERGENCE_LOSSES, DivergenceLoss, gkd, k2, k3, top_k_teacher
from temper.objectives.objective import Loss
from temper.objectives.presets.distillation import PRESETS

STUDENT, TEACHER = (0.5, 0.3, 0.2), (0.2, 0.5, 0.3)
LOSSES = {(0.0,): 0.193794, (1.0,): 0.223805, (0.5,): 0.050875, (0.1,): 0.017563}


def logs(*probabilities: float) -> Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


def drawn(policy: Tensor, **fields: object) -> Tokens:
    """One trajectory of the given tokens, as a mean over all of them."""
    count = len(policy)
    zeros = torch.zeros(count, dtype=torch.float64)
    values = {
        "policy_logprobs": policy,
        "proximal_logprobs": policy.detach(),
        "behavior_logprobs": policy.detach(),
        "advantages": zeros,
        "weights": zeros + 1 / count,
        "trajectory_ids": torch.zeros(count, dtype=torch.int64),
        "num_trajectories": 1,
        "num_batch_tokens": count,
        "versions": torch.zeros(count, dtype=torch.int64),
    }
    return Tokens(**(values | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(("beta", "expected"), [(beta, loss) for (beta,), loss in LOSSES.items()])
def test_gkd_is_the_weighted_sum_of_the_worked_divergences(beta: float, expected: float) -> None:
    direct_loss = gkd(beta=beta, temperature=1.0)
    assert isinstance(direct_loss.run, DivergenceLoss)
    divergence = direct_loss.run.divergence(logs(*STUDENT)[None], logs(*TEACHER)[None])
    loss, metrics = direct_loss(drawn(logs(0.5), divergence=divergence))
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    assert metrics.finish()["distillation/divergence"] == pytest.approx(expected, abs=1e-6)
    swapped = direct_loss.run.divergence(logs(*TEACHER)[None], logs(*STUDENT)[None])  # the planted fault
    assert beta == 0.5 or abs(swapped.item() - expected) > 1e-4


def test_the_teachers_top_tokens_with_a_bucket_give_the_whole_divergence_when_one_is_left() -> None:
    student, teacher = logs(*STUDENT)[None, 1:], logs(*TEACHER)[None, 1:]
    top = TopTokens(ids=torch.tensor([[1, 2]]), anchor_logprobs=teacher, policy_logprobs=student.requires_grad_())
    loss, _ = top_k_teacher(k=2)(drawn(logs(0.3), top=top))
    assert loss.item() == pytest.approx(0.193794, abs=1e-6)
    # Without the bucket: no bound, and another number.
    assert abs((teacher.exp() * (teacher - student)).sum().item() - 0.377052) < 1e-6
    with pytest.raises(AssertionError, match="reads 1"):
        top_k_teacher(k=1)(drawn(logs(0.3), top=top))


@pytest.mark.parametrize("direct_loss", [k2(), k3()])
def test_direct_losses_are_the_estimators_at_drawn_tokens(direct_loss: Loss) -> None:
    policy, teacher = logs(*STUDENT).requires_grad_(), logs(*TEACHER)
    loss, _ = direct_loss(drawn(policy, teacher_logprobs=teacher))
    distance = [math.log(s / q) for s, q in zip(STUDENT, TEACHER, strict=True)]
    expected = [d * d / 2 if direct_loss.name == "k2" else math.exp(-d) - 1 + d for d in distance]
    slopes = [d if direct_loss.name == "k2" else 1 - math.exp(-d) for d in distance]
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == pytest.approx(sum(expected) / 3)
    assert policy.grad is not None
    assert policy.grad.tolist() == pytest.approx([slope / 3 for slope in slopes])


@pytest.mark.parametrize(("direct_loss", "follows"), [(k2(), 1.0), (k3(), 0.0)])
def test_what_each_estimator_follows_on_the_students_own_samples(direct_loss: Loss, follows: float) -> None:
    """Expected gradient over what the student draws: k2 that of KL(S || Q), k3 that of KL(Q || S)."""
    logits = logs(*STUDENT).requires_grad_()
    policy = logits.log_softmax(0)
    tokens = drawn(policy, teacher_logprobs=logs(*TEACHER), weights=policy.detach().exp())
    found = torch.autograd.grad(direct_loss(tokens)[0], logits, retain_graph=True)[0]

    def slope(beta: float) -> Tensor:
        compared = gkd(beta=beta, temperature=1.0).run
        assert isinstance(compared, DivergenceLoss)
        return torch.autograd.grad(compared.divergence(logits[None], logs(*TEACHER)[None]).sum(), logits)[0]

    assert torch.allclose(found, slope(follows), atol=1e-12)
    assert not torch.allclose(found, slope(1.0 - follows), atol=1e-3)  # the other direction is told apart


def test_a_token_that_the_teacher_rules_out_stays_finite() -> None:
    for direct_loss in (k2(), k3()):
        policy = logs(0.5).requires_grad_()
        loss, _ = direct_loss(drawn(policy, teacher_logprobs=torch.tensor([-float("inf")], dtype=torch.float64)))
        loss.backward()  # type: ignore[no-untyped-call]
        assert loss.isfinite()
        assert policy.grad is not None
        assert policy.grad.isfinite().all()


@pytest.mark.parametrize("name", list(DIVERGENCE_LOSSES))
def test_no_split_of_the_tokens_changes_loss_or_gradient(name: str) -> None:
    draw = torch.Generator().manual_seed(1)
    column = torch.randn(7, 2, generator=draw, dtype=torch.float64)
    policy = (-column[:, 0].abs() - 0.1).requires_grad_()
    teacher, anchor = -column[:, 1].abs() - 0.1, column.log_softmax(1) - 0.5
    direct_loss = DIVERGENCE_LOSSES[name](**({"k": 2} if name == "top_k_teacher" else {}))

    def part(rows: list[int]) -> tuple[Tensor, MetricSums]:
        own = policy[rows]
        top = TopTokens(ids=torch.zeros(len(rows), 2), anchor_logprobs=anchor[rows],
                        policy_logprobs=torch.stack([own - 1, own - 2], 1))  # fmt: skip
        tokens = drawn(own, teacher_logprobs=teacher[rows], divergence=own.square(), top=top)
        return direct_loss(replace(tokens, weights=torch.full((len(rows),), 1 / 7, dtype=torch.float64)))

    whole, metrics = part(list(range(7)))
    pieces = [part(rows) for rows in ([6, 0], [1, 2, 3], [5, 4])]
    total = sum((loss for loss, _ in pieces), torch.zeros((), dtype=torch.float64))
    merged = pieces[0][1].merge(pieces[1][1]).merge(pieces[2][1])
    assert merged.finish() == pytest.approx(metrics.finish(), abs=1e-12)
    assert torch.allclose(torch.autograd.grad(whole, policy)[0], torch.autograd.grad(total, policy)[0], atol=1e-12)


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)
def test_presets_say_what_they_need_and_train_by_their_loss(preset: Objective) -> None:
    assert preset.loss is not None
    assert all((preset.formula, preset.source, preset.note))
    assert preset.needs in ({"divergence"}, {"teacher"}, {"teacher_top_k"})
    assert preset.min_group == 1
    if preset.needs == {"divergence"}:
        tokens = drawn(logs(0.5), divergence=logs(0.5) ** 2)
        assert objective_loss(preset, tokens)[0].item() == pytest.approx(math.log(2) ** 2)


@pytest.mark.parametrize(
    ("make", "wrong"),
    [(gkd, {"beta": 1.5}), (gkd, {"temperature": 0.0}), (gkd, {"lmbda": -0.1}), (top_k_teacher, {"k": 0})],
)
def test_settings_outside_their_range_are_refused(make: Callable[..., Loss], wrong: dict[str, float]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        make(**wrong)
