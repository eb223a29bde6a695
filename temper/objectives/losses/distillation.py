"""Learning from a teacher's distributions: how far the student's next-token distribution is from the teacher's.

Owns: divergences per position, in log space; gradients reach the student only. Refuses: credit from a teacher's
log-probabilities of drawn tokens (token_advantages.py) and teachers with another vocabulary.
Shapes: _T positions of one microbatch, V vocabulary, K teacher's most likely tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from temper.objectives.factor import require
from temper.objectives.metrics import MetricSums, mean_sums

MIN_LOGPROB = -1e4
"""Tokens masked out by a keep-set have minus infinity, and 0 * infinity is NaN. Far below any real log-probability."""
MIN_REST = 1e-12


def gkd(student_logits: Tensor, teacher_logits: Tensor, beta: float = 0.5, temperature: float = 0.9) -> Tensor:
    """[T] divergence of student S and teacher Q per position, from logits [T, V]. M = beta Q + (1 - beta) S.

    beta 0: KL(Q || S), covers the teacher. beta 1: KL(S || Q), seeks its modes. Between: beta KL(Q || M) +
    (1 - beta) KL(S || M), which tends to 0, not to the ends. Both are taken at `temperature`.
    Agarwal et al. 2023 (arXiv 2306.13649); TRL (gkd).
    """
    require_gkd(beta, temperature)
    require(
        student_logits.shape == teacher_logits.shape,
        f"gkd: student logits have shape {tuple(student_logits.shape)}, the teacher's {tuple(teacher_logits.shape)}. "
        "Both models must share one tokenizer and be asked about the same positions.",
    )
    student, teacher = _logprobs(student_logits, temperature), _logprobs(teacher_logits.detach(), temperature)
    if beta == 0:
        return _kl(teacher, student)
    if beta == 1:
        return _kl(student, teacher)
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)


def require_gkd(beta: float, temperature: float) -> None:
    require(0 <= beta <= 1, f"gkd: beta={beta} must lie between 0 (forward KL) and 1 (reverse KL), e.g. 0.5")
    require(temperature > 0, f"gkd: temperature={temperature} must be positive, e.g. 0.9")


def top_k_forward_kl(student_logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """[T] sum_k Q_k log(Q_k / S_k) + Q_rest log(Q_rest / S_rest), from both models' log-probabilities [T, K] of the
    teacher's K most likely tokens.

    The rest as one bucket makes it a lower bound of KL(Q || S) that is never negative.
    """
    teacher = teacher_logprobs.detach().clamp(min=MIN_LOGPROB)
    student = student_logprobs.clamp(min=MIN_LOGPROB)
    return _kl(_with_rest(teacher), _with_rest(student))


def distillation_loss(divergences_T: Tensor, weights_T: Tensor) -> tuple[Tensor, MetricSums]:
    """This microbatch's part of the loss. `weights_T` hold one over the batch's response tokens."""
    loss = (divergences_T * weights_T).sum()
    total = MetricSums(totals={"loss/distillation": loss.detach().double()})
    return loss, total.merge(mean_sums({"distillation/divergence": divergences_T}))


def _logprobs(logits: Tensor, temperature: float) -> Tensor:
    return (logits / temperature).log_softmax(-1).clamp(min=MIN_LOGPROB)


def _kl(first: Tensor, second: Tensor) -> Tensor:
    """KL(first || second) over the last dimension, from log-probabilities."""
    return (first.exp() * (first - second)).sum(-1)


def _with_rest(logprobs: Tensor) -> Tensor:
    """[T, K + 1] with the log-probability of everything else."""
    rest = -torch.expm1(logprobs.logsumexp(-1, keepdim=True))
    return torch.cat([logprobs, rest.clamp(min=MIN_REST).log()], dim=-1)
