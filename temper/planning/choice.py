"""Settings that fit into the memory of a GPU.

Owns: which combination is preferred, and the cheapest change that makes a stage fit. Refuses: the sums (memory.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from temper.config.memory import KEYS, MemoryChoice
from temper.planning.memory import plan_memory
from temper.planning.workload import AdapterShape, Workload, by_gpu

MICROBATCHES = (65536, 32768, 16384, 8192)
"""Largest first: larger ones are faster, and above this they gain nothing."""
SMALL_MICROBATCHES = (4096, 2048, 1024)
KV_SHARES = (1.0, 0.5, 0.25, 0.125)
"""Of what every running sequence would need at its longest. With less, sequences wait for each other."""
SMALL_KV_SHARES = (1 / 16, 1 / 32, 1 / 64, 1 / 128)
"""Tried where nothing else fits: of answers that may become very long few do."""
REMEDY_RANK = 32
"""Of the adapter that is proposed where nothing else fits."""


def fits(work: Workload, free_bytes: float) -> bool:
    """Whether every kind of GPU has room for what it holds."""
    return all(plan_memory(side).needed_bytes <= free_bytes for side in by_gpu(work).values())


def choose(work: Workload, free_bytes: float, given: Mapping[str, Any]) -> MemoryChoice | None:
    """The first combination that fits, in this order of what is given up: a large microbatch, stored activations,
    float32 states, bfloat16 states; then room in the cache. None: none fits.

    `work.choice` holds kv_tokens that are enough; `given` are values of a recipe, which are never changed.
    """
    if not fits(replace(work, choice=least_choice(work, given)), free_bytes):
        return None  # found at once, since many ways to share out GPUs are tried
    for candidate in candidates(work, given):
        if fits(replace(work, choice=candidate), free_bytes):
            return candidate
    return None


def candidates(work: Workload, given: Mapping[str, Any]) -> Iterator[MemoryChoice]:
    """Preferred ones first."""
    small = MICROBATCHES + SMALL_MICROBATCHES
    ways = ((MICROBATCHES, KV_SHARES[:1]), (small, KV_SHARES), *((small, (share,)) for share in SMALL_KV_SHARES))
    for microbatches, shares in ways:
        options: dict[str, tuple[Any, ...]] = {
            "states": ("float32", "bfloat16", "8bit"),
            "gradient_checkpointing": (False, True),
            "kv_tokens": tuple(_cache_tokens(work, share) for share in shares),
            "tokens_per_microbatch": microbatches,
        }
        for field, value in given.items():
            options[field] = (value,) if field != "kv_tokens" or value else (work.choice.kv_tokens,)
        for values in product(*options.values()):
            yield MemoryChoice(**dict(zip(options, values, strict=True)))


def fuller_caches(
    work: Workload, free_bytes: float, given: Mapping[str, Any], least_tokens: int
) -> Iterator[MemoryChoice]:
    """What fits with each cache above so many tokens: for a fuller one something else is given up."""
    sizes = [] if "kv_tokens" in given else [_cache_tokens(work, share) for share in KV_SHARES + SMALL_KV_SHARES]
    for size in sizes:
        choice = choose(work, free_bytes, {**given, "kv_tokens": size}) if size > least_tokens else None
        if choice is not None:
            yield choice


def least_choice(work: Workload, given: Mapping[str, Any]) -> MemoryChoice:
    """The least that can be asked for: everything is given up that a recipe does not give."""
    return list(candidates(work, given))[-1]


def _cache_tokens(work: Workload, share: float) -> int:
    """At least one whole sequence."""
    return max(int(work.choice.kv_tokens * share), work.row_tokens + 1)


@dataclass(frozen=True, slots=True)
class Remedy:
    """Settings to change, by key of a recipe."""

    changes: Mapping[str, str]

    def __str__(self) -> str:
        return " and ".join(f"{key} = {value}" for key, value in self.changes.items())


Change = tuple[str, Callable[[Workload], Workload | None], Callable[[Workload], str]]
"""Key of a recipe, what is planned with it (None: it is set already), and the value to write."""


def find_remedy(work: Workload, free_bytes: float) -> Remedy | None:
    """The cheapest change that makes it fit: one alone where one is enough, else several, in order of what they cost.
    None: nothing does."""
    ladder = [change for change in _changes(work) if change[1](work) is not None]
    for change in ladder:
        changed = change[1](work)
        if changed is not None and fits(changed, free_bytes):
            return Remedy({change[0]: change[2](changed)})
    for count in range(2, len(ladder) + 1):
        if fits(_all(work, ladder[:count])[0], free_bytes):
            return _without_needless(work, ladder[:count], free_bytes)
    return None


def _all(work: Workload, changes: Sequence[Change]) -> tuple[Workload, dict[str, str]]:
    """The workload after all of these, and what they wrote by key."""
    made = dict[str, str]()
    for key, apply, say in changes:
        if (changed := apply(work)) is not None:
            work, made = changed, {**made, key: say(changed)}
    return work, made


def _without_needless(work: Workload, changes: Sequence[Change], free_bytes: float) -> Remedy:
    """Those that cost least go last: what another makes needless is mostly a cheaper one."""
    kept = list(changes)
    for change in changes:
        others = [other for other in kept if other is not change]
        if fits(_all(work, others)[0], free_bytes):
            kept = others
    return Remedy(_all(work, kept)[1])


def _changes(work: Workload) -> list[Change]:
    smaller = [size for size in MICROBATCHES + SMALL_MICROBATCHES if size < work.choice.tokens_per_microbatch]
    changes: list[Change] = [_microbatch(size) for size in smaller if size >= min(work.row_tokens, smaller[0])]
    if work.trains:
        changes += [
            (KEYS["gradient_checkpointing"], _checkpointed, lambda changed: "true"),
            ("cluster.parts", _in_parts, lambda changed: "true"),
            (KEYS["states"], _compact, lambda changed: '"8bit"'),
            ("optim.offload", _offloaded, lambda changed: "true"),
            ("model.lora", _adapted, lambda changed: f"{{rank = {REMEDY_RANK}}}"),
        ]
    if work.frozen:
        changes.append(("model.offload", _frozen_away, lambda changed: "true"))
    if work.samples and work.engine != "elsewhere":  # a sampler's own GPU may be the one that is full
        changes += [_smaller_cache(share) for share in KV_SHARES[1:] + SMALL_KV_SHARES]
    return changes


def _chosen(work: Workload, **changes: Any) -> Workload:
    return replace(work, choice=replace(work.choice, **changes))


def _microbatch(size: int) -> Change:
    return (
        KEYS["tokens_per_microbatch"],
        lambda work: _chosen(work, tokens_per_microbatch=size) if work.choice.tokens_per_microbatch > size else None,
        lambda changed: str(size),
    )


def _smaller_cache(share: float) -> Change:
    def shrink(work: Workload) -> Workload | None:
        size = _cache_tokens(work, share)
        return _chosen(work, kv_tokens=size) if size < work.choice.kv_tokens else None

    return KEYS["kv_tokens"], shrink, lambda changed: str(changed.choice.kv_tokens)


def _checkpointed(work: Workload) -> Workload | None:
    return None if work.choice.gradient_checkpointing else _chosen(work, gradient_checkpointing=True)


def _in_parts(work: Workload) -> Workload | None:
    """The sampler in a trainer's own process then needs a copy of the weights."""
    if work.parts or work.trainers == 1:
        return None
    return replace(work, parts=True, engine="copied" if work.engine == "shared" else work.engine)


def _compact(work: Workload) -> Workload | None:
    return None if work.choice.states == "8bit" else _chosen(work, states="8bit")


def _offloaded(work: Workload) -> Workload | None:
    return None if work.offload else replace(work, offload=True)


def _adapted(work: Workload) -> Workload | None:
    """An adapter makes states small, so they may be wide again; the sampler draws from merged weights of its own."""
    if work.adapter is not None or work.has_own_head:
        return None
    engine = "copied" if work.engine == "shared" else work.engine
    return replace(work, adapter=AdapterShape(rank=REMEDY_RANK), engine=engine)


def _frozen_away(work: Workload) -> Workload | None:
    return None if work.offload_frozen else replace(work, offload_frozen=True)
