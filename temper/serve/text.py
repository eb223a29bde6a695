"""Token ids to text as it grows: no half characters, no stop texts, and the pieces add up to the whole.

Owns: detokenising a stream, cutting at stop texts, the text and bytes of single tokens. Refuses: changing token ids.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\ufffd"
"""What decoders write for bytes that are not a character, e.g. the first half of one."""


class Words:
    """A tokenizer, as far as text goes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._byte_of = _byte_alphabet()

    def decode(self, ids: Sequence[int]) -> str:
        """What people read: special tokens left out."""
        return self._decode(ids, skip=True)

    def decode_all(self, ids: Sequence[int]) -> str:
        """Special tokens included: what a chat template would have written."""
        return self._decode(ids, skip=False)

    def encode(self, text: str, *, is_start: bool) -> tuple[int, ...]:
        """As the tokenizer does it; what it puts before a text comes only at the start of one."""
        return tuple(int(token) for token in self._tokenizer.encode(text, add_special_tokens=is_start))

    def token(self, token_id: int) -> tuple[str, list[int] | None]:
        """One token's text and bytes. None: bytes that are not a character, of a tokenizer that does not tell them."""
        text = self.decode_all([token_id])
        if REPLACEMENT not in text:
            return text, list(text.encode())
        name = str(self._tokenizer.convert_ids_to_tokens(token_id))
        if re.fullmatch(r"<0x[0-9A-F]{2}>", name):
            return text, [int(name[3:5], 16)]
        if all(sign in self._byte_of for sign in name):
            return text, [self._byte_of[sign] for sign in name]
        return text, None

    def _decode(self, ids: Sequence[int], *, skip: bool) -> str:
        decoded = self._tokenizer.decode(list(ids), skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        return str(decoded)


class TextStream:
    """The text of one completion, piece by piece. Pieces joined are the whole text up to the first stop text."""

    def __init__(self, words: Words, stops: Sequence[str] = ()) -> None:
        self._words = words
        self._stops = stops
        self._ids: list[int] = []
        self._start = 0
        """Where the window that is decoded begins: at a token that begins a character."""
        self._read = 0
        """Tokens whose text has been taken over."""
        self._held = ""
        """Read but not sent: it may be the beginning of a stop text."""
        self.was_cut = False
        """Whether a stop text was met. Nothing after it is ever sent."""

    def push(self, ids: Sequence[int]) -> str:
        """Takes tokens; returns what can be said for sure now."""
        self._ids += ids
        before = self._words.decode(self._ids[self._start : self._read])
        whole = self._words.decode(self._ids[self._start :])
        if whole.endswith(REPLACEMENT) or len(whole) <= len(before):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return self._send(whole[len(before) :], is_last=False)

    def finish(self) -> str:
        """The rest: characters that never became whole and what might have been a stop text."""
        before = self._words.decode(self._ids[self._start : self._read])
        whole = self._words.decode(self._ids[self._start :])
        self._start = self._read = len(self._ids)
        return self._send(whole[len(before) :], is_last=True)

    def _send(self, text: str, *, is_last: bool) -> str:
        if self.was_cut:
            return ""
        text = self._held + text
        found = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            self.was_cut, self._held = True, ""
            return text[: min(found)]
        keep = 0 if is_last else max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text with which the stop text begins."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


def _byte_alphabet() -> dict[str, int]:
    """The printable sign that byte-level tokenizers write for each byte (GPT-2's table), turned round."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + place): byte for place, byte in enumerate(others)}
