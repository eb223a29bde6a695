"""A source of randomness of its own for every TextArena episode. Checked with textarena 0.7.4.

Owns: the one patch of the package. TextArena seeds and draws from Python's global generator, so two episodes that take
turns in one process would draw from one stream and neither could be repeated. Its modules get a stand-in for `random`
that draws from the generator of the episode at hand. Refuses: numpy's generator, which two or three games use instead.
"""

from __future__ import annotations

import contextvars
import random
import sys
from typing import Any

_CURRENT: contextvars.ContextVar[random.Random | None] = contextvars.ContextVar("textarena_random", default=None)


class _EpisodeRandom:
    """Looks like the module `random`; outside an episode it is that module."""

    def __getattr__(self, name: str) -> Any:
        draw = _CURRENT.get(None)
        return getattr(draw if draw is not None and hasattr(draw, name) else random, name)


_STAND_IN = _EpisodeRandom()


def use_random(draw: random.Random) -> None:
    """From here on TextArena draws from this generator in this thread, which is the episode's own."""
    _CURRENT.set(draw)


def give_modules_their_random() -> None:
    """Call after a game was made: games import their modules only then."""
    for name, module in list(sys.modules.items()):
        if name.startswith("textarena") and module is not None and module.__dict__.get("random") is random:
            module.__dict__["random"] = _STAND_IN
