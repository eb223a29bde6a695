"""The loss of supervised data: the likelihood of given tokens, if wanted with smoothed labels and noisy inputs.

Owns: the loss and its preset. Refuses: the uniform cross-entropy and the noise, which the trainer makes when asked to.
Shapes: _T trained tokens of one microbatch.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from temper.objectives.factor import require
from temper.objectives.metrics import MetricSums, mean_sums
from temper.objectives.objective import DirectLoss, Loss
from temper.objectives.policy.weighting import token_mean
from temper.objectives.tokens import Tokens


def likelihood(smoothing: float = 0.0, noise: float = 0.0) -> Loss:
    """sum_t w_t [(1 - s) * -log p(y_t) + s * -mean_v log p(v)]; embeddings + uniform(-1, 1) * noise / sqrt(L d).

    Label smoothing: Szegedy et al. 2016, with the given token among those that share s, as in TRL and transformers.
    Noise: NEFTune, arXiv 2310.05914, which uses 5 to 15; L tokens of the row, d width; not in evaluations.
    """
    require(0 <= smoothing < 1, f"likelihood: smoothing={smoothing} must be at least 0 and below 1, e.g. 0.1")
    require(noise >= 0, f"likelihood: noise={noise} must not be negative, e.g. 5")

    def run(tokens: Tokens) -> tuple[Tensor, MetricSums]:
        surprise_T = -tokens.policy_logprobs
        losses_T = surprise_T
        if smoothing:
            assert tokens.uniform is not None, "smoothed labels need the cross-entropy against all tokens"
            losses_T = (1 - smoothing) * surprise_T + smoothing * tokens.uniform
        loss = (losses_T * tokens.weights).sum()
        totals = {"loss/likelihood": loss.detach().double()}
        return loss, MetricSums(totals=totals).merge(mean_sums({"sft/nll": surprise_T}))

    # Not by the decorator: what the loss needs depends on what is asked of it.
    needs = {"uniform": smoothing > 0, "noise": noise > 0}
    return Loss(
        name="likelihood",
        arguments=(("smoothing", smoothing), ("noise", noise)),
        needs=frozenset(need for need, is_asked in needs.items() if is_asked),
        min_group=1,
        experimental="",
        run=run,
        reads="texts",
    )


LIKELIHOOD_LOSSES: dict[str, Callable[..., Loss]] = {"likelihood": likelihood}

SFT = DirectLoss(
    name="sft",
    weighting=token_mean(),
    loss=likelihood(),
    formula="1/N sum_it -log pi(y_it)",
    source="TRL sft_trainer; label smoothing: arXiv 1512.00567; noise: arXiv 2310.05914",
    note="Mean negative log-likelihood per trained token of the batch. smoothing = 0.1 and noise = 5 are usual where "
    "they are used at all.",
)

LIKELIHOOD_PRESETS = (SFT,)
