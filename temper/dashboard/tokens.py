"""Token ids as the pieces of text they stand for, by the tokenizer of the run itself.

Owns: finding that tokenizer, and pieces that add up to the text. Refuses: torch, and guessing: without one, ids.
"""

from __future__ import annotations

import threading
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

REPLACEMENT = "\ufffd"
"""What decoders write for bytes that are not a character, e.g. the first half of one."""
NAME = "tokenizer.json"

Decode = Callable[[list[int]], str]


class Pieces:
    """The text of single tokens. A token that is half a character is shown as the replacement sign: nothing is moved
    from one token to its neighbour, so that what is coloured is what was drawn."""

    def __init__(self, decode: Decode, num_tokens: int) -> None:
        self._decode = decode
        self._size = num_tokens
        self._known: dict[int, str] = {}
        # Decoders drop a blank at the start of a text; behind another token they show it.
        self._anchor, self._anchor_text = self._find_anchor()

    def of(self, ids: Sequence[int]) -> list[str]:
        return [self._piece(token) for token in ids]

    def _find_anchor(self) -> tuple[list[int], str]:
        for token in range(min(self._size, 1000)):
            text = self._decode([token])
            twice = self._decode([token, token])
            if text.strip() and REPLACEMENT not in text and twice.startswith(text) and len(twice) > len(text):
                return [token], text
        return [], ""

    def _piece(self, token: int) -> str:
        if token not in self._known:
            whole = self._decode([*self._anchor, token])
            follows = whole.startswith(self._anchor_text)
            self._known[token] = whole[len(self._anchor_text) :] if follows else self._decode([token])
        return self._known[token]


class Tokenizers:
    """The pieces of every run that was asked for, loaded once. Runs with one tokenizer file share it."""

    def __init__(self) -> None:
        self._loaded: dict[tuple[Path, int], Pieces] = {}
        self._lock = threading.Lock()

    def pieces(self, folder: Path, ids: Sequence[int]) -> list[str]:
        """The text of each token; its id as text when the run has no tokenizer that can be read."""
        with self._lock:
            found = self._find(folder)
            return [str(token) for token in ids] if found is None else found.of(ids)

    def _find(self, folder: Path) -> Pieces | None:
        for path in tokenizer_files(folder):
            try:
                key = (path, path.stat().st_mtime_ns)
                if key not in self._loaded:
                    self._loaded[key] = _load(path)
                return self._loaded[key]
            except Exception:  # the library raises bare Exception for a damaged file; the next may be whole
                continue
        return None


def tokenizer_files(folder: Path) -> Iterator[Path]:
    """Where a run keeps its tokenizer, best first: the model it made, its checkpoints, the model it began with."""
    yield folder / "model" / NAME
    yield from sorted(folder.glob(f"checkpoints/*/step-*/{NAME}"), reverse=True)  # any will do: training keeps it as is
    try:
        stages = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8")).get("stage", [])
    except (OSError, ValueError):
        return
    for stage in stages:
        path = stage.get("model", {}).get("path")
        if path:
            yield Path(path).expanduser() / NAME


def _load(path: Path) -> Pieces:
    from tokenizers import Tokenizer

    tokenizer: Any = Tokenizer.from_file(str(path))
    return Pieces(lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False)), tokenizer.get_vocab_size())
