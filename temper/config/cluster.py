"""What a recipe says of the processes of a run.

Owns: the table. Refuses: starting them (build/, cluster/). The text under each field is its help.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from temper.config.section import Section


class ClusterConfig(Section):
    """Processes of a run: those that train and those that draw."""

    place: Literal["processes", "ray"] = "processes"
    """Where trainers and samplers beside this process run: as children on this machine, or where a Ray cluster has room
    for them. Their machines see the run directory and the model's."""
    address: str = ""
    """Of a Ray cluster that runs already ("auto": the one of this machine); empty: one is started here for the run."""
    trainers: int = Field(1, ge=1)
    """Trainer processes that share out each batch, one GPU each. Rank 0 is the process that was started; others follow
    it."""
    parts: bool = False
    """Whether each trainer holds a part of every layer's weights, gradients and optimiser states (FSDP2), and gathers a
    layer when it computes it; otherwise each holds all of them. Parts need less memory, copies less exchange."""
    experts: bool = False
    """Whether, with parts, each trainer computes its own experts of every layer, to which all send their tokens (expert
    parallelism); otherwise experts are gathered as the rest of a layer is."""
    rank_seconds: float = Field(600.0, gt=0)
    """What trainers do together (a step, a save) may take so long; one that is silent for longer ends the run, and
    --resume goes on."""
    samplers: int = Field(1, ge=1)
    """Sampler processes that draw side by side, with engine.place = "process". Each has its own copy of the weights and
    its own cache; a group stays with one of them."""
    max_restarts: int = Field(3, ge=0)
    """How often a sampler process that ended is replaced, each of them; others draw its requests meanwhile. And how
    often all trainers begin anew from the last checkpoint when one of them is lost. After that the run ends, and
    --resume goes on."""
    silent_seconds: float = Field(120.0, gt=0)
    """A sampler process that answers nothing, takes no weights or cannot be reached for so long is ended and
    replaced."""

    def sampler_keys(self) -> list[str]:
        """Keys about sampler processes that were changed."""
        names = ("samplers", "silent_seconds", *(() if self.trainers > 1 else ("max_restarts",)))
        return [name for name in names if getattr(self, name) != type(self).model_fields[name].default]
