"""Bytes and seconds of what GPUs send to each other: collectives of trainers, and weights on their way to samplers.

Owns: the estimate from the links of data sheets. Refuses: contention, broken links and other programs on the network.
A collective is a ring: every rank receives all that it lacks once, and every machine all that its GPUs lack once, by
the networks of all its GPUs together; both flow at the same time. Nothing here was measured on several GPUs.
"""

from __future__ import annotations

from temper.planning.gpus import Gpu
from temper.planning.workload import Workload

LINK_REACH = 0.75
"""Share of a link's rate that large messages are assumed to reach."""
START_SECONDS = 8.4e-6
MACHINE_HOP_SECONDS, NETWORK_HOP_SECONDS = 3.4e-6, 14e-6
"""Of a ring, by what NCCL itself reckons with (src/graph/tuning.cc: Ring, Simple): to begin, and for every rank that a
message passes on its way, inside a machine and between two."""
GRADIENT_BYTES = 4
"""Of a gradient on its way: sums are float32, as in memory."""


def ring_seconds(size_bytes: float, ranks: int, gpu: Gpu) -> float:
    """Of gathering so many bytes that are shared out over the ranks, or of adding up so many and sharing out the sum
    (all_gather, reduce_scatter). Both, one after the other, are an all_reduce."""
    if ranks == 1:
        return 0.0
    machines = -(-ranks // gpu.per_machine)
    inside = size_bytes * (1 - 1 / ranks) / gpu.peer_link
    between = size_bytes * (1 - 1 / machines) / (gpu.network * gpu.per_machine)
    hops = (ranks - machines) * MACHINE_HOP_SECONDS + (machines - 1) * NETWORK_HOP_SECONDS
    return max(inside, between) / LINK_REACH + START_SECONDS + hops


def tokens_seconds(size_bytes: float, ranks: int, gpu: Gpu) -> float:
    """Of sending so many bytes from every rank, as many to each (all_to_all). What goes to other machines goes by the
    network of the rank that sends it."""
    if ranks == 1:
        return 0.0
    machines = -(-ranks // gpu.per_machine)
    inside, between = size_bytes * (1 - 1 / ranks) / gpu.peer_link, size_bytes * (1 - 1 / machines) / gpu.network
    hop = NETWORK_HOP_SECONDS if machines > 1 else MACHINE_HOP_SECONDS
    return max(inside, between) / LINK_REACH + START_SECONDS + hop


def exchanged_bytes(work: Workload) -> float:
    """Of the tokens of a microbatch on their way to the experts of one layer, or to all that compute it, or back."""
    if work.tensor > 1:
        return float(work.microbatch_tokens * work.shape.width * work.itemsize)
    sent = work.shape.experts_per_token if work.sends_to_experts else 0
    return float(work.computed_tokens * sent * work.shape.width * work.itemsize)


def expert_seconds(work: Workload, gpu: Gpu) -> float:
    """Of all tokens of a microbatch to experts and back, in each layer: forward, backward, and once more where layers
    are computed again. Experts wait for them, so nothing hides it."""
    if not work.sends_to_experts:
        return 0.0
    ways = 6 if work.choice.gradient_checkpointing else 4
    return ways * work.shape.expert_layers * tokens_seconds(exchanged_bytes(work), work.trainers, gpu)


def context_seconds(work: Workload, gpu: Gpu) -> float:
    """Of all tokens of a microbatch to the heads of one layer's attention and back, where GPUs go over rows together;
    as often as those to experts. Where they compute layers together: to all of them and back, twice a layer."""
    if work.context == 1:
        return 0.0
    shape, ways = work.shape, 3 if work.choice.gradient_checkpointing else 2
    if work.tensor > 1:
        return ways * shape.num_layers * 4 * ring_seconds(exchanged_bytes(work), work.tensor, gpu)
    there, back = shape.query_width + 2 * max(shape.kv_width, shape.head_dim * work.context), shape.query_width
    sent = (tokens_seconds(work.packed_tokens * width * work.itemsize, work.context, gpu) for width in (there, back))
    return ways * shape.num_layers * sum(sent)


def layer_sums_seconds(work: Workload, tokens: int, gpu: Gpu) -> float:
    """Of an engine whose matrices are shared out: behind attention and behind the feed-forward layer, what each GPU has
    of a token's states is added up on all of them. Of so many tokens, in all layers; nothing hides it."""
    size = tokens * work.shape.width * work.itemsize
    return work.shape.num_layers * 4 * ring_seconds(size, work.engine_gpus, gpu)


def weight_bytes(work: Workload) -> float:
    """Of all weights as they are sent."""
    return float(work.shape.parameters * work.itemsize)


def gather_seconds(work: Workload, gpu: Gpu, *, stays: bool = True) -> float:
    """Of gathering all layers once, one by one; copies gather nothing. stays: whether experts that are computed where
    they are stay there."""
    if work.share == 1:
        return 0.0
    groups = work.shape.num_layers + 1  # what is outside of the layers is one more
    size = weight_bytes(work) - (work.staying_parameters * work.itemsize if stays else 0)
    return groups * ring_seconds(size / groups, work.trainers, gpu)


def gradient_seconds(work: Workload, gpu: Gpu) -> float:
    """Of adding up all gradients once: copies want the whole sum, parts their own share of it, layer by layer."""
    size = float(GRADIENT_BYTES * work.trained_parameters)
    if work.share == 1:
        return 2 * ring_seconds(size, work.trainers, gpu)
    size -= GRADIENT_BYTES * work.staying_parameters  # who holds them has the gradient of all tokens
    groups = work.shape.num_layers + 1
    return groups * ring_seconds(size / groups, work.trainers, gpu)


def exchange_seconds(work: Workload, gpu: Gpu, computing: float) -> float:
    """Of one optimiser step, beyond `computing`, the seconds of its forward and backward passes on one GPU.

    Copies add up gradients when the last microbatch is done, and nothing hides it. Parts gather every layer in the
    forward pass and again in the backward pass of each microbatch, while the layer before is computed, and add up
    gradients with each of them: waiting for the last one would need whole gradients on every GPU. So a microbatch takes
    as long as the longer of the two, and the first layer is waited for; so are tokens that travel to experts or heads.
    """
    if work.trainers == 1:
        return 0.0
    if work.share == 1:
        return gradient_seconds(work, gpu) + work.microbatches * context_seconds(work, gpu)
    gathering = gather_seconds(work, gpu)
    sent = 2 * gathering + gradient_seconds(work, gpu)
    first = gathering / (work.shape.num_layers + 1)
    tokens = expert_seconds(work, gpu) + context_seconds(work, gpu)
    return work.microbatches * (max(0.0, sent - computing / work.microbatches) + first + tokens)


def publishing_seconds(work: Workload, gpu: Gpu) -> float:
    """Of new weights, until every sampler has them. Parts are gathered first; samplers on the trainers' GPUs copy them
    there, others get them from one trainer, each passing on what it receives."""
    if work.engine == "shared":
        return 0.0
    size = weight_bytes(work)
    gathered = gather_seconds(work, gpu, stays=False)
    if work.engine == "copied":
        return gathered + 3 * size / gpu.bandwidth
    is_near = work.trainers + work.num_samplers <= gpu.per_machine
    return gathered + size / ((gpu.peer_link if is_near else gpu.network) * LINK_REACH)
