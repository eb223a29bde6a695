"""From what a client sent to the ids the model sees: chat template, tools, and recorded tokens of earlier turns.

Owns: prompts. Refuses: encoding again what the model drew in the same session; where that cannot be helped, it says so.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from temper.envs.tool_calls import Call, detect_format, parse, write_call
from temper.envs.tools import ArgumentsRefused, named_arguments
from temper.errors import UserError
from temper.serve.asked import ChatMessage, ChatRequest, ToolCall
from temper.serve.records import PromptOrigin, Records, hash_of
from temper.serve.refusals import Refused
from temper.serve.text import Words
from temper.tasks.render import Renderer, ToolsUnseen
from temper.types import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    ids: tuple[int, ...]
    origin: PromptOrigin


class Conversations:
    """One model's way of talking. Calls must come from one thread at a time: tokenizers and SQLite want that."""

    def __init__(
        self, tokenizer: Any, renderer: Renderer | None, records: Records | None, untold_format: str = ""
    ) -> None:
        """untold_format: how a model calls tools of which its template says nothing; empty: it must show them."""
        self.words = Words(tokenizer)
        self._renderer = renderer
        self._records = records
        self._vocabulary_size = len(tokenizer)
        self._shows_tools = not untold_format
        self._call_format = untold_format or _call_format(tokenizer)

    def prompts(self, asked: ChatRequest) -> tuple[ChatPrompt, ...]:
        """What to draw from: one prompt for a chat, one or several for plain completions."""
        if asked.session and self._records is None:
            raise Refused("sessions need a server that records: start it with --record PATH", param="session")
        if asked.is_chat:
            return (self._chat(asked),)
        return tuple(self._plain(prompt, asked.session) for prompt in asked.prompts)

    def reply(self, text: str, asked: ChatRequest) -> tuple[str | None, tuple[tuple[str, str], ...]]:
        """Content and tool calls (name, arguments as JSON). Calls that cannot be read stay text, for all to see."""
        if not asked.tools:
            return text, ()
        parsed = parse(text, self._call_format or "auto")
        calls = [call for call in parsed.calls if isinstance(call, Call)]
        try:
            arguments = [named_arguments(call, asked.tools) for call in calls]
        except ArgumentsRefused:  # a plain call, which only a schema can read
            return text, ()
        if not calls or len(calls) < len(parsed.calls):
            return text, ()
        pairs = zip(calls, arguments, strict=True)
        written = tuple((call.name, json.dumps(values, ensure_ascii=False)) for call, values in pairs)
        return parsed.thought or None, written

    def reply_key(self, asked: ChatRequest, text: str) -> str | None:
        """Names the conversation up to and including this answer, as the client will send it back."""
        if not asked.is_chat or not asked.session:
            return None
        content, calls = self.reply(text, asked)
        calls_made = tuple(ToolCall(id="", name=name, arguments=arguments) for name, arguments in calls)
        answer = ChatMessage(role="assistant", content=content or "", tool_calls=calls_made)
        return _key((*asked.messages, answer))

    def _chat(self, asked: ChatRequest) -> ChatPrompt:
        if self._renderer is None:
            raise Refused("this model has no chat template: use /v1/completions", code="no_chat_template")
        messages = self._as_messages(asked.messages)
        text = self._render(messages, asked)
        if not asked.session or self._records is None:
            return self._fresh(text, messages, "new")
        keys = {k: _key(asked.messages[:k]) for k, m in enumerate(asked.messages, 1) if m.role == "assistant"}
        if not keys:
            return self._fresh(text, messages, "new")
        said = self._records.said(asked.session, tuple(keys.values()))
        # What the client got was read out of the drawn text: the template must be shown the text itself.
        true = [
            replace(message, content=said[keys[place]])
            if keys.get(place) in said
            else self._renderer.take_apart(message)
            for place, message in enumerate(messages, 1)
        ]
        true_text = self._render(true, asked, is_drawn=True)
        parent = self._records.parent_of(asked.session, true_text)
        if parent is not None and any(self._renderer.take_apart(m) != m for m in true[parent.num_messages :]):
            parent = None  # what would be encoded again has control tokens in it, drawn ones or spelled ones
        last = max(keys)
        why = "the template rewrites what was said" if keys[last] in said else "the last answer is not as it was given"
        if parent is None:
            return self._fresh(text, messages, f"fork: {why}")
        return ChatPrompt(
            ids=(*parent.ids, *self._encode(true_text[parent.text_length :])),
            origin=PromptOrigin(
                history="extends" if parent.num_messages == last else f"fork: {why}",
                parent=parent.row,
                messages=tuple(true[parent.num_messages :]),
                text=true_text,
                num_messages=len(messages),
            ),
        )

    def _plain(self, prompt: str | tuple[int, ...], session: str) -> ChatPrompt:
        if not isinstance(prompt, str):
            wrong = next((token for token in prompt if not 0 <= token < self._vocabulary_size), None)
            if wrong is not None:
                raise Refused(f"token id {wrong} is not in the vocabulary of {self._vocabulary_size}", param="prompt")
            return ChatPrompt(ids=prompt, origin=PromptOrigin(text=self.words.decode_all(prompt)))
        found = self._records.parent_of(session, prompt) if session and self._records is not None else None
        if found is None:
            return ChatPrompt(ids=self.words.encode(prompt, is_start=True), origin=PromptOrigin(text=prompt))
        more = self.words.encode(prompt[found.text_length :], is_start=False)
        return ChatPrompt(
            ids=(*found.ids, *more), origin=PromptOrigin(history="extends", parent=found.row, text=prompt)
        )

    def _fresh(self, text: str, messages: Sequence[Message], history: str) -> ChatPrompt:
        origin = PromptOrigin(history=history, messages=tuple(messages), text=text, num_messages=len(messages))
        return ChatPrompt(ids=tuple(self._encode(text)), origin=origin)

    def _render(self, messages: Sequence[Message], asked: ChatRequest, *, is_drawn: bool = False) -> str:
        assert self._renderer is not None, "only chats are rendered"
        try:
            tools = asked.tools if self._shows_tools else ()
            return self._renderer.render(messages, for_generation=True, tools=tools, is_drawn=is_drawn)
        except ToolsUnseen as error:
            raise Refused(
                "the chat template of this model shows no tools, so it would never know of them. Describe them in "
                "a system message instead",
                param="tools",
                code="unsupported_parameter",
            ) from error

    def _encode(self, text: str) -> list[int]:
        assert self._renderer is not None, "only chats are encoded without a start"
        return self._renderer.encode(text)

    def _as_messages(self, messages: Sequence[ChatMessage]) -> list[Message]:
        """With tool calls written out as the model writes them, and tools' answers named after their calls."""
        names = {call.id: call.name for message in messages for call in message.tool_calls}
        return [
            Message(
                role=message.role,
                content=self._with_calls(message),
                name=message.name or names.get(message.tool_call_id, "") if message.role == "tool" else "",
            )
            for message in messages
        ]

    def _with_calls(self, message: ChatMessage) -> str:
        if not message.tool_calls:
            return message.content
        if self._call_format is None:
            raise Refused("how this model writes tool calls is not known", param="messages")
        calls = [(call.name, json.loads(call.arguments or "{}")) for call in message.tool_calls]
        if self._call_format == "mistral":  # all calls of a message are one list there
            listed = [{"name": name, "arguments": arguments} for name, arguments in calls]
            written = [f"[TOOL_CALLS]{json.dumps(listed, ensure_ascii=False)}"]
        else:
            written = [write_call(self._call_format, name, arguments) for name, arguments in calls]
        return "\n".join(part for part in (message.content, *written) if part)


def _call_format(tokenizer: Any) -> str | None:
    """How the model writes calls; None when its template asks for a way that cannot be read."""
    template = tokenizer.chat_template
    try:
        return detect_format(template if isinstance(template, str) else json.dumps(template or ""))
    except UserError:
        return None


def _key(messages: Sequence[ChatMessage]) -> str:
    """Key of what was said, whatever ids the calls have and however their arguments are spaced."""
    said = [
        (
            message.role,
            message.content,
            message.name,
            [(call.name, json.loads(call.arguments or "{}")) for call in message.tool_calls],
        )
        for message in messages
    ]
    return hash_of(json.dumps(said, sort_keys=True))
