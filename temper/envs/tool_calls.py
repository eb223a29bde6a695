"""What models write when they call a tool: one pure parser per convention, and the writer of each.

Owns: text to calls and back. Refuses: exceptions (a malformed call is a BadCall with the reason), eval, running it, and
more than a bounded number of passes over a text: a policy writes it, and the event loop waits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from temper.errors import UserError, did_you_mean


@dataclass(frozen=True, slots=True)
class Call:
    """One call as the policy wrote it; whether such a tool exists is ToolSet's question."""

    name: str
    arguments: Mapping[str, Any] | str
    """By name; or, of a plain call, the text between its parentheses, which only the tool's schema can read."""


@dataclass(frozen=True, slots=True)
class BadCall:
    """Something that was meant as a call and cannot be read."""

    reason: str
    text: str


@dataclass(frozen=True, slots=True)
class Parsed:
    """A message taken apart."""

    thought: str
    """Everything that is not a call."""
    calls: tuple[Call | BadCall, ...] = ()


Calls = list[tuple[str, dict[str, Any]]]
"""Names of tools, each with its arguments."""
Parser = Callable[[str], Parsed]
MAX_BROKEN = 200
"""Braces that begin like an object and are not one; after these no more are tried: each may be 1,000 levels deep."""
_OBJECT = re.compile(r'\{\s*+["}]')
_SPACE = re.compile(r"\s*+")
_CALL_OBJECT = re.compile(r'\{\s*+"(name|type|parameters)"')
# Possessive: spaces that two parts of a pattern could share would be shared out in every way there is.
_MISTRAL = re.compile(r'\[\s*+\{\s*+"(name|arguments)"|^\s*+[\w.-]++\s*+(?:\[ARGS\]\s*+)?\{\s*+["}]')
_NAMED = re.compile(r"\s*+(?:\[TOOL_CALLS\]\s*+)?([\w.-]++)\s*+(?:\[CALL_ID\][\w-]++)?(?:\[ARGS\])?\s*+(?=\{)")


