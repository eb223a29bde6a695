"""A plan as a table for the terminal.

Owns: words and columns. Refuses: numbers that are not in the plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import StringIO

from rich.console import Group
from rich.table import Column, Table
from rich.text import Text

from temper.config.memory import KEYS
from temper.config.toml import to_toml_value
from temper.models.decoder import WALKED_FAMILIES
from temper.planning.gpus import GIB, Gpu
from temper.planning.layout import Layout
from temper.planning.memory import MemoryPlan
from temper.planning.seconds import TimePlan
from temper.planning.workload import Workload
from temper.terminal import SafeConsole

MIB = 2**20
TEXT_WIDTH = 100
"""Columns of a table that is text among other lines."""


def memory_table(memory: MemoryPlan, title: str) -> Table:
    """By part and phase, in GiB; in MiB where all of it is less than one."""
    unit, size = ("GiB", GIB) if memory.peak_bytes >= GIB else ("MiB", MIB)

    def say(number: float | None) -> str:
        return "" if number is None else f"{number / size:.2f}"

    right = [Column(phase, justify="right") for phase in memory.phases]
    table = Table(Column(unit, no_wrap=True), *right, title=title, title_justify="left")
    names = list(dict.fromkeys(part for parts in memory.phases.values() for part in parts))
    for name in names:
        table.add_row(name, *(say(parts.get(name)) for parts in memory.phases.values()))
    table.add_section()
    table.add_row("together", *(say(sum(parts.values())) for parts in memory.phases.values()), style="bold")
    return table


def time_table(time: TimePlan) -> Table:
    """Seconds by part, and what each waits for."""
    table = Table(Column("part", no_wrap=True), Column("seconds a step", justify="right"), "waits for")
    for name, seconds in time.seconds.items():
        table.add_row(name, f"{seconds:.2f}", time.reasons[name])
    table.add_section()
    together = "the longer side" if time.overlaps else "together"
    table.add_row(together, f"{time.total:.2f}", f"{time.slowest} dominates", style="bold")
    return table


def cluster_lines(layout: Layout, work: Workload, time: TimePlan, reason: str) -> list[str]:
    """What to write into a recipe, why, and what stands in the way; nothing for one GPU."""
    if layout.gpus == 1:
        return []
    values = {"trainers": layout.trainers, "samplers": layout.samplers, "parts": layout.parts}
    values |= {"experts": True} if work.sends_to_experts else {}
    values |= {"tensor" if work.tensor > 1 else "context": work.context} if work.context > 1 else {}
    draws = layout.samplers > 1 or layout.is_apart
    table = {key: value for key, value in values.items() if key != "samplers" or draws}
    # A trainer that holds a part has no whole model to draw with, for evaluations either.
    is_moved = draws or (layout.parts and work.engine == "copied")
    written = f"cluster = {to_toml_value(table)}" + (', engine.place = "process"' if is_moved else "")
    trainers = "trainers hold a part each" if layout.parts else "trainers hold a copy each"
    trainers += " and compute their own experts for all" if work.sends_to_experts else ""
    do = "compute layers" if work.tensor > 1 else "go over rows"
    trainers += f" and {do} in groups of {work.context}" if work.context > 1 else ""
    where = "samplers have GPUs of their own" if layout.is_apart else "all draw, then all train"
    words = f"{trainers}, {where}" if draws else trainers
    lines = [f"{written}: {words}" + (f"; {reason}" if reason else "")]
    if layout.is_apart:
        idle = {"samplers": 1 - time.drawing / time.total, "trainers": 1 - time.training / time.total}
        lines.append("GPUs that wait: " + ", ".join(f"{who} {share:.0%} of the time" for who, share in idle.items()))
    if layout.parts and work.shape.family not in WALKED_FAMILIES:
        made = ", ".join(WALKED_FAMILIES)
        lines.append(f"parts are made for {made} today: a {work.shape.family} can be planned, not trained so")
    return lines


def settings_line(work: Workload, chosen: Sequence[str]) -> str:
    """Keys and values, with a mark on those that were chosen."""
    values = {field: getattr(work.choice, field) for field in KEYS}
    words = [
        f"{KEYS[field]} = {to_toml_value(value)}{' (chosen)' if field in chosen else ''}"
        for field, value in values.items()
    ]
    return ", ".join(words)


def memory_text(memories: Mapping[str, MemoryPlan]) -> str:
    """The tables of each kind of GPU as plain text."""
    titles = {kind: "" if len(memories) == 1 else f"each {kind}'s GPU" for kind in memories}
    written = StringIO()
    console = SafeConsole(file=written, width=TEXT_WIDTH, color_system=None)
    for kind, memory in memories.items():
        console.print(memory_table(memory, titles[kind]))
    return written.getvalue().rstrip()


def render_plan(
    title: str, work: Workload, memories: Mapping[str, MemoryPlan], time: TimePlan, lines: Sequence[str]
) -> Group:
    """`lines`: what is said below the facts."""
    titles = {kind: title if len(memories) == 1 else f"{title}, each {kind}'s GPU" for kind in memories}
    tables = [memory_table(memory, titles[kind]) for kind, memory in memories.items()]
    return Group(*tables, time_table(time), Text(facts_line(work)), *map(Text, lines))


def facts_line(work: Workload) -> str:
    shape = work.shape
    active = f", {shape.active_layers / 1e9:.3g} active in layers" if shape.num_experts else ""
    return (
        f"{shape.family}, {shape.parameters / 1e9:.3g} billion parameters{active}"
        + (f", {work.trained_parameters / 1e6:,.0f} million trained" if work.trained_parameters else "")
        + f"; rows of up to {work.row_tokens:,} tokens, {work.microbatch_tokens:,} in a microbatch"
    )


def needs_line(memory: MemoryPlan, gpu: Gpu) -> str:
    """What the fullest GPU must have free."""
    host = f", {host_words(memory, gpu)} of the memory of each host" if memory.host_bytes else ""
    return (
        f"needs {memory.needed_bytes / GIB:.1f} of {gpu.usable_bytes / GIB:.1f} GiB (tensors "
        f"{memory.peak_bytes / GIB:.1f}, most in {memory.peak_phase}; CUDA and gaps the rest){host}"
    )


def host_words(memory: MemoryPlan, gpu: Gpu) -> str:
    """What waits in the memory of a host, beside what is free of it where that is known."""
    free = "" if gpu.host_free_bytes is None else f" of {gpu.host_free_bytes / GIB:.1f}"
    return f"{memory.host_bytes / GIB:.1f}{free} GiB"
