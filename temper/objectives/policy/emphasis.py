"""Which tokens of a trajectory deserve more: advantages changed at loss time, by what the policy is now.

Owns: rules that read the policy's distribution. Refuses: credit from rewards (advantages.py), gradient through it.
Entropy is always computed; here it carries no gradient, so these factors do not "need" it.
Shapes: _T drawn tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from temper.objectives.advantage.forks import fork_tokens, require_quantile
from temper.objectives.factor import factor, require
from temper.objectives.objective import Emphasis
from temper.objectives.tokens import Tokens

EmphasisFn = Callable[[Tokens], Tensor]


@factor(experimental="its formula is established, its constants 0.4 and 2 are not")
def entropy_shaped(scale: float = 0.4, bound: float = 2.0) -> EmphasisFn:
    """A_t + min(scale sg[H_t], |A_t| / bound): more credit where the policy was unsure, never a change of sign.

    Reasoning with Exploration, arXiv 2506.14758.
    """
    require(scale >= 0, f"entropy_shaped: scale={scale} must not be negative, e.g. scale=0.4")
    require(bound > 1, f"entropy_shaped: bound={bound} must exceed 1, or signs could flip, e.g. bound=2.0")

    def advantages(tokens: Tokens) -> Tensor:
        assert tokens.entropy is not None, "entropy_shaped needs the entropy of each position"
        bonus_T = scale * tokens.entropy.detach()
        return tokens.advantages + torch.minimum(bonus_T, tokens.advantages.abs() / bound)

    return advantages


@factor(needs=("policy_top_k",))
def top_choice_penalty(factor: float = 1.1, quantile: float = 0.8) -> EmphasisFn:
    """factor A_t where A_t < 0, the token is a fork (forks.py) and was the most likely one when the batch started.

    Punishes a wrong answer more where it followed the favourite. SimKO, arXiv 2510.14807.
    """
    require(factor >= 0, f"top_choice_penalty: factor={factor} must not be negative, e.g. factor=1.1")
    require_quantile("top_choice_penalty", quantile)

    def advantages(tokens: Tokens) -> Tensor:
        assert tokens.top is not None, "top_choice_penalty needs the most likely tokens"
        # Comparing with None is False everywhere: the rule would be switched off without a word.
        assert tokens.token_ids is not None, "top_choice_penalty needs the drawn tokens"
        is_favourite_T = tokens.top.ids[:, 0] == tokens.token_ids
        is_punished_T = (tokens.advantages < 0) & is_favourite_T & fork_tokens(tokens, quantile)
        return torch.where(is_punished_T, factor * tokens.advantages, tokens.advantages)

    return advantages


EMPHASES: dict[str, Callable[..., Emphasis]] = {
    "entropy_shaped": entropy_shaped,
    "top_choice_penalty": top_choice_penalty,
}
