"""Control tokens spelled out in text that is not ours: from users, tools, tool descriptions, and policies.

Owns: which texts a tokenizer turns into control tokens, and taking them apart, so that nobody can end a turn and begin
another one in ordinary letters. Refuses: rendering (tasks/render.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from temper.errors import TaskError

SPOKEN = (
    "<think>", "</think>", "[THINK]", "[/THINK]", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]",
    "<|python_tag|>",
)  # fmt: skip
"""Markers by which an assistant structures its own turn. They end no turn and begin nobody else's."""
MOST_ROUNDS = 100


class Markers:
    """Texts that one tokenizer turns into control tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        decoder: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
        special = {str(token) for token in decoder.values() if getattr(token, "special", False)}
        special |= set(map(str, getattr(tokenizer, "all_special_tokens", ())))
        self._any = _pattern(special)
        self._of_turns = _pattern(special - set(SPOKEN))
        backend = getattr(tokenizer, "backend_tokenizer", None)
        unknown = getattr(tokenizer, "unk_token_id", None)
        self._hidden_ids: frozenset[int] = frozenset()
        """Of markers that are looked for in normalised text: other letters may become them."""
        if getattr(backend, "normalizer", None) is not None:
            self._hidden_ids = frozenset(
                number
                for number, token in decoder.items()
                if getattr(token, "special", False) and getattr(token, "normalized", False) and number != unknown
            )

    def take_apart(self, text: str, *, is_spoken: bool = False) -> str:
        """The text with a space behind the first character of every marker: still readable, and none.

        is_spoken: an assistant said it, and may use the markers of its own turn.
        """
        pattern = self._of_turns if is_spoken else self._any
        while pattern.search(text):  # again: what is left of one marker may hold a shorter one
            text = pattern.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text)
        return self._without_hidden(text) if self._hidden_ids else text

    def take_apart_all(self, value: Any) -> Any:
        """Every text in a tree of lists and tables, such as the description of a tool, keys included."""
        if isinstance(value, str):
            return self.take_apart(value)
        if isinstance(value, Mapping):
            return {self.take_apart_all(key): self.take_apart_all(inner) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.take_apart_all(inner) for inner in value]
        return value

    def _without_hidden(self, text: str) -> str:
        for _ in range(MOST_ROUNDS):
            found = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            pairs = zip(found["input_ids"], found["offset_mapping"], strict=True)
            starts = [start for number, (start, _) in pairs if number in self._hidden_ids]
            if not starts:
                return text
            for start in reversed(starts):
                text = f"{text[: start + 1]} {text[start + 1 :]}"
        raise TaskError(f"a text spells control tokens that cannot be taken apart: {text!r:.80}")


@lru_cache(8)
def markers_of(tokenizer: Any) -> Markers:
    return Markers(tokenizer)


def _pattern(markers: set[str]) -> re.Pattern[str]:
    """Any of them, the longest first. A single character cannot be taken apart, and is no marker."""
    longest_first = sorted((marker for marker in markers if len(marker) > 1), key=lambda marker: (-len(marker), marker))
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
