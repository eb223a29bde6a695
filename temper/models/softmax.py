"""The softmax over the vocabulary that sampler and trainer share: from equal logits both get equal bits.

Owns: the order of every sum. A row's result depends on nothing but the row, whatever is computed beside it.
Refuses: making logits, gradients, drawing.
Shapes: _R rows, _V vocabulary, _B blocks of it, _K some tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 128
"""Tokens whose weights are summed at once. Their sums also tell where in the vocabulary a draw falls."""

MANY_BLOCKS = 32
"""With at least so many blocks torch sums all of them in the same order, however many rows there are; with fewer a GPU
shares out each sum among more threads. Fewer are summed by adding halves, where there is nothing to choose."""


@dataclass(frozen=True, slots=True)
class Softmax:
    """softmax(logits), not yet divided: exp(logit - peak) and the sum of that."""

    peak_R1: Tensor
    weights_RV: Tensor
    """1 for the most likely token, 0 for those that cannot be drawn."""
    blocks_RB: Tensor
    """Sums of weights over blocks of the vocabulary; the last may be short."""
    total_R1: Tensor

    @staticmethod
    def of(logits_RV: Tensor, dropped_RV: Tensor | None = None) -> Softmax:
        """Over all tokens, or over those that are not dropped. Logits are those after temperature."""
        if dropped_RV is None:
            peak_R1 = logits_RV.amax(-1, keepdim=True)
            weights_RV = logits_RV - peak_R1
        else:
            weights_RV = logits_RV.masked_fill(dropped_RV, -torch.inf)
            peak_R1 = weights_RV.amax(-1, keepdim=True)
            weights_RV -= peak_R1
        return Softmax._of_weights(peak_R1, weights_RV.exp_())

    def within(self, kept_RV: Tensor) -> Softmax:
        """Over a part that holds the most likely token: the same bits as leaving the others out from the start."""
        return Softmax._of_weights(self.peak_R1, self.weights_RV * kept_RV)

    @staticmethod
    def _of_weights(peak_R1: Tensor, weights_RV: Tensor) -> Softmax:
        blocks_RB = _block_sums(weights_RV)
        return Softmax(peak_R1, weights_RV, blocks_RB, _folded(blocks_RB))

    def logprobs(self, logits_RK: Tensor) -> Tensor:
        """Log-probabilities of tokens that can be drawn, from their logits."""
        return (logits_RK - self.peak_R1) - self.total_R1.log()

    def entropy(self, logits_RV: Tensor) -> Tensor:
        """[R], from the logits of all tokens."""
        # Not below the smallest number: zero weight times minus infinity would be NaN.
        surprise_RV = (logits_RV - self.peak_R1).clamp_(min=torch.finfo(logits_RV.dtype).min).mul_(self.weights_RV)
        return (self.total_R1.log() - _folded(_block_sums(surprise_RV)) / self.total_R1)[:, 0]


def _block_sums(values_RV: Tensor) -> Tensor:
    """[R, B]: sums over the blocks of the vocabulary."""
    num_rows, vocabulary = values_RV.shape
    whole = vocabulary - vocabulary % BLOCK
    blocks_RBN = values_RV[:, :whole].view(num_rows, whole // BLOCK, BLOCK)
    sums_RB = blocks_RBN.sum(-1) if whole >= MANY_BLOCKS * BLOCK else _folded(blocks_RBN)[..., 0]
    return sums_RB if whole == vocabulary else torch.cat((sums_RB, _folded(values_RV[:, whole:])), dim=1)


def _folded(values: Tensor) -> Tensor:
    """Sums over the last dimension, which stays as one, by adding halves."""
    while (width := values.shape[-1]) > 1:
        half = width // 2
        folded = values[..., :half] + values[..., half : 2 * half]
        values = folded if width % 2 == 0 else torch.cat((folded, values[..., -1:]), dim=-1)
    return values
