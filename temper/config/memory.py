"""The keys that trade memory for time, of which each may be "auto".

Owns: their names, what they were given, and what "auto" means where there is nothing to plan. Refuses: choosing
(planning/).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from temper.config.sections import RunConfig

States = Literal["float32", "bfloat16", "8bit"]

KEYS = {
    "tokens_per_microbatch": "trainer.tokens_per_microbatch",
    "kv_tokens": "engine.kv_tokens",
    "gradient_checkpointing": "model.gradient_checkpointing",
    "states": "optim.states",
}
"""Keys of a recipe by the name of their field here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryChoice:
    """A value for each of these keys."""

    tokens_per_microbatch: int
    kv_tokens: int
    """0: enough for engine.max_running sequences."""
    gradient_checkpointing: bool | Literal["offload"]
    states: States


CPU_CHOICE = MemoryChoice(tokens_per_microbatch=8192, kv_tokens=0, gradient_checkpointing=False, states="float32")
"""What "auto" is on a CPU, whatever its memory: results there must not depend on the machine."""


def given_choice(config: RunConfig) -> dict[str, Any]:
    """What a recipe says of these keys; those on "auto" are left out."""
    said = {field: _value(config, key) for field, key in KEYS.items()}
    return {field: value for field, value in said.items() if value != "auto"}


def settled_choice(config: RunConfig) -> MemoryChoice:
    """The keys of a recipe in which none is on "auto"."""
    given = given_choice(config)
    assert given.keys() == KEYS.keys(), f"still to be chosen: {sorted(KEYS.keys() - given.keys())}"
    return MemoryChoice(**given)


def with_choice(config: RunConfig, choice: MemoryChoice) -> RunConfig:
    """The recipe with these values, in place of "auto" alone."""
    given = given_choice(config)
    for field, value in asdict(choice).items():
        if field not in given:
            section, _, key = KEYS[field].partition(".")
            config = config.model_copy(update={section: getattr(config, section).model_copy(update={key: value})})
    return config


def with_stored_choice(config: RunConfig, stored: Mapping[str, Any]) -> RunConfig:
    """The recipe as a stage of it was run before: what was chosen then is taken again. `stored`: that stage's table."""
    chosen = {field: _looked_up(stored, key) for field, key in KEYS.items()}
    if any(value in (None, "auto") for value in chosen.values()):
        return config
    return with_choice(config, MemoryChoice(**chosen))


def _value(config: RunConfig, key: str) -> Any:
    section, _, field = key.partition(".")
    return getattr(getattr(config, section), field)


def _looked_up(table: Mapping[str, Any], key: str) -> Any:
    section, _, field = key.partition(".")
    return table.get(section, {}).get(field)
