"""Refuses to be one of several processes that a launcher started.

Owns: that check, for Python and for every verb but `temper train`, whose processes are ranks of one run
(training/ranks.py). Refuses: knowing ranks.
"""

from __future__ import annotations

import os

from temper.errors import UserError


def require_one_process(what: str) -> None:
    """UserError under torchrun, srun and the like: each process would draw or judge alone, knowing no other."""
    given = os.environ.get("WORLD_SIZE", "1")
    if given.isdecimal() and int(given) > 1:
        raise UserError(
            f"WORLD_SIZE={given}: {given} processes were started (torchrun, srun or the like), and this runs in one. "
            f"They would be {given} unrelated runs. Start {what} without a launcher"
        )
