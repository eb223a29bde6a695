"""Control tokens spelled out in text that is not ours: from users, tools, tool descriptions, and policies.

Owns: which texts a tokenizer turns into control tokens, and taking them apart, so that nobody can end a turn and begin
another one in ordinary letters. Refuses: rendering (tasks/render.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from temper.errors import TaskError

SPOKEN = (
    "<think>", "</think>", "[THINK]", "[/THINK]", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]",
    "<|python_tag|>",
)  # fmt: skip
"""Markers by which an assistant structures its own turn. They end no turn and begin nobody else's."""
PROBES = (("user",), ("system", "user"), ("user", "assistant", "user"), ("user", "assistant", "tool"))
"""Roles of conversations on which a template shows which tokens it writes."""
MOST_ROUNDS = 100


@dataclass(frozen=True, slots=True)
class _Watched:
    """What must not stand in texts of one kind."""

    pattern: re.Pattern[str]
    hidden_ids: frozenset[int]
    """Of markers that are looked for in normalised text: other letters may become them."""


class Markers:
    """Texts that one tokenizer turns into control tokens.

    Those are its special tokens, and added tokens that its chat template writes: some tokenizers call the markers of a
    turn ordinary. A word such as "<think>" that the tokenizer calls ordinary is left to whoever asks for it in a
    question; a tool has no business with it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        decoder: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
        special = {str(token) for token in decoder.values() if getattr(token, "special", False)}
        special |= set(map(str, getattr(tokenizer, "all_special_tokens", ())))
        written = {str(token) for token in decoder.values() if _is_markup(str(token))} - special
        if written:
            shown = _written_by_template(tokenizer)
            written = {text for text in written if text in shown}
        spoken = set(SPOKEN)
        self._of_tools = self._watched(special | written)
        self._of_users = self._watched(special | (written - spoken))
        self._of_assistants = self._watched((special | written) - spoken)

    def take_apart(self, text: str, role: str = "user") -> str:
        """The text with a space behind the first character of every marker: still readable, and none.

        role: who says it. An assistant may use the markers of its own turn.
        """
        watched = {"assistant": self._of_assistants, "tool": self._of_tools}.get(role, self._of_users)
        while watched.pattern.search(text):  # again: what is left of one marker may hold a shorter one
            text = watched.pattern.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text)
        return self._without_hidden(text, watched.hidden_ids) if watched.hidden_ids else text

    def take_apart_all(self, value: Any) -> Any:
        """Every text in a tree of lists and tables, such as the description of a tool, keys included."""
        if isinstance(value, str):
            return self.take_apart(value, "tool")
        if isinstance(value, Mapping):
            return {self.take_apart_all(key): self.take_apart_all(inner) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.take_apart_all(inner) for inner in value]
        return value

    def _watched(self, markers: set[str]) -> _Watched:
        hidden: frozenset[int] = frozenset()
        if getattr(getattr(self._tokenizer, "backend_tokenizer", None), "normalizer", None) is not None:
            unknown = getattr(self._tokenizer, "unk_token_id", None)
            hidden = frozenset(
                number
                for number, token in self._tokenizer.added_tokens_decoder.items()
                if str(token) in markers and getattr(token, "normalized", False) and number != unknown
            )
        return _Watched(_pattern(markers), hidden)

    def _without_hidden(self, text: str, hidden_ids: frozenset[int]) -> str:
        for _ in range(MOST_ROUNDS):
            found = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            pairs = zip(found["input_ids"], found["offset_mapping"], strict=True)
            starts = [start for number, (start, _) in pairs if number in hidden_ids]
            if not starts:
                return text
            for start in reversed(starts):
                text = f"{text[: start + 1]} {text[start + 1 :]}"
        raise TaskError(f"a text spells control tokens that cannot be taken apart: {text!r:.80}")


@lru_cache(8)
def markers_of(tokenizer: Any) -> Markers:
    return Markers(tokenizer)


def _is_markup(text: str) -> bool:
    """And no word, or run of spaces, that a tokenizer was given a number for."""
    return len(text) > 2 and not (text[0].isalnum() or text[-1].isalnum() or text[0].isspace() or text[-1].isspace())


def _written_by_template(tokenizer: Any) -> str:
    """The template itself and what it writes, for it may put markers together: "<|" + role + "|>"."""
    template = getattr(tokenizer, "chat_template", None) or ""
    texts = list(map(str, template.values())) if isinstance(template, Mapping) else [str(template)]
    if not template:
        return ""
    for roles in PROBES:
        conversation = [{"role": role, "content": "probe", "name": "probe"} for role in roles]
        with suppress(
            Exception
        ):  # jinja's, or the template's own: it refuses these roles, and then writes none of them
            texts.append(str(tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)))
    return "\n".join(texts)


def _pattern(markers: set[str]) -> re.Pattern[str]:
    """Any of them, the longest first. A single character cannot be taken apart, and is no marker."""
    longest_first = sorted((marker for marker in markers if len(marker) > 1), key=lambda marker: (-len(marker), marker))
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
