"""Bytes of a stage on one of its GPUs, by part and phase.

Owns: the sum. What a layer keeps for its backward pass is read off the code that keeps it: models/decoder.py and its
kernels, trainer/passes/packed_attention.py, sharing.py and logprobs.py. Refuses: measuring (benchmarks/plan.py does),
and choosing settings (choice.py).
Letters: T packed tokens of a microbatch, U those that are computed, A those that are scored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from temper.engine.local.graphs import bucket
from temper.models.decoder import FAMILIES, WALKED_FAMILIES
from temper.models.long_rows.feed_forward import CHUNK_TOKENS as FED_TOKENS
from temper.models.nf4.blocks import BLOCK
from temper.planning.exchange import GRADIENT_BYTES, exchanged_bytes
from temper.planning.shape import DecoderShape
from temper.planning.workload import Workload
from temper.trainer.adamw.footprint import BytesPerParameter, bytes_per_parameter
from temper.trainer.adamw.layout import BUCKET_VALUES
from temper.trainer.passes.logprobs import chunk_bytes_of

CONTEXT_BYTES = 600 << 20
"""What CUDA and its libraries take before the first tensor."""
SPLINTERS = 0.04
"""Share of the memory that torch's allocator cannot hand out: gaps between tensors."""
UPDATE_BYTES_PER_VALUE = 40
"""Temporary tensors of an update, by value of a bucket: masters, moments and random bits, wide."""
BLOCK_TOKENS = 16
"""Of a block of the KV cache (build/policy.py)."""
FOUR_BIT_BYTES = 0.5 + 2 / BLOCK
"""Of a parameter in 4 bits, with its share of a scale (models/nf4)."""
CHUNK_TOKENS = 4096
"""Of the largest recorded pass over prompts (engine/local/chunks.py)."""
MULTIPROCESSORS = 132
"""Among which torch's attention shares out the gradient of few long rows, with a sum of its own for each part."""
ROUNDING = 1.03
"""Activations as they are over activations as they are counted: rows are padded to the longest beside them, tensors to
whole blocks of the allocator. Seen on an H200: 1.00 to 1.04."""
WORKSPACE_BYTES = 160 << 20
"""Of libraries that multiply matrices, for the streams of trainer and engine."""
COLLECTIVE_BYTES = 1 << 30
"""What NCCL is assumed to hold for its channels, where there are several trainers."""
GATHERED_LAYERS = 2
"""Whole layers of a model in parts that are there at once: one that is computed, and the next, which arrives."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    phases: Mapping[str, Mapping[str, float]]
    """Bytes on the GPU by phase of a step, then by part."""
    host_bytes: float
    """In the memory of a host, of all trainers on it."""
    processes: int = 1
    """On the GPU: each has CUDA's own share."""

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()))

    @property
    def peak_bytes(self) -> float:
        """Of tensors: what torch counts as allocated, and sys/peak_memory_bytes shows."""
        return sum(self.phases[self.peak_phase].values())

    @property
    def needed_bytes(self) -> float:
        """What the GPU must have free: with CUDA's own share and the gaps between tensors."""
        return self.peak_bytes / (1 - SPLINTERS) + CONTEXT_BYTES * self.processes


