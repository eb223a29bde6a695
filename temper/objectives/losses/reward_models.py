"""Learning to score: reward models from pairs, process reward models from labelled steps, a discriminator from text.

Owns: their losses, their calibration, and the scale their scores are put on before RL. Refuses: the model itself;
scores are read at the last token of a sequence, step logits at the last token of a step separator.
Shapes: _P pairs of one microbatch, _N token positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from temper.objectives.factor import require
from temper.objectives.metrics import MetricSums, largest, mean_sums, smallest

NUM_BINS = 10
UNLABELLED = -1
"""Label of a position that no step ends at."""


def bradley_terry(
    chosen_scores_P: Tensor, rejected_scores_P: Tensor, margin: float | Tensor = 0.0, centring: float = 0.0
) -> Tensor:
    """[P] -logsig(s_w - s_l - margin) + centring (s_w + s_l)^2; the second term fixes the free constant, e.g. 0.01.

    Bradley and Terry 1952; Eisenstein et al. 2023 (centring); TRL, OpenRLHF.
    """
    require(centring >= 0, f"bradley_terry: centring={centring} must not be negative, e.g. 0.01")
    compared_P = -logsigmoid(chosen_scores_P - rejected_scores_P - margin)
    return compared_P + centring * (chosen_scores_P + rejected_scores_P).square()


def discriminator_loss(teacher_scores_P: Tensor, student_scores_P: Tensor) -> Tensor:
    """[P] -logsig(D(y_teacher) - D(y_student)): tells the teacher's text from the student's.

    The student is then trained with reward D(y_student), after a warm-up of both. GAD, arXiv 2511.10643, known from its
    project page only.
    """
    return bradley_terry(teacher_scores_P, student_scores_P)


def reward_model_loss(
    chosen_scores_P: Tensor,
    rejected_scores_P: Tensor,
    weights_P: Tensor,
    *,
    margin: float | Tensor = 0.0,
    centring: float = 0.0,
) -> tuple[Tensor, MetricSums]:
    """This microbatch's part of the loss, and sums for its metrics. `weights_P` hold one over the batch's pairs."""
    losses_P = bradley_terry(chosen_scores_P, rejected_scores_P, margin, centring)
    loss = (losses_P * weights_P).sum()
    total = MetricSums(totals={"loss/reward_model": loss.detach().double()})
    return loss, total.merge(pair_sums(chosen_scores_P, rejected_scores_P))


def pair_sums(chosen_scores_P: Tensor, rejected_scores_P: Tensor) -> MetricSums:
    """Accuracy, margin, scores, and the reliability of sig(s_w - s_l). Ties count as half right."""
    chosen_P, rejected_P = chosen_scores_P.detach().double(), rejected_scores_P.detach().double()
    by_pair = mean_sums(
        {
            "reward_model/accuracy": ((chosen_P - rejected_P).sign() + 1) / 2,
            "reward_model/margin": chosen_P - rejected_P,
        }
    )
    scores_2P = torch.cat([chosen_P, rejected_P])
    by_score = MetricSums(
        maxima={"reward_model/score_max": largest(scores_2P)}, minima={"reward_model/score_min": smallest(scores_2P)}
    )
    by_score = by_score.merge(mean_sums({"reward_model/score": scores_2P}))
    # Seen from one side every pair is won and nothing could be calibrated: each pair counts from both sides.
    predicted_2P = torch.sigmoid(torch.cat([chosen_P - rejected_P, rejected_P - chosen_P]))
    won_2P = torch.cat([torch.ones_like(chosen_P), torch.zeros_like(chosen_P)])
    return by_pair.merge(by_score).merge(calibration_sums(predicted_2P, won_2P))


def calibration_sums(predicted_N: Tensor, happened_N: Tensor) -> MetricSums:
    """Reliability in NUM_BINS equal bins: mean prediction, rate at which it came true, share of the bin."""
    bins_N = (predicted_N * NUM_BINS).long().clamp(0, NUM_BINS - 1)
    metrics = MetricSums()
    for place in range(NUM_BINS):
        is_here_N = bins_N == place
        inside = {"predicted": predicted_N * is_here_N, "happened": happened_N * is_here_N}
        metrics = metrics.merge(
            mean_sums({f"calibration/{place}/{name}": column for name, column in inside.items()}, is_here_N.sum())
        )
        metrics = metrics.merge(mean_sums({f"calibration/{place}/share": is_here_N}))
    return metrics


def calibration_error(metrics: Mapping[str, float]) -> float:
    """Expected calibration error from finished metrics: sum over bins of share |predicted - happened|. 0 is perfect."""
    error = 0.0
    for place in range(NUM_BINS):
        share = metrics.get(f"calibration/{place}/share", 0.0)
        if share > 0:
            gap = metrics[f"calibration/{place}/predicted"] - metrics[f"calibration/{place}/happened"]
            error += share * abs(gap)
    return error


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreScale:
    """Constants of a calibration set, stored with the model: (s - mean) / std. Never taken from the batch at hand,
    or the reward of a completion would depend on its neighbours."""

    mean: float
    std: float

    def __post_init__(self) -> None:
        require(self.std > 0, f"ScoreScale: std={self.std} must be positive. Calibrate on scores that differ.")

    @staticmethod
    def of(calibration_scores: Tensor) -> ScoreScale:
        scores = calibration_scores.detach().double()
        require(len(scores) >= 2, f"ScoreScale: {len(scores)} calibration scores have no spread. Use hundreds.")
        return ScoreScale(mean=scores.mean().item(), std=scores.std().item())

    def apply(self, scores: Tensor) -> Tensor:
        return (scores - self.mean) / self.std


def process_reward_loss(logits_N: Tensor, labels_N: Tensor, weights_N: Tensor) -> tuple[Tensor, MetricSums]:
    """Sum of weight * binary cross-entropy over labelled positions: 1 a good step, 0 a bad one, UNLABELLED ignored.

    `weights_N` hold one over the batch's labelled positions. Lightman et al. 2023; TRL (layout).
    """
    # Selected, not multiplied by 0: an undefined logit elsewhere would still be a NaN.
    is_labelled_N = labels_N != UNLABELLED
    logits_N, labels_N, weights_N = logits_N[is_labelled_N], labels_N[is_labelled_N], weights_N[is_labelled_N]
    losses_N = binary_cross_entropy_with_logits(logits_N, labels_N.to(logits_N.dtype), reduction="none")
    loss = (losses_N * weights_N).sum()
    total = MetricSums(totals={"loss/process_reward": loss.detach().double()})
    return loss, total.merge(step_sums(logits_N, labels_N))


def step_sums(logits_N: Tensor, labels_N: Tensor) -> MetricSums:
    """Accuracy, share of good steps among labels and by the model, and the reliability of its probabilities."""
    predicted_N, is_good_N = torch.sigmoid(logits_N.detach().double()), labels_N == 1
    means = {
        "process_reward/accuracy": (logits_N.detach() > 0) == is_good_N,
        "process_reward/good_share": is_good_N,
        "process_reward/score": predicted_N,
    }
    return mean_sums(means).merge(calibration_sums(predicted_N, is_good_N.double()))


SOLUTION_SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "min": lambda probabilities: probabilities.amin(),
    "product": lambda probabilities: probabilities.prod(),
    "last": lambda probabilities: probabilities[-1],
}
