"""Where a published tensor lies in vLLM's model, whose parameters are stacked and shared out over ranks.

Owns: finding every tensor's place, and putting tensors together again from what ranks hold. Refuses: models whose
tensors it cannot find again one by one. Written against vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from temper.engine.manifest import TensorFacts
from temper.errors import BackendError

EXPERT_FAMILIES = ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe")
"""Whose experts were published to it, drawn with and read back; by model_type."""
EXPERTS = {"gate_up_proj": "w13_weight", "down_proj": "w2_weight"}
"""Stacks of experts: names in transformers and in vLLM, which holds both in one layout."""
PADDING = 64
"""Rows of embedding and head in vLLM are a multiple of this; nobody draws or reads the added ones."""


def plan_of(
    tensors: Mapping[str, TensorFacts],
    parameters: Mapping[str, Tensor],
    packed: Mapping[str, list[str]],
    num_ranks: int = 1,
) -> dict[str, list[str]]:
    """For each of vLLM's parameters the published tensors that are stacked in it, first to last. num_ranks: how many
    share the model (tensor parallelism); `parameters` are those of one of them.

    Raises BackendError unless every tensor has its one place and every parameter is filled.
    """
    plan: dict[str, list[str]] = {}
    order = {part: place for parts in packed.values() for place, part in enumerate(parts)}
    for name in sorted(tensors, key=lambda name: max(order.get(word, 0) for word in name.split("."))):
        plan.setdefault(_target_of(name, parameters, packed), []).append(name)
    if left := sorted(parameters.keys() - plan.keys()):
        raise BackendError(f"nothing was published for {left[:3]} of vLLM's model; nothing was loaded")
    for target, names in plan.items():
        own, pieces = parameters[target], [tensors[name] for name in names]
        dtype = str(own.dtype).removeprefix("torch.")
        cut = _cut_of(target, tuple(own.shape), pieces, num_ranks)
        if cut is None or {piece.dtype for piece in pieces} != {dtype}:
            published = ", ".join(f"{tensors[name].shape} {tensors[name].dtype}" for name in names)
            shared = f" on each of {num_ranks} ranks" if num_ranks > 1 else ""
            raise BackendError(
                f"{target} of vLLM's model is {tuple(own.shape)} {dtype}{shared}, and {names} are {published}; nothing "
                f"was loaded. Models that vLLM stores in another layout are not supported"
            )
    return plan


def join_shares(
    target: str, pieces: Mapping[str, TensorFacts], shares: Sequence[Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Published tensors, put together from what each rank holds of the parameter in which they are stacked."""
    cut = _cut_of(target, tuple(shares[0].shape), [*pieces.values()], len(shares))
    if cut == "none" and not all(torch.equal(share, shares[0]) for share in shares[1:]):
        raise BackendError(f"ranks of vLLM's model hold different values of {target}, of which each should have all")
    if cut != 0:
        shares = [torch.cat([*shares], dim=1) if cut == 1 else shares[0]]
    start = 0
    for name, facts in pieces.items():
        # A vocabulary stands alone in its parameter, and ends with padding.
        rows = shares[0].shape[0] if len(pieces) == 1 else facts.shape[0] // len(shares)
        found = [share[start : start + rows] for share in shares]
        yield name, (found[0] if len(found) == 1 else torch.cat(found))[: facts.shape[0]]
        start += rows


def _cut_of(
    target: str, own: tuple[int, ...], pieces: Sequence[TensorFacts], num_ranks: int
) -> Literal["none", 0, 1] | None:
    """Along which dimension ranks share a parameter; "none": each has all of it. None: it holds something else."""
    rows, others = sum(piece.shape[0] for piece in pieces), {piece.shape[1:] for piece in pieces}
    if "embed" in target or "lm_head" in target:
        rows = -(-rows // PADDING) * PADDING
    elif len(pieces) > 1 and any(piece.shape[0] % num_ranks for piece in pieces):
        return None
    whole = (rows, *next(iter(others)))
    if len(others) > 1:
        return None
    if own == whole:
        return "none"
    if own == (rows / num_ranks, *whole[1:]):
        return 0
    return 1 if len(whole) > 1 and len(pieces) == 1 and own == (rows, whole[1] / num_ranks, *whole[2:]) else None


def _target_of(name: str, parameters: Mapping[str, Tensor], packed: Mapping[str, list[str]]) -> str:
    if name in parameters:
        return name
    block, _, stack = name.rpartition(".experts.")
    own = f"{block}.experts.routed_experts.{EXPERTS[stack]}" if stack in EXPERTS else name
    for target in (own, own.replace(".mlp.", ".block_sparse_moe.")):  # the other is Mixtral's
        if target in parameters:
            return target
    for fused, parts in packed.items():
        for part in parts:
            target = name.replace(f".{part}.", f".{fused}.")
            if target != name and target in parameters:
                return target
    raise BackendError(f"vLLM's model has no place for {name}; nothing was loaded")
