"""A second way through the decoders most people train: the same parameters, fewer and larger operations.

The ordinary way is the module's own forward pass. Here queries, keys and values are one matrix product, gate and up
projection another, and additions, norms and rotations are fused: what a decode step or a training step waits for are
launches, not arithmetic. Engine and trainer both come through here, so they round alike.
Owns: the order of operations in a layer. Refuses: attention (given), arithmetic (ops.py), families it does not know.
Shapes: _T packed tokens, _D width, H heads, K kv-heads, _F width of the feed-forward layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from temper.models.experts.few_rows import few_rows_experts, has_few_rows
from temper.models.experts.products import collect, grouped_products, places_of, spread
from temper.models.experts.routing import (
    EXPERT_FAMILIES,
    Routes,
    chosen_experts,
    has_experts,
    is_sparse,
    router_logits,
    weights_of,
)
from temper.models.families import WINDOWED
from temper.models.float8.arithmetic import float8_linear
from temper.models.float8.inputs import Inputs, States, float8_inputs, plain_inputs
from temper.models.float8.layers import Float8Linear
from temper.models.long_rows import feed_forward
from temper.models.lora.expert_factors import expert_products
from temper.models.lora.low_rank import is_adapted, low_rank_linear
from temper.models.nf4.products import four_bit_linear, is_four_bit
from temper.models.ops import Ops, ops_of, product

Numerics = Literal["fast", "exact"]

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Norm, attention, norm, gated feed-forward with SiLU; nothing else. By model_type."""


WALKED_FAMILIES = (*FAMILIES, *EXPERT_FAMILIES)
"""Also those whose feed-forward layers are mixtures of experts."""


def can_walk(model: Any) -> bool:
    return is_walked(model.get_decoder().config.get_text_config())


def is_walked(config: Any) -> bool:
    """The same of a model that is only described."""
    if config.model_type not in WALKED_FAMILIES or config.hidden_act != "silu":
        return False
    return getattr(config, "clip_qkv", None) is None  # OLMoE


def has_seen_routers(config: Any) -> bool:
    """Whether a model of this description has experts, and routers that are told of."""
    return is_walked(config) and config.model_type in EXPERT_FAMILIES


def is_dense(model: Any) -> bool:
    """Whether the model is walked and every matrix of its layers belongs to a linear layer."""
    return can_walk(model) and not has_experts(model)


def numerics_of(model: Any) -> Numerics:
    return getattr(model, "temper_numerics", "fast")


def set_numerics(model: Any, numerics: Numerics) -> None:
    """For every forward pass of this model from now on, the engine's and the trainer's."""
    model.temper_numerics = numerics


def walk(model: Any, token_ids_T: Tensor, positions_T: Tensor, attend: Any, routes: Routes | None = None) -> Tensor:
    """Last hidden states [T, D] of packed tokens, without the head. routes: told of every router's choice."""
    decoder = model.get_decoder()
    ops = ops_of(token_ids_T.device, numerics_of(model))
    residual_TD: Tensor = decoder.embed_tokens(token_ids_T)
    cos, sin = decoder.rotary_emb(residual_TD.unsqueeze(0), positions_T.unsqueeze(0))
    rotation = (cos[0], sin[0])
    hidden_TD: Tensor | None = None
    for layer in decoder.layers:
        if getattr(layer, "temper_cut", False):  # called, so that torch gathers it first; it recomputes by itself
            hidden_TD, residual_TD = layer(ops, hidden_TD, residual_TD, rotation, attend, routes)
        elif layer.training and getattr(layer, "gradient_checkpointing", False) and torch.is_grad_enabled():
            hidden_TD, residual_TD = layer._gradient_checkpointing_func(
                layer_forward, layer, ops, hidden_TD, residual_TD, rotation, attend, routes
            )
        else:
            hidden_TD, residual_TD = layer_forward(layer, ops, hidden_TD, residual_TD, rotation, attend, routes)
    assert hidden_TD is not None, "a decoder has layers"
    return ops.add_rms_norm(hidden_TD, residual_TD, decoder.norm.weight, decoder.norm.variance_epsilon)[0]