def parse_hermes(text: str) -> Parsed:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, as Hermes and Qwen write it."""
    thoughts, calls, place = list[str](), list[Call | BadCall](), 0
    while (found := text.find("<tool_call>", place)) >= 0:
        thoughts.append(text[place:found])
        start = found + len("<tool_call>")
        value, end = _json_at(text, start)
        # Looked for behind the JSON: a string in it, e.g. code to be written, may hold the mark.
        close = text.find("</tool_call>", end if value is not None else start)
        if close < 0:
            calls.append(BadCall("<tool_call> is never closed", text[start:]))
            return Parsed(_joined(thoughts), tuple(calls))
        calls.append(_call_of_text(text[start:close]))
        place = close + len("</tool_call>")
    return Parsed(_joined((*thoughts, text[place:])), tuple(calls))


def parse_llama3(text: str) -> Parsed:
    """{"name": ..., "parameters": {...}}, after <|python_tag|> or anywhere; several follow each other."""
    before, tag, after = text.partition("<|python_tag|>")
    body, thoughts = (after, [before]) if tag else (text, [])
    calls, place, num_broken = list[Call | BadCall](), 0, 0
    while (start := body.find("{", place)) >= 0 and num_broken < MAX_BROKEN:
        thoughts.append(body[place:start])
        value, end = _json_at(body, start) if _OBJECT.match(body, start) else (None, start)
        num_broken += value is None and _OBJECT.match(body, start) is not None
        if isinstance(value, dict) and "name" in value:
            calls.append(_call_of(value, body[start:end]))
        elif value is None and (tag or _CALL_OBJECT.match(body, start)):
            calls.append(BadCall("the call is not valid JSON", body[start:]))
            end = len(body)
        else:  # braces in prose, or an answer that is JSON
            end = end if value is not None else start + 1
            thoughts.append(body[start:end])
        place = end
    thoughts.append(body[place:])
    if tag and not calls:
        return Parsed(before.strip(), (BadCall("<|python_tag|> without a JSON call after it", after),))
    return Parsed(_joined(thought.strip(" ;\n") for thought in thoughts), tuple(calls))


def parse_mistral(text: str) -> Parsed:
    """[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...], or name[ARGS]{...} of newer models.

    Tokenizers drop the marker, a special token, when they decode: a list of calls is known by its shape, too.
    """
    before, marker, body = text.partition("[TOOL_CALLS]")
    if not marker:
        found = _MISTRAL.search(text)
        if found is None:
            return Parsed(text.strip())
        before, body = text[: found.start()], text[found.start() :]
    if not body.lstrip().startswith("["):
        return Parsed(before.strip(), _named_calls(body))
    value, end = _json_at(body, body.index("["))
    if not isinstance(value, list) or not value:
        return Parsed(before.strip(), (BadCall("the list of calls is not valid JSON", body),))
    return Parsed(_joined((before, body[end:])), tuple(_call_of(item, body) for item in value))


def parse_plain(text: str, prefix: str = "") -> Parsed:
    """name(arguments), alone on its line, after `prefix`: short enough for a model of a few thousand parameters."""
    thoughts, calls = [], list[Call | BadCall]()
    for line in text.splitlines():
        stripped = line.strip()
        called = stripped.removeprefix(prefix).strip()
        whole = re.fullmatch(r"([A-Za-z_][\w.-]*)\((.*)\)", called)
        if not stripped.startswith(prefix):
            thoughts.append(line)
        elif whole is not None:
            calls.append(Call(whole[1], whole[2].strip()))
        elif prefix or re.fullmatch(r"[A-Za-z_][\w.-]*\([^)]*", called):
            calls.append(BadCall("a call is name(arguments) and nothing else on its line", called))
        else:
            thoughts.append(line)
    return Parsed(_joined(thoughts), tuple(calls))


def parse_auto(text: str) -> Parsed:
    """By the marks in the message itself: for a policy whose convention is not known."""
    if "<tool_call>" in text:
        return parse_hermes(text)
    for parser in (parse_mistral, parse_llama3):
        if (parsed := parser(text)).calls:
            return parsed
    return parse_plain(text)


PARSERS: dict[str, Parser] = {
    "auto": parse_auto,
    "hermes": parse_hermes,
    "llama3": parse_llama3,
    "mistral": parse_mistral,
    "plain": parse_plain,
}


def parse(text: str, call_format: str) -> Parsed:
    """The message in that convention. What stands inside <think> is thought, whatever it looks like."""
    reasoning, close, said = text.rpartition("</think>")
    if not close and said.lstrip().startswith("<think>"):
        return Parsed(text.strip())
    parsed = find_parser(call_format)(said)
    return Parsed(_joined((reasoning + close, parsed.thought)), parsed.calls)


def find_parser(call_format: str) -> Parser:
    if call_format not in PARSERS:
        known = ", ".join(sorted(PARSERS))
        raise UserError(f'call_format "{call_format}" is unknown.{did_you_mean(call_format, PARSERS)} Known: {known}.')
    return PARSERS[call_format]


def write_call(call_format: str, name: str, arguments: Mapping[str, Any]) -> str:
    """The call as a model of that convention writes it: for demonstrations. parse() reads it back."""
    by_key = {"hermes": "arguments", "llama3": "parameters", "mistral": "arguments"}
    if call_format == "plain":
        values = [value if isinstance(value, str) else json.dumps(value) for value in arguments.values()]
        return f"{name}({', '.join(values)})"
    if call_format not in by_key:
        raise UserError(f'no call can be written as "{call_format}". Known: {", ".join((*by_key, "plain"))}.')
    body = json.dumps({"name": name, by_key[call_format]: dict(arguments)}, ensure_ascii=False)
    return {"hermes": f"<tool_call>\n{body}\n</tool_call>", "llama3": body, "mistral": f"[TOOL_CALLS][{body}]"}[
        call_format
    ]


def describe_tools(schemas: Iterable[Mapping[str, Any]], call_format: str) -> str:
    """Tools in words, and how to call one: for models whose chat template cannot show schemas."""
    tools = [schema["function"] for schema in schemas]
    names = [list(tool.get("parameters", {}).get("properties", {})) for tool in tools]
    lines = [
        f"{tool['name']}({', '.join(own)}): {tool.get('description', '')}"
        for tool, own in zip(tools, names, strict=True)
    ]
    if call_format in ("auto", "plain"):
        return "\n".join(["Call a tool by writing a line of its own, then wait for its output:", *lines])
    call = write_call(call_format, "NAME", {"ARGUMENT": "VALUE"})
    return "\n".join([f"Call a tool by writing\n{call}\nthen wait for its output. The tools:", *lines])


def detect_format(chat_template: str) -> str:
    """The convention that a chat template teaches its model; "plain" when it knows no tools."""
    if "<function=" in chat_template:
        raise UserError(
            "the chat template asks for calls as <function=name>, which is not supported. Set call_format to one of: "
            + ", ".join(sorted(PARSERS))
        )
    marks = {"<tool_call>": "hermes", "[TOOL_CALLS]": "mistral", "<|python_tag|>": "llama3", '"parameters"': "llama3"}
    return next((name for mark, name in marks.items() if mark in chat_template), "plain")


def _named_calls(text: str) -> tuple[Call | BadCall, ...]:
    """name[ARGS]{...} one after the other."""
    calls, place = list[Call | BadCall](), 0
    while _SPACE.match(text, place).end() < len(text):  # type: ignore[union-attr]  # it matches nothing, too
        found = _NAMED.match(text, place)
        value, end = _json_at(text, found.end()) if found else (None, place)
        if found is None or not isinstance(value, dict):
            return (*calls, BadCall("a call is a name and a JSON object of arguments", text[place:]))
        calls.append(Call(found[1], value))
        place = end
    return tuple(calls) or (BadCall("no call follows [TOOL_CALLS]", text),)


def _call_of_text(text: str) -> Call | BadCall:
    value, end = _json_at(text, 0)
    if value is None or text[end:].strip():
        return BadCall("the call is not valid JSON", text)
    return _call_of(value, text)


def _call_of(value: Any, text: str) -> Call | BadCall:
    if not isinstance(value, dict):
        return BadCall("a call must be a JSON object", text)
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters", {}))
    if not isinstance(name, str) or not name:
        return BadCall("the call has no 'name'", text)
    if not isinstance(arguments, dict):
        return BadCall("the arguments must be a JSON object", text)
    return Call(name, arguments)


def _json_at(text: str, start: int) -> tuple[Any, int]:
    """The JSON value that begins here and where it ends; (None, start) when there is none."""
    start = _SPACE.match(text, start).end()  # type: ignore[union-attr]  # it matches nothing, too
    try:
        return _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):  # ValueError: not JSON, or an integer of thousands of digits
        return None, start


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("a key stands twice, and which one counts would be a guess")
    return dict(pairs)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_without_repeats, parse_constant=_no_constant)


def _joined(parts: Iterable[str]) -> str:
    return "\n".join(part.strip() for part in parts if part.strip())
