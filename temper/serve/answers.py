"""Our types to OpenAI response bodies and stream chunks. Pure: what was drawn in, JSON-ready dictionaries out.

Owns: the shapes of answers. Refuses: drawing, waiting, sending.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from temper.serve.asked import ChatRequest
from temper.serve.text import Words
from temper.types import Completion, Finish

Shape = dict[str, Any]
DONE = b"data: [DONE]\n\n"
STILL_HERE = b": still drawing\n\n"
"""A comment in the stream: keeps proxies from closing it, and clients skip it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseHead:
    """What all parts of one response have in common."""

    id: str
    created: int
    model: str
    version: int
    """Version of the weights when the request arrived."""

    def body(self, kind: str, choices: Sequence[Shape], **more: Any) -> Shape:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"temper-{self.version}",
            "choices": list(choices),
            **more,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One choice, finished."""

    index: int
    completion: Completion
    text: str
    """Without special tokens, up to the first stop text."""
    was_cut: bool
    """Whether a stop text was met."""
    content: str | None
    calls: tuple[tuple[str, str], ...] = ()
    """Tool calls: name and arguments as JSON."""

    @property
    def finish_reason(self) -> str:
        if self.calls:
            return "tool_calls"
        return "length" if self.completion.finish is Finish.LENGTH and not self.was_cut else "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of one choice, for a chunk of a stream."""

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    is_first: bool = False
    prompt_ids: tuple[int, ...] = ()
    """Only with the first piece."""

    def tells(self, asked: ChatRequest) -> bool:
        """Whether there is anything in it for this client. A half character, for one, is nothing yet."""
        has_numbers = bool(self.token_ids) and (asked.has_token_ids or asked.has_logprobs)
        return bool(self.text) or self.is_first or has_numbers


def usage(prompts: Sequence[Sequence[int]], answers: Sequence[Answer]) -> dict[str, int]:
    """Every prompt counts once, however many choices it has. Drawn stop tokens count."""
    prompt = sum(len(ids) for ids in prompts)
    drawn = sum(len(answer.completion.token_ids) for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn}


def whole_body(
    head: ResponseHead, asked: ChatRequest, answers: Sequence[Answer], counts: Mapping[str, int], words: Words
) -> Shape:
    kind = "chat.completion" if asked.is_chat else "text_completion"
    choices = [_whole_choice(head, asked, answer, words) for answer in answers]
    return head.body(kind, choices, usage=dict(counts))


def chunk(head: ResponseHead, asked: ChatRequest, piece: Piece, words: Words) -> Shape:
    """Text that was just drawn. Log-probabilities come along unless the most likely tokens were asked for, too."""
    choice: Shape = {"index": piece.index, "finish_reason": None, "logprobs": None}
    if asked.has_logprobs and not asked.params.top_logprobs and piece.token_ids:
        choice["logprobs"] = _logprobs(asked, piece.token_ids, piece.logprobs, None, words)
    if asked.is_chat:
        role = {"role": "assistant"} if piece.is_first else {}
        choice["delta"] = {**role, "content": piece.text}
    else:
        choice["text"] = piece.text
    if asked.has_token_ids:
        prompt = {"prompt_token_ids": list(piece.prompt_ids)} if piece.is_first else {}
        choice |= {**prompt, "token_ids": list(piece.token_ids)}
    return _chunk(head, asked, [choice])


def last_chunk(head: ResponseHead, asked: ChatRequest, answer: Answer, words: Words) -> Shape:
    """The end of one choice: why it ended, its tool calls, and the log-probabilities that no chunk could carry."""
    choice: Shape = {"index": answer.index, "finish_reason": answer.finish_reason, "logprobs": None}
    if asked.has_logprobs and asked.params.top_logprobs:
        choice["logprobs"] = _logprobs_of(asked, answer.completion, words)
    if asked.is_chat:
        calls = [{"index": place, **call} for place, call in enumerate(_calls(head, answer))]
        choice["delta"] = {"tool_calls": calls} if calls else {}
    else:
        choice["text"] = ""
    return _chunk(head, asked, [choice])