def layer_forward(
    layer: Any, ops: Ops, hidden_TD: Tensor | None, residual_TD: Tensor, rotation: tuple[Tensor, Tensor], attend: Any,
    routes: Routes | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What the layer adds, and what it is added to: the next norm does the addition."""
    inputs, norm = _inputs_of(layer, ops), layer.input_layernorm
    normed_TD, residual_TD = inputs.add_norm(hidden_TD, residual_TD, norm.weight, norm.variance_epsilon)
    attended_TD = _together(layer.self_attn, partial(_attention, ops=ops, rotation=rotation, attend=attend), normed_TD)
    norm = layer.post_attention_layernorm
    if is_sparse(layer.mlp):
        normed_TD, residual_TD = ops.add_rms_norm(attended_TD, residual_TD, norm.weight, norm.variance_epsilon)
        return mix_experts(layer, ops, normed_TD, routes), residual_TD
    # In every pass of such a layer, so that a pass without gradient has the same bits.
    is_long = len(residual_TD) > feed_forward.CHUNK_TOKENS and not hasattr(layer.mlp, "temper_together")
    if is_long and getattr(layer, "gradient_checkpointing", False):
        whole_TD, residual_TD = ops.add_rms_norm(attended_TD, residual_TD, norm.weight, norm.variance_epsilon)
        compute = partial(_feed_forward, layer.mlp, ops=ops, inputs=inputs)
        return feed_forward.in_chunks(compute, whole_TD, list(layer.mlp.parameters())), residual_TD
    normed_TD, residual_TD = inputs.add_norm(attended_TD, residual_TD, norm.weight, norm.variance_epsilon)
    return _together(layer.mlp, partial(_feed_forward, ops=ops, inputs=inputs), normed_TD), residual_TD


def _together(module: Any, compute: Callable[..., Tensor], normed_TD: States) -> Tensor:
    """compute(module, normed_TD), with other processes where they hold slices of its matrices, too."""
    with_others = getattr(module, "temper_together", None)
    compute = partial(compute, module)
    return compute(normed_TD) if with_others is None else with_others(compute, normed_TD)


def _inputs_of(layer: Any, ops: Ops) -> Inputs:
    """float8_copy takes all matrices of a layer or none."""
    return (float8_inputs if isinstance(layer.self_attn.o_proj, Float8Linear) else plain_inputs)(ops)


def _feed_forward(mlp: Any, normed_TD: States, ops: Ops, inputs: Inputs) -> Tensor:
    gated_TF = inputs.silu_mul(_project(ops, normed_TD, (mlp.gate_proj, mlp.up_proj)))
    return _project(ops, gated_TF, (mlp.down_proj,))


def mix_experts(layer: Any, ops: Ops, normed_TD: Tensor, routes: Routes | None) -> Tensor:
    """What the chosen experts of each token say, weighted, and the shared expert where the family has one."""
    mlp, config = layer.mlp, layer.self_attn.config
    logits_TE = router_logits(config, mlp.gate, ops.linear, normed_TD)
    if ops.grouped is grouped_products and has_few_rows(normed_TD, mlp.experts, config.num_experts_per_tok):
        mixed_TD = few_rows_experts(layer, normed_TD, logits_TE, routes)
    else:
        mixed_TD = _many_rows_experts(layer, ops, normed_TD, logits_TE, routes)
    if (shared := _shared_expert(mlp)) is None:
        return mixed_TD
    shared_TD = _feed_forward(shared, normed_TD, ops, plain_inputs(ops))
    if (gate := getattr(mlp, "shared_expert_gate", None)) is not None:
        shared_TD = ops.sigmoid(_project(ops, normed_TD, (gate,))) * shared_TD
    return mixed_TD + shared_TD


def _many_rows_experts(layer: Any, ops: Ops, normed_TD: Tensor, logits_TE: Tensor, routes: Routes | None) -> Tensor:
    mlp, config = layer.mlp, layer.self_attn.config
    experts_TK = chosen_experts(config, mlp.gate, ops.choose, ops.sigmoid, logits_TE)
    if routes is not None:
        logits_TE, experts_TK = routes.route(layer.self_attn.layer_idx, logits_TE, experts_TK)
    weights_TK = weights_of(config, logits_TE, experts_TK, ops.sigmoid)
    places = places_of(experts_TK, logits_TE.shape[1])
    rows_SD = spread(normed_TD, places)
    if (exchange := getattr(mlp.experts, "temper_exchange", None)) is not None:  # other processes hold some of them
        said_SD = exchange(partial(_say, ops), mlp.experts, rows_SD, places.ends_E)
    else:
        multiply = partial(expert_products, ops.grouped, experts=mlp.experts, ends_E=places.ends_E)
        said_SD = multiply(ops.silu_mul(multiply(rows_SD, name="gate_up_proj")), name="down_proj")
    return ops.mix(collect(said_SD, places, experts_TK.shape[1]), weights_TK)


def _shared_expert(mlp: Any) -> Any:
    """Qwen2's, which has a gate, or GLM's, which has none; None where all experts are chosen."""
    return getattr(mlp, "shared_expert", None) or getattr(mlp, "shared_experts", None)


def _say(ops: Ops, gate_up_EFD: Tensor, down_EDF: Tensor, rows_SD: Tensor, ends_E: Tensor) -> Tensor:
    """What experts say to rows that are sorted by expert."""
    gated_SF = ops.silu_mul(ops.grouped(rows_SD, gate_up_EFD, ends_E))
    return ops.grouped(gated_SF, down_EDF, ends_E)


def _attention(module: Any, normed_TD: States, ops: Ops, rotation: tuple[Tensor, Tensor], attend: Any) -> Tensor:
    joined = _project(ops, normed_TD, (module.q_proj, module.k_proj, module.v_proj))
    heads = joined.reshape(len(joined), -1, module.head_dim)
    num_kv_heads = heads.shape[1] // (module.num_key_value_groups + 2)
    num_heads = heads.shape[1] - 2 * num_kv_heads
    query, key, value = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    if (norm := getattr(module, "q_norm", None)) is not None:
        query, key = _normed(ops, norm, query), _normed(ops, module.k_norm, key)
    window = attention_window(module)
    is_whole = rotation[0].shape[-1] == module.head_dim
    if is_whole and (rotating := getattr(attend, "rotating", None)) is not None:
        output = rotating(module.layer_idx, query, key, value, rotation, scaling=module.scaling, sliding_window=window)
    else:
        query, key = ops.rotate(query, key, *rotation) if is_whole else _rotate_part(ops, query, key, rotation)
        output = attend(module.layer_idx, query, key, value, scaling=module.scaling, sliding_window=window)
    return _project(ops, output.flatten(1), (module.o_proj,))


def _rotate_part(ops: Ops, query: Tensor, key: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The first numbers of every head are rotated, and the others stay (GLM)."""
    width = rotation[0].shape[-1]
    rotated = ops.rotate(query[..., :width].contiguous(), key[..., :width].contiguous(), *rotation)
    whole = [torch.cat((part, heads[..., width:]), -1) for part, heads in zip(rotated, (query, key), strict=True)]
    return whole[0], whole[1]


def _normed(ops: Ops, norm: Any, heads: Tensor) -> Tensor:
    """By head, or over all heads at once (OLMoE): as many numbers as the norm has weights."""
    rows = heads.reshape(len(heads), -1, len(norm.weight))
    return ops.rms_norm(rows, norm.weight, norm.variance_epsilon).view(heads.shape)


def attention_window(module: Any) -> int | None:
    """Qwen's attention knows whether its layer has a window; Mistral's is the configuration's; Llama has none."""
    if hasattr(module, "sliding_window"):
        return module.sliding_window  # type: ignore[no-any-return]
    return getattr(module.config, "sliding_window", None) if module.config.model_type in WINDOWED else None


def _project(ops: Ops, hidden_TD: States, linears: Sequence[Any]) -> Tensor:
    """Outputs of these linear layers side by side: one product when their weights lie end to end in memory."""
    if all(isinstance(linear, Float8Linear) for linear in linears):
        weight, scale = (joined([getattr(linear, name) for linear in linears]) for name in ("weight", "scale"))
        own_biases = [linear.bias for linear in linears if linear.bias is not None]
        return float8_linear(hidden_TD, weight, scale, joined(own_biases) if own_biases else None)
    assert isinstance(hidden_TD, Tensor), "states are quantised for float8 matrices alone"
    if any(is_four_bit(linear) for linear in linears):
        return four_bit_linear(ops.linear, hidden_TD, linears)
    if any(is_adapted(linear) for linear in linears):
        return low_rank_linear(ops.linear, hidden_TD, linears)
    if any(type(linear) is not nn.Linear for linear in linears):
        return torch.cat([linear(hidden_TD) for linear in linears], dim=-1)
    weights = [_own(linear, linear.weight) for linear in linears]
    biases = [_own(linear, linear.bias) for linear in linears if linear.bias is not None]
    if len(linears) == 1:
        return ops.linear(hidden_TD, weights[0], biases[0] if biases else None)
    assert len(biases) in (0, len(linears)), "projections of one layer all have a bias or none has"
    return JoinedLinear.apply(hidden_TD, ops.linear, len(weights), *weights, *biases)  # type: ignore[no-any-return, no-untyped-call]


def _own(linear: Any, parameter: Any) -> Tensor:
    """What this process computes with of a parameter: all of it, unless others hold slices."""
    slice_of = getattr(linear, "temper_slice", None)
    return parameter if slice_of is None else slice_of(parameter)  # type: ignore[no-any-return]


class JoinedLinear(torch.autograd.Function):
    """Several linear layers as one product, forward and backward; each parameter gets its own gradient."""

    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, linear: Any, count: int, *parameters: Tensor) -> Tensor:
        weights, biases = parameters[:count], parameters[count:]
        ctx.save_for_backward(hidden_TD, *weights)
        ctx.sizes = [len(weight) for weight in weights]
        return linear(hidden_TD, joined(weights), joined(biases) if biases else None)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_TO,) = grads
        hidden_TD, *weights = ctx.saved_tensors
        has_bias = len(ctx.needs_input_grad) > 3 + len(weights)
        grad_hidden = product(grad_TO, joined(weights)) if ctx.needs_input_grad[0] else None
        grad_weights: Sequence[Tensor | None] = [None] * len(weights)
        if any(ctx.needs_input_grad[3:]):
            grad_weights = torch.split(product(grad_TO.t(), hidden_TD), ctx.sizes)
        grad_biases = torch.split(grad_TO.sum(0), ctx.sizes) if has_bias else ()
        return grad_hidden, None, None, *grad_weights, *grad_biases


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """The tensors one below the other: a view when they lie so in memory already, else a copy."""
    first = tensors[0]
    if not _lie_end_to_end(tensors):
        return torch.cat(list(tensors))
    return first.detach().as_strided((sum(map(len, tensors)), *first.shape[1:]), first.stride())


