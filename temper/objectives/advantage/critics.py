"""The critic: what it should have predicted before each token, how wrong it was, how good it is.

Owns: targets and the value loss. Refuses: the critic's network and when it is trained (trainer/), advantages.
Shapes: _T drawn tokens of one microbatch, _N drawn tokens of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from temper.objectives.advantage.credit import Credit
from temper.objectives.advantage.token_advantages import generalized_advantages, require_share
from temper.objectives.factor import factor, require
from temper.objectives.metrics import MetricSums, mean_sums
from temper.objectives.objective import Critic, Objective, PolicyObjective

CriticFn = Callable[[Credit], Tensor]


@factor(needs=("values",), along={"gamma": 1, "lam": 1, "bootstrap_truncated": 0})
def gae_targets(
    gamma: float = 1.0,
    lam: float = 0.95,
    clip: float = 0.2,
    pretraining_steps: int = 0,
    bootstrap_truncated: int = 0,
) -> CriticFn:
    """Target_t = A_t + V_t with A of gae, before any whitening; lam = 1 gives the returns themselves, as in VAPO.

    `clip` bounds how far one batch moves a value (value_loss). In the first `pretraining_steps` only the critic learns.
    bootstrap_truncated as in gae. Schulman et al. 2016; TRL, verl.
    """
    require_share("gae_targets", "gamma", gamma)
    require_share("gae_targets", "lam", lam)
    require(clip > 0, f"gae_targets: clip={clip} must be positive, e.g. 0.2; a large number switches it off")
    require(pretraining_steps >= 0, f"gae_targets: pretraining_steps={pretraining_steps} must not be negative, e.g. 50")
    require(bootstrap_truncated in (0, 1), f"gae_targets: bootstrap_truncated={bootstrap_truncated} must be 0 or 1")

    def targets(credit: Credit) -> Tensor:
        assert credit.values is not None, "gae_targets needs the critic's values"
        return generalized_advantages(credit, gamma, lam, bool(bootstrap_truncated)) + credit.values

    return targets


def pretraining_steps(objective: Objective) -> int:
    """Steps at the start of a stage in which the critic learns and the policy waits; 0 without a critic."""
    critic = objective.critic if isinstance(objective, PolicyObjective) else None
    return 0 if critic is None else int(critic.argument("pretraining_steps"))


def value_loss(values_T: Tensor, old_values_T: Tensor, targets_T: Tensor, weights_T: Tensor, clip: float) -> Tensor:
    """0.5 sum_t weight * max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2).

    The larger of both: a value that moved too far has no gradient where moving further would help, and keeps it where
    it should come back. Losses of microbatches add up, as weights hold the denominator. PPO; TRL.
    """
    near_T = old_values_T + (values_T - old_values_T).clamp(-clip, clip)
    errors_T = torch.maximum((values_T - targets_T).square(), (near_T - targets_T).square())
    return 0.5 * (errors_T * weights_T).sum()


def value_sums(values_T: Tensor, targets_T: Tensor) -> MetricSums:
    """Sums for the critic's metrics, to merge over microbatches and ranks before explained_variance."""
    error_T, targets_T = (targets_T - values_T).detach().double(), targets_T.detach().double()
    return mean_sums(
        {
            "critic/error_mean": error_T,
            "critic/error_square_mean": error_T.square(),
            "critic/target_mean": targets_T,
            "critic/target_square_mean": targets_T.square(),
        }
    )


def explained_variance(metrics: Mapping[str, float]) -> float | None:
    """1 - var(R - V) / (var(R) + 1e-5), from the finished means of value_sums: 1 is perfect, 0 as good as a constant.

    None when these means are missing.
    """
    if "critic/target_mean" not in metrics:
        return None
    target, error = (
        metrics[f"critic/{name}_square_mean"] - metrics[f"critic/{name}_mean"] ** 2 for name in ("target", "error")
    )
    return 1 - error / (target + 1e-5)


CRITICS: dict[str, Callable[..., Critic]] = {"gae_targets": gae_targets}
