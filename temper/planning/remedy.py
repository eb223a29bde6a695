"""The cheapest change of a recipe that makes a stage fit into the memory of a GPU.

Owns: which changes are tried, in which order, and how they are written. Refuses: the sums (memory.py), and changes
that the checks of a recipe would refuse.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from temper.config.memory import KEYS
from temper.models.decoder import FAMILIES, WALKED_FAMILIES
from temper.planning.choice import (
    KV_SHARES,
    LEAST_RUNNING,
    MICROBATCHES,
    SMALL_KV_SHARES,
    SMALL_MICROBATCHES,
    cache_tokens,
    fits,
    possible_states,
)
from temper.planning.gpus import GIB
from temper.planning.memory import plan_memory
from temper.planning.workload import AdapterShape, Workload

REMEDY_RANK = 32
"""Of the adapter that is proposed where nothing else fits."""
WORTHWHILE_BYTES = GIB
"""Of a row's inputs, that they wait on the host: of shorter rows fewer in a microbatch are enough."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """Settings to change, by key of a recipe."""

    changes: Mapping[str, str]
    host_bytes: float = 0.0
    """What then waits in the memory of a host."""

    def __str__(self) -> str:
        written = " and ".join(f"{key} = {value}" for key, value in self.changes.items())
        host = self.host_bytes / GIB
        return f"{written} (with {host:.1f} GiB of the memory of each host)" if self.host_bytes else written


Change = tuple[Callable[[Workload], Workload | None], Callable[[Workload], Mapping[str, str]]]
"""What is planned with it (None: it is set already, or refused here), and from that the values to write, by key."""


def find_remedy(work: Workload, free_bytes: float, host_bytes: float = math.inf) -> Remedy | None:
    """The cheapest change that makes it fit: one alone where one is enough, else several, in order of what they cost.
    None: nothing does. host_bytes: of its host's memory."""
    is_host_short = plan_memory(work).host_bytes > host_bytes
    possible = _CHANGES_BACK + _changes(work) if is_host_short else _changes(work)
    ladder = [change for change in possible if change[0](work) is not None]
    for change in ladder:
        if fits(_all(work, [change])[0], free_bytes, host_bytes):
            return _remedy(work, [change])
    for left_out in _LEFT_OUT:
        changes = [change for change in ladder if change[0] not in left_out]
        for count in range(2, len(changes) + 1):
            if fits(_all(work, changes[:count])[0], free_bytes, host_bytes):
                return _without_needless(work, changes[:count], free_bytes, host_bytes)
    return None


def _remedy(work: Workload, changes: Sequence[Change]) -> Remedy:
    changed, written = _all(work, changes)
    return Remedy(written, plan_memory(changed).host_bytes)


def _all(work: Workload, changes: Sequence[Change]) -> tuple[Workload, dict[str, str]]:
    """The workload after all of these, and what they wrote by key."""
    made = dict[str, str]()
    for apply, write in changes:
        if (changed := apply(work)) is not None:
            work, made = changed, {**made, **write(changed)}
    return work, made


def _without_needless(work: Workload, changes: Sequence[Change], free_bytes: float, host_bytes: float) -> Remedy:
    """The dearest stay longest: what another makes needless is mostly a cheaper one. But of one key the least that
    does is what is written."""
    by_key: dict[tuple[str, ...], list[Change]] = {}
    for change in changes:
        by_key.setdefault(tuple(_all(work, [change])[1]), []).append(change)
    kept = list(changes)
    for change in (change for same in by_key.values() for change in reversed(same)):
        others = [other for other in kept if other is not change]
        if fits(_all(work, others)[0], free_bytes, host_bytes):
            kept = others
    return _remedy(work, kept)


def _changes(work: Workload) -> list[Change]:
    smaller = [size for size in MICROBATCHES + SMALL_MICROBATCHES if size < work.choice.tokens_per_microbatch]
    changes: list[Change] = [_microbatch(size) for size in smaller if size >= min(work.row_tokens, smaller[0])]
    if work.trains:
        changes += [
            (_checkpointed, lambda changed: {KEYS["gradient_checkpointing"]: "true"}),
            (_inputs_away, lambda changed: {KEYS["gradient_checkpointing"]: '"offload"'}),
            (_in_parts, _write_parts),
            (_compact, lambda changed: {KEYS["states"]: f'"{changed.choice.states}"'}),
            (_offloaded, lambda changed: {"optim.offload": "true"}),
            (_adapted, lambda changed: {"model.lora": f"{{rank = {REMEDY_RANK}}}"}),
            (_four_bit, _write_base if work.adapter is None else lambda changed: {"model.lora.base": '"4bit"'}),
        ]
    if work.frozen:
        changes.append((_frozen_away, lambda changed: {"model.offload": "true"}))
    if work.samples and work.engine != "elsewhere":  # a sampler's own GPU may be the one that is full
        changes += [_smaller_cache(share) for share in KV_SHARES[1:] + SMALL_KV_SHARES]
        for size in _halves(work.max_running):
            changes += [_fewer_running(size), _fewer_with_cache(size)]
    return changes


def _chosen(work: Workload, **changes: Any) -> Workload:
    return replace(work, choice=replace(work.choice, **changes))


def _microbatch(size: int) -> Change:
    return (
        lambda work: _chosen(work, tokens_per_microbatch=size) if work.choice.tokens_per_microbatch > size else None,
        lambda changed: {KEYS["tokens_per_microbatch"]: str(size)},
    )