def usage_chunk(head: ResponseHead, asked: ChatRequest, counts: Mapping[str, int]) -> Shape:
    return {**_chunk(head, asked, []), "usage": dict(counts)}


def event(shape: Shape) -> bytes:
    """One server-sent event."""
    return b"data: " + to_json(shape) + b"\n\n"


def to_json(shape: Shape) -> bytes:
    return json.dumps(shape, separators=(",", ":"), allow_nan=False).encode()


def _chunk(head: ResponseHead, asked: ChatRequest, choices: Sequence[Shape]) -> Shape:
    empty_usage = {"usage": None} if asked.has_usage_chunk else {}
    return head.body("chat.completion.chunk" if asked.is_chat else "text_completion", choices, **empty_usage)


def _whole_choice(head: ResponseHead, asked: ChatRequest, answer: Answer, words: Words) -> Shape:
    completion = answer.completion
    choice: Shape = {"index": answer.index, "finish_reason": answer.finish_reason, "logprobs": None}
    if asked.has_logprobs:
        choice["logprobs"] = _logprobs_of(asked, completion, words)
    if asked.is_chat:
        calls = _calls(head, answer)
        called = {"tool_calls": calls} if calls else {}
        choice["message"] = {"role": "assistant", "content": answer.content, "refusal": None, **called}
    else:
        choice["text"] = answer.text
    if asked.has_token_ids:
        choice |= {"prompt_token_ids": list(completion.prompt_ids), "token_ids": list(completion.token_ids)}
    return choice


def _calls(head: ResponseHead, answer: Answer) -> list[Shape]:
    return [
        {
            "id": f"call-{head.id}-{answer.index}-{place}",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        for place, (name, arguments) in enumerate(answer.calls)
    ]


def _logprobs_of(asked: ChatRequest, completion: Completion, words: Words) -> Shape:
    top = None
    if completion.top_ids is not None and completion.top_logprobs is not None:
        top = [list(zip(*pair, strict=True)) for pair in zip(completion.top_ids, completion.top_logprobs, strict=True)]
    return _logprobs(asked, completion.token_ids, completion.logprobs, top, words)


def _logprobs(
    asked: ChatRequest,
    ids: Sequence[int],
    logprobs: Sequence[float],
    top: Sequence[Sequence[tuple[int, float]]] | None,
    words: Words,
) -> Shape:
    """One entry for each drawn token, stop tokens included: nothing that was drawn goes unreported."""
    if asked.is_chat:
        entries = [_entry(token, logprob, words) for token, logprob in zip(ids, logprobs, strict=True)]
        for place, entry in enumerate(entries):
            entry["top_logprobs"] = [_entry(token, value, words) for token, value in top[place]] if top else []
        return {"content": entries, "refusal": None}
    named = [{words.token(token)[0]: _finite(value) for token, value in pairs} for pairs in top] if top else None
    return {
        "tokens": [words.token(token)[0] for token in ids],
        "token_logprobs": list(logprobs),
        "top_logprobs": named,
        "text_offset": _offsets(ids, words),
    }


def _entry(token: int, logprob: float, words: Words) -> Shape:
    text, signs = words.token(token)
    return {"token": text, "logprob": _finite(logprob), "bytes": signs}


def _finite(logprob: float) -> float:
    """JSON has no infinity; this is what OpenAI writes for tokens that could not be drawn."""
    return -9999.0 if logprob == float("-inf") else logprob


def _offsets(ids: Sequence[int], words: Words) -> list[int]:
    """Where each token's own text begins, these tokens laid end to end."""
    offsets, place = [], 0
    for token in ids:
        offsets.append(place)
        place += len(words.token(token)[0])
    return offsets
