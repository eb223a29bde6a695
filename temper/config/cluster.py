"""What a recipe says of the processes of a run.

Owns: the table. Refuses: starting them (build/, cluster/). The text under each field is its help.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from temper.config.section import Section


class ClusterConfig(Section):
    """Processes of a run: those that train and those that draw."""

    place: Literal["auto", "processes", "ray", "torchrun"] = "auto"
    """Where trainers and samplers beside this process run: as its children on this machine ("processes"), where a Ray
    cluster has room for them ("ray"), or trainers as a launcher started them ("torchrun", also SLURM) and samplers as
    children or by address. Their machines see the run directory and the model's. "auto" is what there is: a launcher,
    else a Ray cluster where `address` names one, else this machine. The others refuse to run elsewhere."""
    address: str = ""
    """Of a Ray cluster that runs already ("auto": the one of this machine); empty: with place = "ray" one is started
    here for the run."""
    trainers: int = Field(1, ge=1)
    """Trainer processes that share out each batch, one GPU each. Rank 0 is the process that was started; others follow
    it."""
    parts: bool = False
    """Whether each trainer holds a part of every layer's weights, gradients and optimiser states (FSDP2), and gathers a
    layer when it computes it; otherwise each holds all of them. Parts need less memory, copies less exchange."""
    experts: bool = False
    """Whether, with parts, each trainer computes its own experts of every layer, to which all send their tokens (expert
    parallelism); otherwise experts are gathered as the rest of a layer is."""
    context: int = Field(1, ge=1)
    """Trainers that go over each row together, each over a stretch of its tokens (context parallelism): for rows that
    are too long for one GPU. Divides cluster.trainers; microbatches may have so many times the tokens."""
    tensor: int = Field(1, ge=1)
    """Trainers that, with parts, compute each layer together, each with its own heads of attention and columns of
    feed-forward layers, which stay (tensor parallelism): for GPUs with fast links between them. Divides
    cluster.trainers; they go over rows together as with context, of which it takes the place."""
    rank_seconds: float = Field(600.0, gt=0)
    """What trainers do together (a step, a save) may take so long; one that is silent for longer ends the run, and
    --resume goes on."""
    samplers: int | list[str] = 1
    """Sampler processes that draw side by side, with engine.place = "process": how many are started, or the addresses
    of some that wait for a run (`temper sampler`), e.g. ["gpu7:29600", "gpu8:29600"]. Each has its own copy of the
    weights and its own cache; a group stays with one of them."""
    max_restarts: int = Field(3, ge=0)
    """How often a sampler process that ended is replaced, and an SGLang server that is lost called again, each of them;
    others draw its requests meanwhile. And how often all trainers begin anew from the last checkpoint when one of them
    is lost. After that the run ends, and --resume goes on."""
    silent_seconds: float = Field(120.0, gt=0)
    """A sampler process that answers nothing, takes no weights or cannot be reached for so long is ended and replaced;
    an SGLang server that answers nothing for so long is lost."""

    @field_validator("samplers", mode="before")
    @classmethod
    def _number_or_addresses(cls, value: object) -> object:
        if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
            return value
        if not isinstance(value, list) or not value:
            raise ValueError('use a whole number of at least 1, or a list of addresses: ["gpu7:29600"]')
        for address in value:
            host, _, port = str(address).rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) < 65536:
                raise ValueError(f'"{address}" is no address: use "host:port", e.g. "gpu7:29600"')
        if len({*value}) < len(value):
            raise ValueError("an address stands here twice: a sampler draws for a run once")
        return value

    @property
    def together(self) -> int:
        """Trainers that have the same rows."""
        return max(self.context, self.tensor)

    @property
    def together_key(self) -> str:
        """The key that says so."""
        return "cluster.context" if self.tensor == 1 else "cluster.tensor"

    @property
    def is_on_ray(self) -> bool:
        return self.place == "ray" or (self.place == "auto" and bool(self.address))

    @property
    def num_samplers(self) -> int:
        return self.samplers if isinstance(self.samplers, int) else len(self.samplers)

    @property
    def sampler_addresses(self) -> tuple[str, ...]:
        """Of samplers that somebody else starts; empty: they are started with the run."""
        return () if isinstance(self.samplers, int) else tuple(self.samplers)

    def sampler_keys(self, *, has_servers: bool = False) -> list[str]:
        """Keys about sampler processes that were changed. has_servers: two of them are about servers as well."""
        of_both = ("silent_seconds", *(() if self.trainers > 1 else ("max_restarts",)))
        names = ("samplers", *(() if has_servers else of_both))
        return [name for name in names if getattr(self, name) != type(self).model_fields[name].default]
