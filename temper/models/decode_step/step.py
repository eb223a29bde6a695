"""A decode step of few rows on a GPU, layer by layer: decoder.walk in fewer launches, with faster products.

Products hand on sums that are not added up yet: the norm or rotation that reads them next adds them. On Hopper and
newer small kernels start before the one in front of them has ended (kernels/chain.py).
Owns: which models go this way, and the order of launches. Refuses: gradients, exact numerics, weights that are not
plain half-precision matrices; arithmetic (kernels/decode_step.py).
Shapes: _N rows, M blocks per row, _D width, _F inner width of the feed-forward layer, _P parts of a sum, _O outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from temper.models.decode_step.tiles import SHARED_BYTES, tiles_of
from temper.models.decoder import attention_window, can_walk, joined, mix_experts, numerics_of
from temper.models.experts.routing import Routes, is_sparse
from temper.models.ops import ops_of

if TYPE_CHECKING:
    from temper.models.kernels.chain import ChainRole

CHAINS_FROM = (9, 0)
"""Compute capability from which on kernels may start before their turn."""
SMALL_BYTES = 8 * 2**20
"""Weights of a small product (see kernels/chain.py): 6 MB come in 3.6 us in place of 4.2, 27 MB in 11.1 in place of
10.1 (seen on an H200)."""
SMALL_PROGRAMS = 256
"""Of attention over short rows."""
LayerCache = Callable[[int], tuple[Tensor, Tensor]]
"""Keys and values of a layer, [blocks, block size, K, D] each."""


class RowPlaces(NamedTuple):
    """Where the rows of a step are."""

    positions_N: Tensor
    blocks_NM: Tensor
    splits: int
    """See decode_attention."""


def has_room(device: torch.device) -> bool:
    """Whether the tiles fit into the shared memory of this GPU: those of Hopper and of Blackwell for servers. On a CPU
    Triton's interpreter has all it wants."""
    if device.type != "cuda":
        return True
    room: int = torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor
    return room > SHARED_BYTES


def can_step(model: Any) -> bool:
    """Whether every layer is made of what this file knows."""
    if not can_walk(model) or numerics_of(model) == "exact" or getattr(model, "temper_cut", False):
        return False
    decoder = model.get_decoder()
    width = _rotation(decoder, 1)[0].shape[-1]
    return all(_is_plain(layer) and layer.self_attn.head_dim == width for layer in decoder.layers)


def _is_plain(layer: Any) -> bool:
    attention, mlp = layer.self_attn, layer.mlp
    with_bias = [attention.q_proj, attention.k_proj, attention.v_proj]
    linears = [*with_bias, attention.o_proj, *([] if is_sparse(mlp) else [mlp.gate_proj, mlp.up_proj, mlp.down_proj])]
    if any(type(linear) is not nn.Linear or hasattr(linear, "temper_slice") for linear in linears):
        return False
    if any(linear.bias is not None for linear in linears if linear not in with_bias):
        return False  # no norm adds it
    norm = getattr(attention, "q_norm", None)
    is_by_head = norm is None or len(norm.weight) == attention.head_dim
    return is_by_head and attention.q_proj.weight.dtype in (torch.bfloat16, torch.float16)