def plan_memory(work: Workload) -> MemoryPlan:
    """Of a trainer's GPU, with all trainers that share it: they compute at once, each with what it holds itself."""
    several = work.trainers_per_gpu
    others = _times(several, {**_frozen(work), **_states(work)})
    lasting = {**_times(several, {"weights": _weights(work)}), **_engine(work), **others}
    phases: dict[str, dict[str, float]] = {}
    if work.samples and work.engines_here:
        phases["rollout"] = {**lasting, "prompts and logits": _engine_pass(work)}
    if work.frozen:
        visiting = max(_weight_bytes(shape, work.itemsize) for shape in work.frozen) if work.offload_frozen else 0.0
        phases["reference"] = {
            **lasting,
            **_times(several, {"visiting model": visiting, "activations": _forward(work), "logits": _logits(work)}),
        }
    if work.trains:
        gradients = _times(several, {"gradients": _gradients(work)})
        passes = _times(several, {**_gathered(work), **_backward(work)})
        phases["forward and backward"] = {**lasting, **gradients, **passes}
        bucket = min(BUCKET_VALUES, work.trained_parameters // work.share)
        buffers = _times(several, {"buffers": float(UPDATE_BYTES_PER_VALUE * bucket)})
        phases["update"] = {**lasting, **gradients, **buffers}
    if not phases:
        phases["rollout"] = lasting
    found = {phase: _present(parts) for phase, parts in phases.items()}
    return MemoryPlan(found, _host(work), processes=several + work.sampler_processes_here)


def kv_bytes_per_token(shape: DecoderShape, itemsize: int) -> float:
    return 2.0 * shape.num_layers * shape.kv_width * itemsize


def _times(count: int, parts: Mapping[str, float]) -> dict[str, float]:
    return {name: count * size for name, size in parts.items()}


def _present(parts: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in parts.items() if value}


def _weight_bytes(shape: DecoderShape, itemsize: int) -> float:
    return float(shape.parameters * itemsize)


def _weights(work: Workload) -> float:
    """Of the policy: all of them, or this trainer's part."""
    factors = 4 * work.trained_parameters if work.adapter is not None else 0  # factors are float32
    whole = _four_bit_weights(work) if work.has_four_bit_base else _weight_bytes(work.shape, work.itemsize)
    return (whole + factors) / work.share


def _four_bit_weights(work: Workload) -> float:
    """Matrices of layers in 4 bits; embeddings and head as ever."""
    return FOUR_BIT_BYTES * work.shape.layers + (work.shape.parameters - work.shape.layers) * work.itemsize


def _gathered(work: Workload) -> dict[str, float]:
    """Of a model in parts: layers that are whole for now, with all that is outside of layers, and what a collective
    reads and writes: weights as they arrive, and the gradients of the largest piece before they are shared out."""
    if work.share == 1:
        return {}
    shape, size = work.shape, work.itemsize
    layer, outside = (shape.layers - work.staying_parameters) / shape.num_layers, shape.parameters - shape.layers
    if shape.num_dense_layers:  # layers differ, and the largest decides
        mlp = shape.mlp - (shape.experts if work.staying_parameters else 0)
        layer = shape.attention + max(mlp, shape.dense_mlp)
    each = size + (size + GRADIENT_BYTES if work.adapter is None else 0)
    return {
        "exchanged tokens": 2.0 * exchanged_bytes(work),
        "gathered layers": float((GATHERED_LAYERS * layer + outside) * size),
        "exchange buffers": float(max(layer, outside) * each),
    }


def _engine(work: Workload) -> dict[str, float]:
    """The sampler's own weights, its cache and what its recorded steps hold; nothing where it is on another GPU."""
    if not work.samples or not work.engines_here:
        return {}
    shape, own = work.shape, 0.0
    if work.has_float8_sampler:
        own = float(shape.layers)
    elif work.engine == "copied" and work.has_four_bit_base:  # a process with a base of its own
        own = _four_bit_weights(work)
    elif work.engine == "copied":  # below an adapter only what that changes is copied
        own = shape.layers * work.itemsize if work.adapter is not None else _weight_bytes(shape, work.itemsize)
    blocks = -(-work.choice.kv_tokens // BLOCK_TOKENS) + work.max_running + 2
    cache = blocks * BLOCK_TOKENS * kv_bytes_per_token(shape, work.itemsize)
    tokens = min(CHUNK_TOKENS, work.pass_tokens)
    # One pool for all recordings, made before step 1: the largest decode step, and the largest pass over prompts.
    graphs = bucket(work.max_running) * shape.vocabulary * 4 + tokens * _pass_width(work) * work.itemsize
    own, cache = own / work.engine_gpus, cache / work.engine_gpus
    parts = {"sampler's weights": own, "KV cache": cache, "graphs": float(graphs) if work.has_graphs else 0.0}
    return {name: work.engines_here * size for name, size in parts.items()}


def _engine_pass(work: Workload) -> float:
    """A chunk of prompts, and the logits of a first token for everyone."""
    chunk = work.pass_tokens * _pass_width(work) * work.itemsize
    return work.engines_here * float(chunk + work.max_running * work.shape.vocabulary * 4 + _made_weight(work))


def _made_weight(work: Workload) -> float:
    """The largest weight that is made of 4 bits for one product."""
    return float(2 * work.shape.widest_matrix * work.shape.width * work.itemsize) if work.has_four_bit_base else 0.0


def _pass_width(work: Workload) -> int:
    """Numbers of a token that are alive at once where nothing is kept."""
    return 4 * work.shape.width + 3 * work.shape.widest_mlp


def _frozen(work: Workload) -> dict[str, float]:
    if work.offload_frozen:
        return {}
    return {"reference and teachers": sum(_weight_bytes(shape, work.itemsize) for shape in work.frozen)}


def _states(work: Workload) -> dict[str, float]:
    """Moments and masters of the policy, and all of the critic, which is trained by turns."""
    if not work.trains:
        return {}
    each = state_bytes(work)
    critic = 0.0
    if work.has_critic:
        whole = bytes_per_parameter(work.choice.states, offload=work.offload, dtype=work.dtype)
        critic = work.shape.parameters * (whole.device - whole.gradients)
    held = each.masters + each.moments - each.host
    return {
        "optimiser states": work.trained_parameters * held / work.share,
        "critic": critic / work.share,
        "workspaces": float(WORKSPACE_BYTES),
        "collectives": float(COLLECTIVE_BYTES) if work.trainers > 1 else 0.0,
    }


def state_bytes(work: Workload) -> BytesPerParameter:
    """Of a trained parameter; factors of an adapter are float32."""
    dtype = work.dtype if work.adapter is None else torch.float32
    return bytes_per_parameter(work.choice.states, offload=work.offload, dtype=dtype)


def _host(work: Workload) -> float:
    """Every trainer of a machine has its own copy there, or its own part; so has a critic."""
    each = state_bytes(work)
    away = sum(_weight_bytes(shape, work.itemsize) for shape in work.frozen) if work.offload_frozen else 0.0
    inputs = work.shape.num_layers * _kept_inputs(work) if _inputs_are_away(work) else 0.0
    states = work.trained_parameters * each.host
    if work.has_critic:
        whole = bytes_per_parameter(work.choice.states, offload=work.offload, dtype=work.dtype)
        states += work.shape.parameters * whole.host
    return work.trainers_per_host * (states / work.share + away + inputs)


def _inputs_are_away(work: Workload) -> bool:
    return work.trains and work.choice.gradient_checkpointing == "offload"


def _gradients(work: Workload) -> float:
    """Summed in float32; those of the critic exist by turns with the policy's."""
    return GRADIENT_BYTES * (work.shape.parameters if work.has_critic else work.trained_parameters) / work.share


def _forward(work: Workload) -> float:
    """Without gradient: what one layer holds at once."""
    states = work.computed_tokens * _pass_width(work) * work.itemsize + work.packed_tokens * _attention(work)
    return float(states + _made_weight(work))


def _backward(work: Workload) -> dict[str, float]:
    """What is alive at the worst moment of a microbatch: while the head's gradient is made, or a layer's.

    Once for each layer: everything, or the two states that it starts from where it is computed again.
    """
    shape, size, computed = work.shape, work.itemsize, work.computed_tokens
    if work.choice.gradient_checkpointing:
        # On the host, but for a layer that leaves, one in work and one that arrives.
        num_kept = min(3, shape.num_layers) if work.choice.gradient_checkpointing == "offload" else shape.num_layers
        kept, again = num_kept * _kept_inputs(work), max(_layer(work, *kind) for _, *kind in _kinds(shape))
    else:
        kept, again = sum(count * _layer(work, *kind) for count, *kind in _kinds(shape)), 0.0
    ends = float((2 * computed + work.packed_tokens + 2 * work.scored_tokens) * shape.width * size)
    activations = ROUNDING * (kept + ends)
    is_head_trained = work.adapter is None and not work.has_own_head
    # Summed in float32, and at the end rounded beside it.
    head = shape.embedding * (6.0 if size == 2 else 4.0) if is_head_trained else 0.0
    # The head's part of a tied gradient waits for the embedding's.
    waiting = float(shape.embedding * size) if is_head_trained and shape.is_tied else 0.0
    slopes = again + waiting + _slopes(work)
    logits = 0.0 if work.has_own_head else _logits(work)
    if head + logits >= slopes:
        return {"activations": activations, "logits": logits, "head's gradient": head}
    return {"activations": activations + again, "gradients of a layer": slopes - again}


def _kept_inputs(work: Workload) -> float:
    """Bytes that a layer which is computed again starts from: two states."""
    return float(2 * work.shape.width * work.computed_tokens * work.itemsize)


def _fed_tokens(work: Workload) -> int:
    """Tokens that are inside a feed-forward layer at once."""
    is_cut = work.choice.gradient_checkpointing and work.shape.family in FAMILIES
    return min(work.computed_tokens, FED_TOKENS) if is_cut else work.computed_tokens


def _kinds(shape: DecoderShape) -> list[tuple[int, int, int]]:
    """Of each kind of layer: how many there are, a token's numbers inside the feed-forward part, and its experts."""
    kinds = [(shape.num_layers - shape.num_dense_layers, shape.active_mlp_width, shape.experts_per_token)]
    return [*kinds, (shape.num_dense_layers, shape.dense_mlp_width, 0)] if shape.num_dense_layers else kinds


def _layer(work: Workload, mlp_width: int, experts_per_token: int) -> float:
    """Bytes that one layer of this kind keeps for its backward pass."""
    shape = work.shape
    # Two sums and two normed states, gate and up, their product, what attention says. Modules that are not walked norm
    # in float32 and keep gate, its SiLU and up apart.
    is_walked = shape.family in WALKED_FAMILIES
    norms, wide = (4, 3) if is_walked else (8, 4)
    if shape.family.startswith(("gemma", "olmo2")):
        norms *= 2
    by_computed = norms * shape.width + shape.query_width + 2 * experts_per_token * shape.width
    fed = _fed_tokens(work) * wide * mlp_width
    return float((work.computed_tokens * by_computed + fed) * work.itemsize + work.packed_tokens * _attention(work))


def _attention(work: Workload) -> float:
    """Bytes that attention keeps of a packed token: query, key and value, its output, and a sum for each head."""
    shape = work.shape
    is_grouped = work.itemsize == 2 and all(window is None or window >= work.row_tokens for window in shape.windows)
    keys = shape.kv_width if is_grouped else shape.query_width  # other kernels want a key for every query
    return (2 * shape.query_width + 2 * keys) * work.itemsize + 4 * shape.num_heads


def _slopes(work: Workload) -> float:
    """Temporary tensors while the gradient of one layer is made, beyond what its own nodes free."""
    shape, size = work.shape, work.itemsize
    matrix = 2 * shape.widest_matrix * shape.width
    if work.adapter is not None and "experts" in work.adapter.targets:
        matrix = max(matrix, 2 * shape.mlp_width * shape.width * shape.num_experts)
    merged = matrix * size
    if (
        work.adapter is not None and not work.has_four_bit_base
    ):  # weights with their adapter are made again, in float32 first
        merged += matrix // 2 * (8 + size)
    mlp = (_fed_tokens(work) * 2 * shape.widest_mlp + work.computed_tokens * 2 * shape.width) * size + merged
    parts = -(-MULTIPROCESSORS // (work.num_rows * shape.num_heads))
    attention = work.packed_tokens * shape.query_width * (4 * parts + 2 * size)
    freed = _fed_tokens(work) * 3 * shape.widest_mlp * size
    return float(max(mlp, attention - freed))


def _logits(work: Workload) -> float:
    """A chunk of logits in float32 and its gradient."""
    logits = work.scored_tokens * work.shape.vocabulary * 4
    chunk = min(chunk_bytes_of(logits, "cuda"), logits)
    return chunk * (1 + work.itemsize / 4)
