"""How fast the two sides are, in plain numbers.

Owns: seconds of a decode step, of prompts, of an optimiser step, over any number of GPUs. Refuses: where the numbers
come from (roofline.py, like.py, or whoever runs the simulation), and clocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from temper.errors import UserError, did_you_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Seconds, each of one GPU; the text under a field is its help."""

    decode_step: float
    """Of a decode step, however few sequences are in it."""
    decode_row: float
    """What each sequence adds to a decode step."""
    decode_kv: float = 0.0
    """What each token in the cache adds to a decode step."""
    prefill_token: float = 0.0
    """Of a prompt token; equal prompts are computed once, until the weights change."""
    request: float = 0.0
    """What an answer costs its sampler before its first token, whatever its prompt; nothing is drawn meanwhile."""
    episode: float = 0.0
    """Of environment and reward, after each answer; many at once."""
    credit_token: float = 0.0
    """Of a drawn token between the end of rollouts and training, while the sampler may go on; all trainers together."""
    train_token: float
    """Of a token that is trained."""
    train_step: float = 0.0
    """Of an optimiser step, whatever its size: the update, which every trainer makes of all that it holds."""
    exchange: float = 0.0
    """What trainers wait for each other's weights and gradients, per optimiser step, where there is more than one."""
    publish: float = 0.0
    """Until new weights are in the samplers; nothing is drawn meanwhile."""
    after_step: float = 0.0
    """Of what the loop does after a publication while the sampler may go on: checks, records."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 <= value < math.inf:
                raise UserError(f"speed {field.name}={value} is no number of seconds: use 0 or more")
        if self.decode_step + self.decode_row <= 0:
            raise UserError("a decode step takes no time: give decode_step or decode_row above 0")

    def decode_seconds(self, rows: int, held_tokens: float) -> float:
        """Of one decode step with so many sequences, which hold so many tokens in the cache."""
        return self.decode_step + self.decode_row * rows + self.decode_kv * held_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingWork:
    """What one batch asks of the trainer."""

    tokens: int
    rows: int
    updates: int = 1


def training_seconds(speeds: Speeds, work: TrainingWork, trainers: int) -> float:
    """Of one batch over so many GPUs: rows of an update are shared out whole, so one GPU has the largest share."""
    rows = max(1, work.rows // work.updates)
    share = -(-rows // trainers) / rows
    exchanged = speeds.exchange if trainers > 1 else 0.0
    return speeds.train_token * work.tokens * share + work.updates * (speeds.train_step + exchanged)


def in_parts(speeds: Speeds, trainers: int) -> Speeds:
    """Speeds of one GPU for trainers that hold a part each: an update is shared out like what it changes."""
    return replace(speeds, train_step=speeds.train_step / trainers)


def with_given(speeds: Speeds | None, given: Mapping[str, float]) -> Speeds:
    """`speeds` with other numbers by name. None: all that have no default must be given."""
    known = {field.name: field for field in fields(Speeds)}
    for name in given:
        if name not in known:
            raise UserError(f'speed "{name}" is unknown.{did_you_mean(name, known)} Known: {", ".join(known)}.')
    if speeds is not None:
        return replace(speeds, **given)
    missing = [name for name in ("decode_step", "decode_row", "train_token") if name not in given]
    if missing:
        raise UserError(
            f"how fast is it? Name a GPU (--gpu h200), a finished run (--like runs/NAME), or give speeds in seconds: "
            f"{' '.join(f'--speed {name}=...' for name in missing)}"
        )
    return Speeds(**given)
