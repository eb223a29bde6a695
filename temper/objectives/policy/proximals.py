"""Whom the ratio compares the policy with: the policy that the trust region is drawn around.

Owns: the choices. Refuses: the ratio itself (ratios.py).
Shapes: _T drawn tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from temper.objectives.factor import factor, require
from temper.objectives.objective import Proximal
from temper.objectives.tokens import Tokens

ProximalFn = Callable[[Tokens], Tensor]


@factor()
def trainer() -> ProximalFn:
    """log pi_old: the trainer's own log-probabilities when the batch started (decoupled mode: r clips, rho corrects).

    With one update per batch they are those of the same pass, detached, and cost nothing.
    """
    return lambda tokens: tokens.proximal_logprobs


@factor()
def behavior() -> ProximalFn:
    """log pi_old := log mu, as sampled (bypass mode). The ratio then holds the correction for the sampler as well, so
    sampler corrections on top of it would count twice and are refused."""
    return lambda tokens: tokens.behavior_logprobs


@factor()
def current() -> ProximalFn:
    """log pi_old := sg[log pi]: no trust region. Corrections then weigh by pi/mu of the policy being trained.

    For plain policy gradients on samples of another policy (REINFORCE with importance weights).
    """
    return lambda tokens: tokens.policy_logprobs.detach()


@factor()
def interpolated(space: str = "log") -> ProximalFn:
    """A-3PO: log pi_old := log mu + a (sg[log pi] - log mu), a = (d - 1)/d for a token of staleness d >= 1, else 0.

    Approximates the policy one publication behind the trainer, without a pass of its own; 1/d of the weight stays on
    the sampler. space = "probability" mixes probabilities instead of logs. arXiv 2512.06547; AReaL.
    """
    require(space in ("log", "probability"), f'interpolated: space="{space}" is unknown. Use "log" or "probability".')

    def logprobs(tokens: Tokens) -> Tensor:
        staleness_T = (tokens.version - tokens.versions).clamp(min=1).to(tokens.behavior_logprobs.dtype)
        share_T = (staleness_T - 1) / staleness_T
        policy_T, behavior_T = tokens.policy_logprobs.detach(), tokens.behavior_logprobs
        if space == "log":
            return behavior_T + share_T * (policy_T - behavior_T)
        return torch.logaddexp(torch.log1p(-share_T) + behavior_T, share_T.log() + policy_T)

    return logprobs


PROXIMALS: dict[str, Callable[..., Proximal]] = {
    "trainer": trainer,
    "behavior": behavior,
    "current": current,
    "interpolated": interpolated,
}
