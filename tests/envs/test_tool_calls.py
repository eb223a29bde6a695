"""What models write is read as they meant it; what cannot be read is said, never thrown, never run."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from temper.envs.tool_calls import (
    PARSERS,
    BadCall,
    Call,
    describe_tools,
    detect_format,
    parse,
    parse_hermes,
    parse_llama3,
    parse_mistral,
    parse_plain,
    write_call,
)
from temper.errors import UserError

ADD = Call("add", {"a": 1, "b": 2})
HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
LLAMA = '{"name": "add", "parameters": {"a": 1, "b": 2}}'
MISTRAL = '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}}]'


@pytest.mark.parametrize(
    ("call_format", "text"),
    [
        ("hermes", HERMES),
        ("llama3", LLAMA),
        ("llama3", f"<|python_tag|>{LLAMA}"),
        ("llama3", '{"type": "function", "name": "add", "parameters": {"a": 1, "b": 2}}'),
        ("mistral", MISTRAL),
        ("mistral", MISTRAL.removeprefix("[TOOL_CALLS] ")),  # tokenizers drop special tokens when they decode
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}'),
        ("mistral", 'add{"a": 1, "b": 2}'),
    ],
)
def test_each_convention_is_read_and_auto_knows_it(call_format: str, text: str) -> None:
    assert parse(text, call_format).calls == (ADD,)
    assert parse(text, "auto").calls == (ADD,)


def test_text_around_calls_is_thought_and_several_calls_keep_their_order() -> None:
    parsed = parse_hermes(f"I add.\n{HERMES}\nand\n{HERMES.replace('add', 'sub')}\ndone")
    assert [call.name for call in parsed.calls if isinstance(call, Call)] == ["add", "sub"]
    assert parsed.thought == "I add.\nand\ndone"
    assert parse_llama3(f"first {LLAMA}; {LLAMA} then").calls == (ADD, ADD)
    assert parse_llama3(f"first {LLAMA}; {LLAMA} then").thought == "first\nthen"
    both = parse_mistral('hm [TOOL_CALLS] [{"name": "a", "arguments": {}}, {"name": "b", "arguments": {}}] ok')
    assert (both.calls, both.thought) == ((Call("a", {}), Call("b", {})), "hm\nok")
    assert len(parse_mistral('[TOOL_CALLS]a[ARGS]{}[TOOL_CALLS]b[ARGS]{"x": 1}').calls) == 2
    lines = parse_plain("let me see\ncalc(1+2)\nand calc(3)\n calc((4)) ")
    assert lines.calls == (Call("calc", "1+2"), Call("calc", "(4)"))
    assert lines.thought == "let me see\nand calc(3)"


@pytest.mark.parametrize(
    ("call_format", "text"),
    [
        ("hermes", "<tool_call>{'name': 'add'}</tool_call>"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}'),
        ("hermes", '<tool_call>{"name": "add", "arguments": {}} and more</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": "1, 2"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1, "a": 2}}</tool_call>'),
        ("hermes", f"<tool_call>{'[' * 100_000}</tool_call>"),
        ("hermes", f'<tool_call>{{"name": "add", "arguments": {{"a": {"9" * 5000}}}}}</tool_call>'),
        ("llama3", '{"name": "add", "parameters": {"a": 1'),
        ("llama3", "<|python_tag|>print(1)"),
        ("mistral", "[TOOL_CALLS] [{]"),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral", "[TOOL_CALLS][3]"),
        ("plain", "calc(1+2"),
    ],
)
def test_a_malformed_call_is_a_bad_call_with_a_reason(call_format: str, text: str) -> None:
    (call,) = parse(text, call_format).calls
    assert isinstance(call, BadCall)
    assert call.reason


@pytest.mark.parametrize("call_format", sorted(PARSERS))
@pytest.mark.parametrize(
    "text", ["3901", "", "the set {1, 2} is {}", '{"answer": 3}', "f(x) is odd", "see (this", "S {1, 2}"]
)
def test_an_answer_is_no_call(call_format: str, text: str) -> None:
    parsed = parse(text, call_format)
    assert parsed.calls == ()
    assert "".join(parsed.thought.split()) == "".join(text.split())


def test_what_stands_inside_reasoning_is_not_called() -> None:
    assert parse(f"<think>I could {HERMES}</think>no", "hermes").calls == ()
    assert parse(f"perhaps {HERMES}</think>{HERMES}", "hermes").calls == (ADD,)  # the template opened <think>
    assert parse(f"<think>I could {HERMES}", "hermes").calls == ()


def test_marks_inside_a_string_do_not_end_the_call() -> None:
    arguments = {"code": "print('</tool_call>'); print('<tool_call>')"}
    assert parse(write_call("hermes", "run", arguments), "hermes").calls == (Call("run", arguments),)


def test_a_prefix_makes_prose_safe_and_what_follows_it_strict() -> None:
    assert parse_plain("f(x)", prefix="call:").calls == ()
    assert parse_plain("call: f(x)", prefix="call:").calls == (Call("f", "x"),)
    assert isinstance(parse_plain("call: f x", prefix="call:").calls[0], BadCall)


@given(st.dictionaries(st.text(max_size=5), st.none() | st.booleans() | st.integers() | st.text(), max_size=4))
@settings(max_examples=60)
def test_what_is_written_is_read_back(arguments: dict[str, object]) -> None:
    for call_format in ("hermes", "llama3", "mistral"):
        assert parse_of(call_format, write_call(call_format, "add", arguments)) == Call("add", arguments)
    assert parse_of("plain", write_call("plain", "add", {"x": "1+2"})) == Call("add", "1+2")


def parse_of(call_format: str, text: str) -> Call | BadCall:
    (call,) = PARSERS[call_format](text).calls
    return call


def test_no_text_makes_a_parser_throw() -> None:
    draw = random.Random(0)
    pieces = [*"{}[]()\"',:;\\ \n", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", '"name"']
    pieces += ['"arguments"', "null", "9", "calc", "</think>", "<think>", "\ud800", json.dumps({"name": "a"})]
    for _ in range(3000):
        text = "".join(draw.choices(pieces, k=draw.randint(0, 25)))
        for name in PARSERS:
            for call in parse(text, name).calls:
                assert isinstance(call, Call | BadCall)


def test_the_template_tells_the_convention() -> None:
    assert detect_format("... within <tool_call></tool_call> XML tags ...") == "hermes"
    assert detect_format("{{ '[TOOL_CALLS]' }}") == "mistral"
    assert detect_format("<|start_header_id|> ... <|python_tag|>") == "llama3"
    assert detect_format("<|user|>{{ message }}") == "plain"
    with pytest.raises(UserError, match="not supported"):
        detect_format("<tool_call><function=name></function>")


def test_an_unknown_convention_is_refused() -> None:
    with pytest.raises(UserError, match='Did you mean "hermes"'):
        parse("x", "herms")
    with pytest.raises(UserError, match="no call can be written"):
        write_call("auto", "f", {})


@pytest.mark.parametrize("call_format", sorted(PARSERS))
def test_tools_in_words_teach_the_convention_that_is_read(call_format: str) -> None:
    properties = {"a": {"type": "integer"}, "b": {"type": "integer"}}
    function = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": properties}}
    words = describe_tools([{"type": "function", "function": function}], call_format)
    assert "add(a, b): Adds." in words
    taught = "plain" if call_format == "auto" else call_format
    shown = parse(words, taught).calls
    if taught == "plain":
        assert parse("add(1, 2)", call_format).calls == (Call("add", "1, 2"),)
    else:
        assert shown == (Call("NAME", {"ARGUMENT": "VALUE"}),)
