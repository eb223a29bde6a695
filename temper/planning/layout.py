"""How GPUs are shared out between trainers and samplers.

Owns: which ways are tried, and the fastest that fits. Refuses: the sums (memory.py, seconds.py), recipes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from temper.config.memory import MemoryChoice
from temper.models.decoder import WALKED_FAMILIES
from temper.planning.choice import choose, fits, fuller_caches, least_choice
from temper.planning.gpus import MOST_GPUS, Gpu
from temper.planning.memory import plan_memory
from temper.planning.remedy import Remedy, find_remedy
from temper.planning.seconds import TimePlan, plan_seconds
from temper.planning.workload import AnswerLengths, Workload, by_gpu, with_lengths

EIGHTHS = range(1, 8)
"""Of the GPUs, those that may train where others draw."""
WORTHWHILE = 0.95
"""Of the seconds of the preferred settings, what others must be below: a little time is not worth wide states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    trainers: int = 1
    samplers: int = 1
    parts: bool = False
    is_apart: bool = False
    """Whether samplers have GPUs of their own; otherwise they are on the trainers', in turn with them."""
    sampler_gpus: int = 1
    """Of each sampler that has its own: more where its matrices are shared out over several."""

    @property
    def gpus(self) -> int:
        return self.trainers + self.samplers * self.sampler_gpus if self.is_apart else self.trainers

    def __str__(self) -> str:
        where = f"{self.trainers}+{self.samplers}" if self.is_apart else f"{self.trainers} in turn"
        return f"{where}, {'parts' if self.parts else 'copies'}" if self.trainers > 1 else where


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutPlan:
    """A layout with the settings that fit it best."""

    layout: Layout
    work: Workload
    time: TimePlan
    needed_bytes: float
    """Of the kind of GPU that needs most."""
    fits: bool


def layouts(work: Workload, gpus: int, *, trainers: int = 0, parts: bool | None = None) -> Iterator[Layout]:
    """Those worth trying on so many GPUs. `trainers` and `parts` are kept where they are given (0 and None: free), but
    that nothing is cut which may not be, nor proposed to be cut which no trainer cuts.

    Stages that draw nothing, and engines without processes of their own, train on all. Synchronous steps may be drawn
    and trained on all in turn; otherwise some train while others draw.
    """
    is_free = parts is None and work.may_be_cut and work.shape.family in WALKED_FAMILIES
    ways = (False, True) if is_free else (bool(parts) and work.may_be_cut,)
    for layout in _splits(work, gpus, trainers):
        if layout.trainers % work.context or (work.experts and work.shape.num_experts % layout.trainers):
            continue  # groups that go together, and experts that stay where they are, divide over trainers
        for in_parts in ways:
            if layout.trainers > 1 or in_parts == ways[0]:
                yield replace(layout, parts=in_parts)


