"""What a recipe says of the engine that draws completions.

Owns: the table. Refuses: choosing an implementation (build/sampler.py). The text under each field is its help.
"""

from __future__ import annotations

from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from temper.config.section import Section, require_auto_or_number

OWN: dict[str, tuple[str, ...]] = {
    "local": (),
    "vllm": ("steps_per_sync",),
    "sglang": ("kv_after_load", "tokens_per_step", "graphs", "steps_per_sync"),
}
"""By kind of engine, the keys that it cannot follow."""


class EngineConfig(Section):
    """What draws completions."""

    kind: Literal["local", "vllm", "sglang"] = "local"
    """Who draws the tokens: Temper's own engine, vLLM, or an SGLang server."""
    address: str | list[str] = ""
    """Where the SGLang server listens, e.g. "http://127.0.0.1:30000"; or a list of several, which draw side by side as
    sampler processes do: ["http://gpu7:30000", "http://gpu8:30000"]."""
    key_variable: str = ""
    """Environment variable that holds the key with which SGLang servers were started (--api-key); empty: none."""
    tensor_parallel: int = Field(1, ge=1)
    """GPUs of each sampler over which vLLM shares out every matrix; on a CPU, processes. Must divide the heads for keys
    and values."""
    place: Literal["here", "process"] = "here"
    """Where the engine draws what a stage trains on: in the trainer's process, by turns with it; or in a process of its
    own, with its own copy of the weights. With rollout.max_staleness above 0 both then work at once. vLLM always has
    processes below the one that it is started from, which is the sampler's with "process"."""
    threads: int | Literal["auto"] = "auto"
    """Threads of each sampler process on a CPU. auto: half of torch's shared between them, or all while
    rollout.max_staleness is 0 and they take turns with the trainer. Above 0 that has the rest, and at least one."""
    numerics: Literal["fast", "exact"] = "fast"
    """exact: local engine and trainer compute log-probabilities that are equal to the bit, whatever is batched."""
    weights: Literal["model", "fp8"] = "model"
    """How the local engine holds the matrices of decoder layers: as the model, or quantised to float8 when they are
    published, half the bytes of a decode step. Unless objective.corrections says otherwise, fp8 brings "token_tis"."""
    kv_tokens: int | Literal["auto"] = "auto"
    """Tokens the KV cache can hold; 0: enough for max_running sequences of the longest prompt and completion. auto: as
    0, and less where a GPU has no room for that."""
    kv_after_load: Literal["keep", "recompute"] = "keep"
    """Keys and values of running sequences when new weights arrive between two of their tokens."""
    max_running: int = Field(256, ge=1)
    """Sequences decoded together."""
    tokens_per_step: int = Field(4096, ge=16)
    """Prefill and decode tokens of one engine step."""
    graphs: bool = True
    """On a GPU: decode steps are recorded as CUDA graphs and replayed."""
    steps_per_sync: int = Field(8, ge=1)
    """On a GPU: replayed decode steps between two looks of the host. A sequence that ends in between wastes the rest of
    them."""
    max_logprob_gap: float | None = None
    """Largest mean |sampled - recomputed| log-probability that may start. Unset: the checked-in budget."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of all servers; empty for other engines."""
        return tuple(_listed(self.address)) if self.address else ()

    @field_validator("kv_tokens", mode="before")
    @classmethod
    def _number_or_auto(cls, value: object) -> object:
        return require_auto_or_number(value, least=0)

    @field_validator("address", mode="before")
    @classmethod
    def _one_or_several(cls, value: object) -> object:
        if value == "":
            return value
        if not isinstance(value, str | list) or not value:
            raise ValueError('use the address of a server, or a list of addresses: ["http://gpu7:30000"]')
        for address in (addresses := _listed(value)):
            if not address.startswith(("http://", "https://")) or not urlsplit(address).hostname:
                raise ValueError(
                    f'"{address}" must begin with http:// or https:// and name a host: "http://gpu7:30000"'
                )
            if addresses.count(address) > 1:
                raise ValueError(f'"{address}" stands here twice: a server draws for a run once')
        return value

    @field_validator("threads", mode="before")
    @classmethod
    def _threads_or_auto(cls, value: object) -> object:
        return require_auto_or_number(value, least=1)

    @field_validator("kind", mode="before")
    @classmethod
    def _address_apart(cls, value: object) -> object:
        if isinstance(value, str) and value.startswith("sglang+"):
            address = value.removeprefix("sglang+")
            raise ValueError(f'the address has a key of its own: engine = {{kind = "sglang", address = "{address}"}}')
        return value

    @field_validator("steps_per_sync", mode="before")
    @classmethod
    def _graphs_apart(cls, value: object) -> object:
        if value == 0:
            raise ValueError("0 is no number of steps. Without graphs is engine.graphs = false")
        return value

    @model_validator(mode="after")
    def _has_address(self) -> EngineConfig:
        if (self.kind == "sglang") != bool(self.address):
            raise ValueError(
                'an engine of kind "sglang" needs its address, and no other has one: '
                'engine = {kind = "sglang", address = "http://127.0.0.1:30000"}'
            )
        return self

    @model_validator(mode="after")
    def _is_said_to_whom_it_concerns(self) -> EngineConfig:
        if self.key_variable and self.kind != "sglang":
            raise ValueError(f'key_variable is for SGLang servers, and kind = "{self.kind}". Leave it out')
        said = [name for name in OWN[self.kind] if getattr(self, name) != type(self).model_fields[name].default]
        if said:
            where = "is what a server is started with" if self.kind == "sglang" else "is not vLLM's"
            raise ValueError(f'{said[0]} {where}: leave it out, or use kind = "local"')
        return self

    @model_validator(mode="after")
    def _can_be_placed(self) -> EngineConfig:
        if self.place == "process" and self.kind == "sglang":
            raise ValueError(
                'place = "process" starts samplers, and a server of kind "sglang" is started by somebody else and '
                'reached by its address. Use kind = "local" or "vllm", or place = "here"'
            )
        if self.tensor_parallel > 1 and self.kind != "vllm":
            raise ValueError(
                f'tensor_parallel is vLLM\'s: set kind = "vllm", or leave it out. An engine of kind "{self.kind}" '
                f"has one GPU for each sampler, or is started with as many as it wants"
            )
        if self.threads != "auto" and self.place == "here":
            raise ValueError('threads are those of a sampler process: set place = "process", or leave them out')
        return self

    @model_validator(mode="after")
    def _can_be_fp8(self) -> EngineConfig:
        if self.weights == "fp8" and self.kind != "local":
            raise ValueError(f'weights = "fp8" needs kind = "local": Temper does not quantise for "{self.kind}"')
        if self.weights == "fp8" and self.numerics == "exact":
            raise ValueError('weights = "fp8" and numerics = "exact" exclude each other: fp8 rounds on one side alone')
        return self


def _listed(address: str | list[Any]) -> list[str]:
    """A slash at the end makes no other address."""
    return [str(each).rstrip("/") for each in ([address] if isinstance(address, str) else address)]
