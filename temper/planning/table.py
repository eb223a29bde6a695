"""A plan as a table for the terminal.

Owns: words and columns. Refuses: numbers that are not in the plan.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.table import Column, Table
from rich.text import Text

from temper.config.memory import KEYS
from temper.config.toml import to_toml_value
from temper.planning.gpus import GIB, Gpu
from temper.planning.memory import MemoryPlan
from temper.planning.seconds import TimePlan
from temper.planning.workload import Workload


def memory_table(memory: MemoryPlan, title: str) -> Table:
    """GiB by part and phase."""
    right = [Column(phase, justify="right") for phase in memory.phases]
    table = Table(Column("GiB", no_wrap=True), *right, title=title, title_justify="left")
    names = list(dict.fromkeys(part for parts in memory.phases.values() for part in parts))
    for name in names:
        table.add_row(name, *(_gib(parts.get(name)) for parts in memory.phases.values()))
    table.add_section()
    table.add_row("together", *(_gib(sum(parts.values())) for parts in memory.phases.values()), style="bold")
    return table


def time_table(time: TimePlan) -> Table:
    """Seconds by part, and what each waits for."""
    table = Table(Column("part", no_wrap=True), Column("seconds a step", justify="right"), "waits for")
    for name, seconds in time.seconds.items():
        table.add_row(name, f"{seconds:.2f}", time.reasons[name])
    table.add_section()
    table.add_row("together", f"{time.total:.2f}", f"{time.slowest} dominates", style="bold")
    return table


def settings_line(work: Workload, chosen: Sequence[str]) -> str:
    """Keys and values, with a mark on those that were chosen."""
    values = {field: getattr(work.choice, field) for field in KEYS}
    words = [
        f"{KEYS[field]} = {to_toml_value(value)}{' (chosen)' if field in chosen else ''}"
        for field, value in values.items()
    ]
    return ", ".join(words)


def render_plan(title: str, work: Workload, chosen: Sequence[str], parts: tuple[Gpu, MemoryPlan, TimePlan]) -> Group:
    gpu, memory, time = parts
    shape = work.shape
    facts = (
        f"{shape.family}, {shape.parameters / 1e9:.3g} billion parameters"
        + (f", {work.trained_parameters / 1e6:,.0f} million trained" if work.trained_parameters else "")
        + f"; rows of up to {work.row_tokens:,} tokens, {work.packed_tokens:,} in a microbatch"
    )
    host = f", {memory.host_bytes / GIB:.1f} GiB of the host's" if memory.host_bytes else ""
    needs = (
        f"needs {memory.needed_bytes / GIB:.1f} of {gpu.usable_bytes / GIB:.1f} GiB (tensors "
        f"{memory.peak_bytes / GIB:.1f}, most in {memory.peak_phase}; CUDA and gaps the rest){host}"
    )
    lines = [Text(facts), Text(settings_line(work, chosen)), Text(needs)]
    return Group(memory_table(memory, title), time_table(time), *lines)


def _gib(size: float | None) -> str:
    return "" if size is None else f"{size / GIB:.2f}"