def _splits(work: Workload, gpus: int, trainers: int) -> Iterator[Layout]:
    if gpus == 1 or not (work.rolls and work.has_processes):
        yield Layout(trainers=trainers or gpus, samplers=work.num_samplers)
        return
    if trainers == gpus or (not trainers and not work.ahead):
        yield Layout(trainers=gpus, samplers=gpus)
    some = {trainers} if trainers else {max(1, gpus * eighth // 8) for eighth in EIGHTHS} | {gpus - 1}
    for count in sorted(some - {gpus}):
        yield Layout(trainers=count, samplers=gpus - count, is_apart=True)


def with_layout(work: Workload, layout: Layout) -> Workload:
    """A model in parts has no weights that a sampler could draw with, and many samplers cannot share one trainer's."""
    needs_copy = layout.samplers > 1 or (layout.parts and layout.trainers > 1) or work.engine == "apart"
    engine = "apart" if layout.is_apart else "copied" if needs_copy and work.engine != "elsewhere" else work.engine
    is_alone = not layout.is_apart and layout.samplers == 1 and not (layout.parts and layout.trainers > 1)
    return replace(
        work, trainers=layout.trainers, parts=layout.parts, num_samplers=layout.samplers, engine=engine,
        draws_here=work.draws_here and is_alone,
    )  # fmt: skip


def plan_layout(
    work: Workload, layout: Layout, gpu: Gpu, given: Mapping[str, Any], lengths: AnswerLengths | None = None
) -> LayoutPlan:
    """With what `given` says of memory and the best of the rest. Where nothing fits: with the least that can be asked
    for, so that a table shows how much is missing. `lengths`: what seconds are about; None: the longest answers."""
    own = with_layout(work, layout)
    settled = [replace(own, choice=choice) for choice in _choices(own, layout, gpu, given)]
    plans = [(plan_seconds(with_lengths(each, lengths), gpu), each) for each in settled]
    time, best = min(plans, key=lambda pair: pair[0].total)
    if time.total > WORTHWHILE * plans[0][0].total:
        time, best = plans[0]
    return LayoutPlan(
        layout=layout,
        work=best,
        time=time,
        needed_bytes=max(plan_memory(side).needed_bytes for side in by_gpu(best).values()),
        fits=fits(best, gpu.usable_bytes, gpu.host_room),
    )


def _choices(own: Workload, layout: Layout, gpu: Gpu, given: Mapping[str, Any]) -> list[MemoryChoice]:
    """The preferred one first. On several GPUs fuller caches are tried as well: there is a copy of the weights on each
    of them, and a cache that is starved for wider states would make them all wait."""
    first = choose(own, gpu.usable_bytes, given, gpu.host_room)
    if first is None:
        return [least_choice(own, given)]
    if layout.gpus == 1 or not own.rolls:
        return [first]
    return [first, *fuller_caches(own, gpu.usable_bytes, given, first.kv_tokens, gpu.host_room)]


def best_layout(plans: Sequence[LayoutPlan]) -> LayoutPlan:
    """The fastest that fits, of equally fast ones the first; where none does, the one that needs least."""
    fitting = [plan for plan in plans if plan.fits]
    if fitting:
        return min(fitting, key=lambda plan: plan.time.total)
    return min(plans, key=lambda plan: plan.needed_bytes)


def remedy_of(best: LayoutPlan, tried: Sequence[LayoutPlan], gpu: Gpu) -> Remedy | None:
    """The change for the layout that needs least, else for copies, where there is a choice: what parts refuse, such as
    a base in 4 bits, may fit there. None: nothing does."""
    copies = [plan for plan in tried if not plan.layout.parts]
    others = [best_layout(copies)] if best.layout.parts and copies else []
    remedies = (find_remedy(plan.work, gpu.usable_bytes, gpu.host_room) for plan in (best, *others))
    return next((remedy for remedy in remedies if remedy is not None), None)


def enough_gpus(work: Workload, gpu: Gpu, more_than: int, given: Mapping[str, Any]) -> int | None:
    """The next power of two of GPUs on which something fits; None: not even on thousands."""
    gpus = 1 << more_than.bit_length()
    while gpus <= MOST_GPUS:
        for layout in layouts(work, gpus):
            own = with_layout(work, layout)
            if fits(replace(own, choice=least_choice(own, given)), gpu.usable_bytes, gpu.host_room):
                return gpus
        gpus *= 2
    return None


def explain_choice(best: LayoutPlan, tried: Sequence[LayoutPlan]) -> str:
    """Why this layout: what it was compared with, and what did not fit."""
    fitting = sorted((plan for plan in tried if plan.fits), key=lambda plan: plan.time.total)
    others = [f"{plan.layout} {plan.time.total:.1f} s" for plan in fitting if plan is not best][:3]
    tight = len(tried) - len(fitting)
    words = [f"fastest of {len(fitting)} that fit" if len(fitting) > 1 else "the only one that fits"]
    if others:
        words.append(f"next: {'; '.join(others)}")
    if tight:
        words.append(f"{tight} did not fit")
    return ", ".join(words)