@torch.no_grad()
def _rotation(decoder: Any, count: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the first so many positions [count, D]."""
    weight = decoder.embed_tokens.weight
    cos, sin = decoder.rotary_emb(weight[:1, None], torch.arange(count, device=weight.device).unsqueeze(0))
    return cos[0].contiguous(), sin[0].contiguous()


class DecodeStep:
    """The decode steps of one model over one cache."""

    def __init__(self, model: Any, cache: LayerCache, longest: int) -> None:
        """longest: more positions than any row has."""
        from temper.models.kernels.chain import ChainRole  # triton is there with a GPU only

        self._model, self._cache = model, cache
        self._rotation = _rotation(model.get_decoder(), longest)
        device = self._rotation[0].device
        self._ops = ops_of(device, "fast")
        is_chained = device.type == "cuda" and torch.cuda.get_device_capability(device) >= CHAINS_FROM
        self._small, self._large = (
            (ChainRole.SMALL, ChainRole.LARGE) if is_chained else (ChainRole.NONE, ChainRole.NONE)
        )

    def states(self, tokens_N: Tensor, places: RowPlaces, routes: Routes | None = None) -> Tensor:
        """Last hidden states [N, D]; stores keys and values of the tokens."""
        decoder = self._model.get_decoder()
        residual_ND: Tensor = decoder.embed_tokens(tokens_N)
        lengths_N = places.positions_N + 1
        said_PND: Tensor | None = None
        for layer in decoder.layers:
            normed_ND, residual_ND = self._add_norm(said_PND, residual_ND, layer.input_layernorm)
            said_PND = self._attention(layer.self_attn, normed_ND, places, lengths_N)
            normed_ND, residual_ND = self._add_norm(said_PND, residual_ND, layer.post_attention_layernorm)
            if is_sparse(layer.mlp):
                said_PND = mix_experts(layer, self._ops, normed_ND, routes).unsqueeze(0)
            else:
                said_PND = self._feed_forward(layer.mlp, normed_ND)
        return self._add_norm(said_PND, residual_ND, decoder.norm)[0]

    def _add_norm(self, said_PND: Tensor | None, residual_ND: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
        from temper.models.kernels.decode_step import add_norm

        return add_norm(said_PND, residual_ND, norm.weight, norm.variance_epsilon, self._small)

    def _attention(self, module: Any, normed_ND: Tensor, places: RowPlaces, lengths_N: Tensor) -> Tensor:
        from temper.models.kernels.decode_step import rotate_and_store_parts
        from temper.models.kernels.tiled_attention import decode_attention

        linears = (module.q_proj, module.k_proj, module.v_proj)
        biases = [linear.bias for linear in linears if linear.bias is not None]
        norms = None
        if (norm := getattr(module, "q_norm", None)) is not None:
            norms = norm.weight, module.k_norm.weight, norm.variance_epsilon
        keys, values = self._cache(module.layer_idx)
        query_NHD = rotate_and_store_parts(
            self._product(normed_ND, joined([linear.weight for linear in linears])), joined(biases) if biases else None,
            norms, self._rotation, places.positions_N, places.blocks_NM, (keys, values), self._small,
        )  # fmt: skip
        is_small = places.splits == 1 and len(query_NHD) * keys.shape[2] <= SMALL_PROGRAMS
        output_NHD = decode_attention(
            query_NHD, keys, values, places.blocks_NM, lengths_N, scaling=module.scaling,
            sliding_window=attention_window(module), splits=places.splits, role=self._role(is_small),
        )  # fmt: skip
        return self._product(output_NHD.flatten(1), module.o_proj.weight)

    def _feed_forward(self, mlp: Any, normed_ND: Tensor) -> Tensor:
        from temper.models.kernels.decode_step import gated_product

        weight_2FD = joined([mlp.gate_proj.weight, mlp.up_proj.weight])
        tiles = tiles_of(len(normed_ND), len(weight_2FD) // 2, weight_2FD.shape[1], is_gated=True)
        gated_NF = gated_product(normed_ND, weight_2FD, tiles, self._role(weight_2FD.nbytes <= SMALL_BYTES))
        return self._product(gated_NF, mlp.down_proj.weight)

    def _product(self, states_ND: Tensor, weight_OD: Tensor) -> Tensor:
        """Parts of a sum [P, N, O]."""
        from temper.models.kernels.decode_step import product_parts

        tiles = tiles_of(len(states_ND), *weight_OD.shape)
        return product_parts(states_ND, weight_OD, tiles, self._role(weight_OD.nbytes <= SMALL_BYTES))

    def _role(self, is_small: bool) -> ChainRole:
        return self._small if is_small else self._large
