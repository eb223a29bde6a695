"""What a scalar head says: the score at each position that a row asks to be read at.

Owns: which hidden state the head reads. Refuses: losses (objectives/losses/scores.py), and what the numbers mean.
Shapes: _T packed tokens, _A positions that are read, _D width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from temper.models.scorer import score_head
from temper.models.states import hidden_states
from temper.objectives import Scored
from temper.trainer.passes.gathering import take_rows
from temper.trainer.passes.states import MakeAttention, attention_of, require_room
from temper.types import Microbatch


def read_scores(model: nn.Module, microbatch: Microbatch) -> Scored:
    """The head's output [A] at every position with loss_mask 1, with gradient; it has seen that position's token.

    Log-probabilities are read one position earlier: there the model must not have seen the token it is asked about.
    """
    head = score_head(model)
    assert isinstance(head.weight, Tensor), "a linear head has a weight"
    # float32 as the language-model head: two good answers differ by less than the spacing of bfloat16 numbers.
    dtype = torch.promote_types(head.weight.dtype, torch.float32)
    bias = getattr(head, "bias", None)
    states_AD = read_states(model, microbatch).to(dtype)
    scores_A = linear(states_AD, head.weight.to(dtype), None if bias is None else bias.to(dtype))[:, 0]
    return Scored(logprobs=scores_A, entropy=torch.zeros_like(scores_A))


def read_states(model: nn.Module, microbatch: Microbatch, make_attention: MakeAttention | None = None) -> Tensor:
    """Last hidden states [A, D] at those positions: what the head is given."""
    require_room(model, microbatch)
    device = next(model.parameters()).device
    read_A = microbatch.loss_mask.nonzero()[:, 0].to(device)
    attend = (make_attention or attention_of(model))(microbatch.lengths, device)
    hidden_TD = hidden_states(model, microbatch.token_ids.to(device), microbatch.positions.to(device), attend)
    return take_rows(hidden_TD, read_A)
