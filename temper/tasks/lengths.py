"""How many tokens texts have, for every row of a file before a run: row 40,000 must not end it on its second day.

Owns: finding the longest texts without encoding them all, and remembering what took long. Refuses: what a row means.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BATCH = 256
"""Texts encoded by one call; a thread takes one batch at a time."""
SLOW_SECONDS = 3.0
"""What took longer is remembered on disk."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """How long some texts are, in tokens."""

    longest: int
    over: tuple[tuple[int, int], ...]
    """(place, tokens) of every text above the limit, in order."""


def measure_texts(tokenizer: Any, texts: Sequence[str], limit: int) -> Lengths:
    """The longest text and all above the limit, exactly.

    No token is shorter than a byte, so texts are encoded from the one with most bytes on, until the next can neither be
    above the limit nor the longest: of a usual data set a few hundred.
    """
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:
        backend.no_truncation()  # as encode() has it; some tokenizer.json files ask for a cut
        backend.no_padding()
    started, memory = time.monotonic(), _memory_of(tokenizer, texts, limit)
    if (known := _recall(memory)) is not None:
        return known
    sizes = [len(text.encode()) for text in texts]
    order = sorted(range(len(texts)), key=lambda place: -sizes[place])
    longest, over = 0, list[tuple[int, int]]()
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for places in _cut(order, BATCH * (os.cpu_count() or 1)):
            if sizes[places[0]] <= min(limit, longest):
                break
            chunks = list(_cut(places, BATCH))
            counts = threads.map(lambda chunk: _count(tokenizer, [texts[place] for place in chunk]), chunks)
            for place, count in zip(places, (count for chunk in counts for count in chunk), strict=True):
                longest = max(longest, count)
                if count > limit:
                    over.append((place, count))
    found = Lengths(longest, tuple(sorted(over)))
    if time.monotonic() - started > SLOW_SECONDS:
        _remember(memory, found)
    return found


def _cut(places: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    return (places[start : start + size] for start in range(0, len(places), size))


def _count(tokenizer: Any, texts: Sequence[str]) -> list[int]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:  # lets other threads run meanwhile
        return [len(encoding.ids) for encoding in backend.encode_batch_fast(list(texts), add_special_tokens=False)]
    return [len(tokenizer.encode(text, add_special_tokens=False)) for text in texts]


def _memory_of(tokenizer: Any, texts: Sequence[str], limit: int) -> Path:
    """Named after everything that decides the answer."""
    digest = hashlib.sha256(repr((limit, len(texts))).encode())
    for part in _contents(tokenizer, texts):
        digest.update(hashlib.sha256(part.encode()).digest())
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "temper" / "lengths" / f"{digest.hexdigest()}.json"


def _contents(tokenizer: Any, texts: Sequence[str]) -> Iterator[str]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    yield backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    yield from texts


def _recall(path: Path) -> Lengths | None:
    try:
        content = json.loads(path.read_text())
        return Lengths(int(content["longest"]), tuple((int(place), int(count)) for place, count in content["over"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None  # not there, or spoilt: it is measured again


def _remember(path: Path, found: Lengths) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(f".{os.getpid()}")
        aside.write_text(json.dumps({"longest": found.longest, "over": found.over}))
        aside.replace(path)
    except OSError:
        return  # a read-only home costs time and nothing else