def _smaller_cache(share: float) -> Change:
    def shrink(work: Workload) -> Workload | None:
        size = cache_tokens(work, share)
        return _chosen(work, kv_tokens=size) if size < work.choice.kv_tokens else None

    return shrink, lambda changed: {KEYS["kv_tokens"]: str(changed.choice.kv_tokens)}


def _fewer_running(size: int) -> Change:
    """Logits of a first token and of a recorded step are those of all running sequences."""
    return (
        lambda work: replace(work, max_running=size) if size < work.max_running else None,
        lambda changed: {"engine.max_running": str(size)},
    )


def _fewer_with_cache(size: int) -> Change:
    """And as much of a cache for each as there was: "auto" would choose that, and other recipes have to say it."""

    def shrink(work: Workload) -> Workload | None:
        if size >= work.max_running:
            return None
        cache = cache_tokens(work, size / work.max_running)
        return replace(_chosen(work, kv_tokens=min(cache, work.choice.kv_tokens)), max_running=size)

    return shrink, lambda changed: {
        "engine.max_running": str(size),
        KEYS["kv_tokens"]: str(changed.choice.kv_tokens),
    }


def _halves(count: int) -> list[int]:
    return [size for shift in range(1, count.bit_length()) if (size := count >> shift) >= LEAST_RUNNING]


def _checkpointed(work: Workload) -> Workload | None:
    return None if work.choice.gradient_checkpointing else _chosen(work, gradient_checkpointing=True)


def _inputs_away(work: Workload) -> Workload | None:
    """Of long rows alone. Gradients keep their bits, which narrower states would change."""
    if work.choice.gradient_checkpointing == "offload":
        return None
    one_row = _chosen(work, gradient_checkpointing="offload", tokens_per_microbatch=1)
    sent = plan_memory(one_row).host_bytes - plan_memory(work).host_bytes
    is_long = sent >= WORTHWHILE_BYTES * work.trainers_per_host
    return _chosen(work, gradient_checkpointing="offload") if is_long else None


def _in_parts(work: Workload) -> Workload | None:
    """The sampler in a trainer's own process then needs a copy of the weights. States in 8 bits are refused with parts;
    where a recipe asks for them it may not be cut, so here they were chosen, and others will be."""
    if work.parts or work.trainers == 1 or not work.may_be_cut or work.shape.family not in WALKED_FAMILIES:
        return None
    cut = replace(work, parts=True, engine="copied" if work.engine == "shared" else work.engine)
    return cut if work.choice.states in possible_states(cut) else _chosen(cut, states=possible_states(cut)[-1])


def _write_parts(changed: Workload) -> dict[str, str]:
    return {"cluster.parts": "true", **({"engine.place": '"process"'} if changed.draws_here else {})}


def _compact(work: Workload) -> Workload | None:
    least = possible_states(work)[-1]
    return None if work.choice.states in (least, "8bit") else _chosen(work, states=least)


def _offloaded(work: Workload) -> Workload | None:
    return None if work.offload else replace(work, offload=True)


def _adapted(work: Workload) -> Workload | None:
    """An adapter makes states small, so they may be wide again; the sampler draws from merged weights of its own."""
    if work.adapter is not None or not work.may_have_adapter:
        return None
    engine = "copied" if work.engine == "shared" else work.engine
    frozen = work.frozen[1:] if work.has_own_reference else work.frozen
    return replace(
        work, adapter=AdapterShape(rank=REMEDY_RANK), engine=engine, frozen=frozen, has_own_reference=False
    )  # fmt: skip


def _four_bit(work: Workload) -> Workload | None:
    """Below an adapter, which is added where none is. An engine in the same process draws with the very same base."""
    is_possible = work.may_have_four_bits and not work.parts and work.shape.family in FAMILIES
    adapted = work if work.adapter is not None else _adapted(work)
    if not is_possible or work.has_four_bit_base or adapted is None:
        return None
    is_shared = work.draws_here or not work.rolls
    return replace(adapted, has_four_bit_base=True, engine="shared" if is_shared else work.engine)


def _write_base(changed: Workload) -> dict[str, str]:
    return {"model.lora": f'{{rank = {REMEDY_RANK}, base = "4bit"}}'}


def _frozen_away(work: Workload) -> Workload | None:
    """A part of a reference stays where it is."""
    return None if work.offload_frozen or work.parts else replace(work, offload_frozen=True)


def _back(work: Workload) -> Workload | None:
    return replace(work, offload=False) if work.offload else None


def _frozen_back(work: Workload) -> Workload | None:
    return replace(work, offload_frozen=False) if work.offload_frozen and work.frozen else None


def _inputs_back(work: Workload) -> Workload | None:
    is_away = work.trains and work.choice.gradient_checkpointing == "offload"
    return _chosen(work, gradient_checkpointing=True) if is_away else None


_AWAY = (_inputs_away, _offloaded, _frozen_away)
"""What leaves a GPU for the memory of the host."""
_LEFT_OUT = ((), _AWAY, (_in_parts,), (*_AWAY, _in_parts))
"""Of several changes at once: a host has not room for all that a GPU lacks, and a base in 4 bits is held whole."""
_CHANGES_BACK: list[Change] = [
    (_inputs_back, lambda changed: {KEYS["gradient_checkpointing"]: "true"}),
    (_frozen_back, lambda changed: {"model.offload": "false"}),
    (_back, lambda changed: {"optim.offload": "false"}),
]
"""For hosts that have no room for what a recipe leaves there."""
