"""What a recipe says of the processes of a run.

Owns: the table. Refuses: starting them (build/, cluster/). The text under each field is its help.
"""

from __future__ import annotations

from pydantic import Field

from temper.config.section import Section


class ClusterConfig(Section):
    """Processes of a run: trainers, and samplers beside them."""

    trainers: int = Field(1, ge=1)
    """Trainer processes that share out each batch, one GPU each. Rank 0 is the process that was started; others follow
    it."""
    parts: bool = False
    """Whether each trainer holds a part of every layer's weights, gradients and optimiser states (FSDP2), and gathers a
    layer when it computes it; otherwise each holds all of them. Parts need less memory, copies less exchange."""
    samplers: int = Field(1, ge=1)
    """Sampler processes that draw side by side, with engine.place = "process". Each has its own copy of the weights and
    its own cache; a group stays with one of them."""
    max_restarts: int = Field(3, ge=0)
    """How often a sampler process that ended is replaced, each of them; others draw its requests meanwhile. When none
    is left the run ends, and --resume goes on."""
    silent_seconds: float = Field(120.0, gt=0)
    """A sampler process that answers nothing for so long is ended and replaced."""
