"""Products and attention on a CPU whose bits do not depend on what is computed beside them.

A library multiplies few rows by another routine than many, so a token's log-probability would depend on its company.
Cut into tiles of one constant size, every row is computed alike: alone or in a batch, in a prompt or token by token.
Owns: exact arithmetic on a CPU. Refuses: speed at any price; a tile that is not full is padded.
Shapes: N rows of a batch, Q queries, L keys, H heads, K kv-heads, G queries per kv-head, D head size, _T packed tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

ROWS_PER_TILE = 32
"""Rows of one tile in a matrix product with weights."""
QUERIES_PER_TILE = 8
"""Few: a decode step has only the heads that share keys, and pads them to a tile."""
KEYS_PER_TILE = 64


def tiled_linear(hidden_TD: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """hidden @ weight.T + bias; bfloat16 is multiplied in float32 and rounded once."""
    if not torch.is_grad_enabled():
        return _tiled(hidden_TD, weight, bias)
    return _TiledLinear.apply(hidden_TD, weight, bias)  # type: ignore[no-any-return, no-untyped-call]


class _TiledLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(hidden_TD, weight)
        return _tiled(hidden_TD, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients need no tiles: both sides must agree on the policy, not on its slope."""
        (grad_TO,) = grads
        hidden_TD, weight = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad
        wide = _wide(grad_TO)
        grad_hidden = (wide @ _wide(weight)).to(grad_TO.dtype) if wants_hidden else None
        grad_weight = (wide.t() @ _wide(hidden_TD)).to(weight.dtype) if wants_weight else None
        grad_bias = wide.sum(0).to(grad_TO.dtype) if wants_bias else None
        return grad_hidden, grad_weight, grad_bias


def _tiled(hidden_TD: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    count = len(hidden_TD)
    padded = functional.pad(_wide(hidden_TD), (0, 0, 0, -count % ROWS_PER_TILE))
    wide = _wide(weight)
    output = padded.new_empty(len(padded), len(weight))
    for start in range(0, len(padded), ROWS_PER_TILE):
        tile = slice(start, start + ROWS_PER_TILE)
        # Weights on the left: libraries repack what stands on the right, which a tile of few rows would not repay.
        output[tile] = torch.mm(wide, padded[tile].t()).t()
    if bias is not None:
        output += _wide(bias)
    return output[:count].to(hidden_TD.dtype)


def spelled_silu_mul(gate_up_T2F: Tensor) -> Tensor:
    """silu(gate) * up from its parts.

    torch.silu computes the last few numbers of a thread's share by another routine than the rest, so a row's bits would
    depend on where the threads divide the batch; exp and the quotient have one routine each.
    """
    gate, up = gate_up_T2F.chunk(2, dim=-1)
    wide = _wide(gate)
    return (wide / (1 + torch.exp(-wide))).to(gate.dtype) * up


def spelled_sigmoid(x: Tensor) -> Tensor:
    """For the same reason from its parts."""
    wide = _wide(x)
    return (1 / (1 + torch.exp(-wide))).to(x.dtype)


def exact_attention(
    query: Tensor, key: Tensor, value: Tensor, positions_NQ: Tensor, scaling: float, sliding_window: int | None
) -> Tensor:
    """query [N, Q, H, D] at these positions, key and value [N, L, K, D] from position 0 on -> [N, Q, H, D].

    Keys are visited in tiles, in order, with a running maximum. A tile that a query does not see multiplies what it has
    by one and adds zero, so it makes no difference how far the keys are padded.
    """
    num_rows, num_queries, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[2]
    per_kv = num_heads // num_kv_heads
    wide = torch.promote_types(query.dtype, torch.float32)
    # [N, K, Q * G, D]: query-major, so that late keys can skip early queries.
    folded = query.view(num_rows, num_queries, num_kv_heads, per_kv, head_dim).transpose(1, 2).flatten(2, 3).to(wide)
    folded = functional.pad(folded, (0, 0, 0, -folded.shape[2] % QUERIES_PER_TILE)) * scaling
    # Padded queries sit where the last one does: a tile that all others see in full needs no mask for them either.
    asking = torch.arange(folded.shape[2]).clamp(max=num_queries * per_kv - 1) // per_kv
    places = positions_NQ[:, asking]
    keys, values = (
        functional.pad(t.transpose(1, 2).to(wide), (0, 0, 0, -t.shape[1] % KEYS_PER_TILE)) for t in (key, value)
    )
    maximum = folded.new_full((*folded.shape[:3], 1), -torch.inf)
    total, output = torch.zeros_like(maximum), torch.zeros_like(folded)
    last = places.amax(0)
    for start in range(0, keys.shape[2], KEYS_PER_TILE):
        # Queries before the first that sees this tile are done; whole query tiles only, so that tiles stay the same.
        seeing = (last >= start).nonzero()
        if not len(seeing):
            break
        first = int(seeing[0]) // QUERIES_PER_TILE * QUERIES_PER_TILE
        tile = slice(start, start + KEYS_PER_TILE)
        behind = places[:, None, first:, None] - torch.arange(start, start + KEYS_PER_TILE)
        seen = (behind >= 0) if sliding_window is None else (behind >= 0) & (behind < sliding_window)
        scores = _scores(folded[:, :, first:], keys[:, :, tile])
        if not seen.all():
            scores = scores.masked_fill(~seen, -torch.inf)
        before = maximum[:, :, first:]
        now = torch.maximum(before, scores.amax(-1, keepdim=True))
        finite = torch.where(now == -torch.inf, 0.0, now)  # nothing seen yet: exp(-inf - 0) = 0
        shares = torch.exp(scores - finite)
        fade = torch.exp(before - finite)
        maximum[:, :, first:] = now
        total[:, :, first:] = total[:, :, first:] * fade + shares.sum(-1, keepdim=True)
        output[:, :, first:] = output[:, :, first:] * fade + _weighted(shares, values[:, :, tile])
    output = (output / torch.where(total == 0, 1.0, total))[:, :, : num_queries * per_kv]
    output = output.view(num_rows, num_kv_heads, num_queries, per_kv, head_dim).transpose(1, 2)
    return output.reshape(query.shape).to(query.dtype)


def _scores(queries: Tensor, keys: Tensor) -> Tensor:
    """queries [N, K, rows, D] times keys [N, K, columns, D] -> [N, K, rows, columns], by tiles of queries."""
    tiles = queries.reshape(-1, QUERIES_PER_TILE, queries.shape[-1])
    # Keys on the left: transposing the few queries costs less, and some CPUs multiply transposed keys very slowly.
    products = torch.bmm(_per_tile(keys, queries), tiles.transpose(1, 2))
    # Laid out anew, always: the order of a sum depends on how its terms lie in memory.
    return products.transpose(1, 2).contiguous().view(*queries.shape[:3], keys.shape[2])


def _weighted(shares: Tensor, values: Tensor) -> Tensor:
    """shares [N, K, rows, columns] times values [N, K, columns, D] -> [N, K, rows, D], by tiles of queries."""
    tiles = shares.reshape(-1, QUERIES_PER_TILE, shares.shape[-1])
    return torch.bmm(tiles, _per_tile(values, shares)).view(*shares.shape[:3], values.shape[3])


def _per_tile(tensor: Tensor, queries: Tensor) -> Tensor:
    """Keys or values [N, K, columns, D], once for each tile of queries; a view where there is one tile."""
    tiles = queries.shape[2] // QUERIES_PER_TILE
    return tensor.unsqueeze(2).expand(-1, -1, tiles, -1, -1).reshape(-1, *tensor.shape[2:])


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