def _lie_end_to_end(tensors: Sequence[Tensor]) -> bool:
    first = tensors[0]
    storage, end = first.untyped_storage().data_ptr(), first.data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != end or tensor.untyped_storage().data_ptr() != storage or not tensor.is_contiguous():
            return False
        end += tensor.numel() * tensor.element_size()
    return True


@torch.no_grad()
def lay_end_to_end(model: Any) -> None:
    """Moves the weights of projections that are computed together next to each other. Names and values stay.

    A copy of the model, or one moved to another device, has lost it; the products are then the same and slower.
    """
    if not can_walk(model):
        return
    for layer in model.get_decoder().layers:
        for linears in _computed_together(layer):
            if any(type(linear) is not nn.Linear for linear in linears):
                continue
            for name in ("weight", "bias"):
                parameters = [getattr(linear, name) for linear in linears]
                if all(parameter is not None for parameter in parameters):
                    _place(parameters)


def _computed_together(layer: Any) -> Iterator[tuple[Any, ...]]:
    yield layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj
    mlp = _shared_expert(layer.mlp) if is_sparse(layer.mlp) else layer.mlp
    if mlp is not None:
        yield mlp.gate_proj, mlp.up_proj


def _place(parameters: list[nn.Parameter]) -> None:
    together = torch.cat([parameter.data for parameter in parameters])
    for parameter, part in zip(parameters, torch.split(together, [len(p) for p in parameters]), strict=True):
        parameter.data = part
