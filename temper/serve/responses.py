"""OpenAI's Responses interface, in terms of chat completions. Pure: JSON in, JSON out.

Owns: items of input and output, and the events of a stream. Refuses: what would need a memory of its own
(previous_response_id), tools that OpenAI runs itself, and reasoning items: a model's thoughts stand in its text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from temper.serve.refusals import Refused

PATH = "/v1/responses"
Table = dict[str, Any]
RENAMED = {"max_output_tokens": "max_completion_tokens"}
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "include": ([],),
    "max_tool_calls": (),
    "previous_response_id": (),
    "prompt": (),
    "reasoning": ({},),
    "text": ({}, {"format": {"type": "text"}}),
    "truncation": ("disabled",),
}
"""Would change what is drawn, and are not implemented. At the listed values they change nothing."""
NOT_HERE = ("messages", "n", "stop", "max_tokens", "max_completion_tokens", "logprobs", "stream_options", "functions")
"""Parameters of chat completions that this interface does not have."""

TEXTS = ("input_text", "output_text", "text")


def chat_body(given: Mapping[str, Any]) -> Table:
    """The body of a chat completion that asks the same."""
    for name, neutral in NEUTRAL.items():
        if name in given and given[name] not in neutral:
            hint = f" or set it to {json.dumps(neutral[0])}" if neutral else ""
            code = "unsupported_parameter"
            raise Refused(f"{name} is not implemented here. Leave it out{hint}", param=name, code=code)
    if wrong := next((name for name in NOT_HERE if name in given), None):
        raise Refused(f'"{wrong}" is no parameter of {PATH}', param=wrong, code="unknown_parameter")
    own = {"input", "instructions", "tools", *NEUTRAL}
    body = {RENAMED.get(name, name): value for name, value in given.items() if name not in own}
    said = [{"role": "system", "content": given["instructions"]}] if given.get("instructions") else []
    return {**body, "messages": [*said, *_messages(given.get("input"))], "tools": _tools(given.get("tools", []))}


def _messages(asked: Any) -> list[Table]:
    if isinstance(asked, str):
        return [{"role": "user", "content": asked}]
    if not isinstance(asked, list) or not all(isinstance(item, dict) for item in asked):
        raise Refused("input takes a text or a list of items", param="input", code="invalid_value")
    messages: list[Table] = []
    for item in asked:
        kind = item.get("type", "message")
        if kind == "message":
            messages.append({"role": item.get("role"), "content": _text(item.get("content"))})
        elif kind == "function_call":
            # An answer is a text, calls, or a text and then calls: one message of the model, as it was drawn.
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            call = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
            calls = messages[-1].setdefault("tool_calls", [])
            calls.append({"id": item.get("call_id", ""), "type": "function", "function": call})
        elif kind == "function_call_output":
            content = _text(item.get("output"))
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        else:
            raise Refused(f"input items of type {kind!r} are not implemented here", param="input")
    return messages


def _text(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    texts = [part["text"] for part in content if _kind(part) in TEXTS and isinstance(part.get("text"), str)]
    if len(texts) < len(content):
        kinds = ", ".join(dict.fromkeys(_kind(part) for part in content))
        raise Refused(f"content of type {kinds} is not implemented here: use text", param="input")
    return "".join(texts)


def _tools(given: Any) -> list[Table]:
    if not isinstance(given, list) or any(_kind(tool) != "function" for tool in given):
        raise Refused("only tools of type function are here: OpenAI's own are not", param="tools")
    return [{"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}} for tool in given]


def _kind(part: Any) -> str:
    return str(part.get("type")) if isinstance(part, dict) else type(part).__name__


def response_of(chat: Mapping[str, Any]) -> Table:
    """The whole response that says what this chat completion says."""
    (choice,) = chat["choices"]
    is_cut, counts = choice["finish_reason"] == "length", chat["usage"]
    return {
        **_head(chat, "incomplete" if is_cut else "completed"),
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": list(_items(chat["id"], choice["message"])),
        "usage": {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counts["total_tokens"],
        },
    }


def _head(chat: Mapping[str, Any], status: str) -> Table:
    return {
        "id": f"resp-{chat['id']}",
        "object": "response",
        "created_at": chat["created"],
        "model": chat["model"],
        "status": status,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "output": [],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": None,
    }


def _items(name: str, message: Mapping[str, Any]) -> Iterator[Table]:
    calls = message.get("tool_calls", [])
    if message["content"] or not calls:
        part: Table = {"type": "output_text", "text": message["content"] or "", "annotations": [], "logprobs": []}
        said = {"id": f"msg-{name}", "type": "message", "role": "assistant", "status": "completed"}
        yield {**said, "content": [part]}
    for place, call in enumerate(calls):
        own = {"id": f"fc-{name}-{place}", "call_id": call["id"], "status": "completed"}
        yield {"type": "function_call", **own, **call["function"]}


def stream_of(chat: Mapping[str, Any]) -> Iterator[bytes]:
    """The same response as a stream, which comes in one piece."""
    whole, begun = response_of(chat), _head(chat, "in_progress")
    events: list[tuple[str, Table]] = [(f"response.{kind}", {"response": begun}) for kind in ("created", "in_progress")]
    for place, item in enumerate(whole["output"]):
        where = {"output_index": place}
        begins = {**item, "status": "in_progress", **({"content": []} if "content" in item else {"arguments": ""})}
        events.append(("response.output_item.added", {**where, "item": begins}))
        events += [(kind, {**where, "item_id": item["id"], **more}) for kind, more in _inner(item)]
        events.append(("response.output_item.done", {**where, "item": item}))
    events.append((f"response.{whole['status']}", {"response": whole}))
    for number, (kind, told) in enumerate(events):
        data = json.dumps({"type": kind, "sequence_number": number, **told}, separators=(",", ":"))
        yield f"event: {kind}\ndata: {data}\n\n".encode()


def _inner(item: Mapping[str, Any]) -> Iterator[tuple[str, Table]]:
    """What a stream says of one item between its beginning and its end."""
    if item["type"] == "function_call":
        yield "response.function_call_arguments.delta", {"delta": item["arguments"]}
        yield "response.function_call_arguments.done", {"arguments": item["arguments"], "name": item["name"]}
        return
    (part,) = item["content"]
    where = {"content_index": 0}
    yield "response.content_part.added", {**where, "part": {**part, "text": ""}}
    yield "response.output_text.delta", {**where, "delta": part["text"], "logprobs": []}
    yield "response.output_text.done", {**where, "text": part["text"], "logprobs": []}
    yield "response.content_part.done", {**where, "part": part}
