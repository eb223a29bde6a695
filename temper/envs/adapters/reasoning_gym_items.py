"""Items of reasoning-gym, and its own verdict on an answer. Checked with reasoning-gym 0.1.25.

Owns: the numbering of items. Refuses: any import of torch or of Temper's types; worker processes import this file.
It imports reasoning-gym at the top, so that those seconds count as a worker's start and not against its first answer.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import reasoning_gym

ITEMS_PER_SEED = 2**24
"""reasoning-gym draws item i of seed s from seed s + i, so neighbouring seeds share almost all items. Ours lie this far
apart. Family pool_matrix wants seeds below 2**32: with it, use seeds below 256."""
BLOCK = 1024
"""Items per data set object: some families list their items up front and know no index beyond their size."""


def item(family: str, options: str, seed: int, index: int) -> dict[str, Any]:
    """The entry: question, answer, metadata. `options` is a JSON object. Equal arguments give equal entries."""
    entry: dict[str, Any] = _dataset(family, options, seed, index // BLOCK)[index % BLOCK]
    return entry


def score(family: str, options: str, seed: int, index: int, question: str, answer: str) -> float:
    """What the family's own verifier says of the answer, from 0 to 1."""
    entry = _cached_item(family, options, seed, index)
    if entry["question"] != question:
        raise RuntimeError(f"{family}: the item made for scoring is not the one that was asked; set PYTHONHASHSEED=0")
    return float(_dataset(family, options, seed, index // BLOCK).score_answer(answer, entry))


# Members of one group are scored one after the other, and some families take a third of a second to make an item.
_cached_item = functools.lru_cache(maxsize=256)(item)


@functools.lru_cache(maxsize=64)
def _dataset(family: str, options: str, seed: int, block: int) -> Any:
    first = seed * ITEMS_PER_SEED + block * BLOCK
    return reasoning_gym.create_dataset(family, seed=first, size=BLOCK, **json.loads(options))
