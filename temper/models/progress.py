"""A progress bar for making a model directory. Owns: how it looks. Refuses: knowing what is being made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from temper.models.gguf.file import Report


@contextmanager
def progress_bars(console: Console) -> Iterator[Report]:
    """Yields a report function that draws one bar per phase, in the order in which phases begin."""
    columns = (
        TextColumn("{task.description:>9}", markup=False),
        BarColumn(40),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bars: dict[str, TaskID] = {}

        def report(phase: str, share: float) -> None:
            if phase not in bars:
                bars[phase] = progress.add_task(phase, total=1.0)
            progress.update(bars[phase], completed=share)

        yield report
