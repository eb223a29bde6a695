"""Which sampler a request goes to.

Owns: where prefixes are cached, and the balance. Refuses: knowing what lives (health.py).
The requests of a group have one prompt and stay together: it is read once. A turn of a conversation goes where the
turns before it are cached. Everything else goes to whoever has least to do, and so does what would overload one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

BLOCK = 32
"""Tokens of a prefix that are looked up together."""
REMEMBERED = 65_536
"""Prefixes: some megabytes, and more than fit into any cache."""
OVERLOAD = 2
SLACK = 16
"""A sampler with more than OVERLOAD times the requests of the idlest, and SLACK more, gets no more for its cache."""


class Router:
    def __init__(self) -> None:
        self._owners: OrderedDict[tuple[int, int], int] = OrderedDict()
        """Sampler by (length, hash) of a prefix; that used last at the end."""

    def choose(self, prompt_ids: Sequence[int], in_flight: Mapping[int, int]) -> int:
        """in_flight: number of requests of every sampler that may draw; at least one."""
        idlest = min(in_flight, key=lambda place: (in_flight[place], place))
        most = OVERLOAD * in_flight[idlest] + SLACK
        own, prefixes = _key(prompt_ids), _prefixes(prompt_ids)
        for key in (own, *reversed(prefixes)):
            owner = self._owners.get(key)
            if owner is not None and in_flight.get(owner, most + 1) <= most:
                break
        else:
            owner = idlest
        self._remember(own, owner)
        return owner

    def drawn(self, prompt_ids: Sequence[int], token_ids: Sequence[int], place: int) -> None:
        """It has the keys of all of this in its cache: where a conversation goes on. Only the end is remembered, for
        beginnings are shared by strangers, such as those with one system prompt."""
        if prefixes := _prefixes((*prompt_ids, *token_ids)):
            self._remember(prefixes[-1], place)

    def forget(self, place: int) -> None:
        """It ended, and its cache with it."""
        for key in [key for key, owner in self._owners.items() if owner == place]:
            del self._owners[key]

    def _remember(self, key: tuple[int, int], place: int) -> None:
        self._owners[key] = place
        self._owners.move_to_end(key)
        while len(self._owners) > REMEMBERED:
            self._owners.popitem(last=False)


def _key(token_ids: Sequence[int]) -> tuple[int, int]:
    """Negative length: a whole prompt, whatever blocks it has."""
    return -len(token_ids), hash(tuple(token_ids))


def _prefixes(token_ids: Sequence[int]) -> list[tuple[int, int]]:
    """(length, hash) of all beginnings of whole blocks, the shortest first."""
    found, chain = [], 0
    for end in range(BLOCK, len(token_ids) + 1, BLOCK):
        chain = hash((chain, tuple(token_ids[end - BLOCK : end])))
        found.append((end, chain))
    return found
