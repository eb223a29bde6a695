"""Models as transformers reads them from a directory, one at a time.

Owns: the one call of a model's `from_pretrained`, without code and without a hub. Refuses: what becomes of the model.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from temper.folders.integrity import verify

_loading = threading.Lock()


def read_pretrained(reader: Any, folder: Path, *, is_quiet: bool = False, **options: Any) -> tuple[Any, dict[str, Any]]:
    """The model of a directory by one of transformers' classes, and what was missing or unexpected in its files.

    One at a time in a process: while transformers loads, functions that belong to all models (tying, initialising) are
    replaced by empty ones. Two loads that overlap can leave them so, and every tied head after them would be random.

    is_quiet: no report of missing weights on the terminal, where the caller expects them.
    """
    from transformers.utils import logging  # here: it takes seconds

    verify(folder)
    with _loading:
        verbosity = logging.get_verbosity()
        if is_quiet:
            logging.set_verbosity_error()
        try:
            loaded: tuple[Any, dict[str, Any]] = reader.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False, output_loading_info=True, **options
            )
        finally:
            logging.set_verbosity(verbosity)
    return loaded
