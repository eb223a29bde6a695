"""Refuses to be one of several processes that a launcher started.

Owns: that check, for Python and for every verb but `temper train`, whose processes are ranks of one run
(training/ranks.py). Refuses: knowing ranks.
"""

from __future__ import annotations

import os

from temper.errors import UserError

NAMES = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
"""Under which launchers say how many processes they started: torchrun, and srun for a step of a job."""


def require_one_process(what: str, instead: str = "") -> None:
    """UserError under torchrun, srun and the like: each process would draw or judge alone, knowing no other.

    instead: how several of them would be one run, where they can be.
    """
    for name in NAMES:
        given = os.environ.get(name, "1")
        if given.isdecimal() and int(given) > 1:
            raise UserError(
                f"{name}={given}: {given} processes were started (torchrun, srun or the like), and this runs in one. "
                f"They would be {given} unrelated runs. Start {what} without a launcher{instead}"
            )
