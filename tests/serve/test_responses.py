"""OpenAI's Responses interface says what chat completions say, through the real client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from temper.serve.refusals import Refused
from temper.serve.responses import chat_body

PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}}
TOOLS = [{"type": "function", "name": "calc", "parameters": PARAMETERS, "strict": False}]
CALL = '<tool_call>{"name": "calc", "arguments": {"expression": "6*7"}}</tool_call>'


def test_items_become_the_messages_that_they_were() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "calc", "arguments": '{"expression": "6*7"}'}
    output = {"type": "function_call_output", "call_id": "c", "output": "42"}
    thought = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "well"}]}
    asked = chat_body(
        {
            "model": "m",
            "instructions": "be brief",
            "input": [{"role": "user", "content": "6*7"}, thought, call, output],
            "tools": TOOLS,
            "max_output_tokens": 5,
        }
    )
    function = {"name": "calc", "arguments": '{"expression": "6*7"}'}
    assert asked["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "6*7"},
        {"role": "assistant", "content": "well", "tool_calls": [{"id": "c", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c", "content": "42"},
    ]
    assert asked["tools"][0]["function"]["name"] == "calc"
    assert asked["max_completion_tokens"] == 5


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"previous_response_id": "x"}, "previous_response_id"),
        ({"messages": []}, "messages"),
        ({"input": [{"type": "reasoning"}]}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"text": {"format": {"type": "json_object"}}}, "text"),
        ({"input": 3}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}, "x"]}]}, "input"),
        ({"tools": ["x"]}, "tools"),
    ],
)
def test_what_is_not_there_is_refused_by_name(given: dict[str, Any], param: str) -> None:
    with pytest.raises(Refused) as refused:
        chat_body({"model": "m", "input": "x", **given})
    assert refused.value.body["error"]["param"] == param  # type: ignore[index]


def test_the_client_reads_text_calls_and_counts(
    serve_scripted: Callable[..., Any], make_engine: Callable[..., Any]
) -> None:
    engine = make_engine("hello", CALL, "42")
    client = serve_scripted(engine).client()
    said = client.responses.create(model="tiny", input="hi", instructions="be brief")
    assert (said.output_text, said.status, said.usage.output_tokens) == ("hello", "completed", 6)
    called = client.responses.create(model="tiny", input="6*7", tools=TOOLS)
    (call,) = called.output
    assert (call.type, call.name, call.arguments) == ("function_call", "calc", '{"expression": "6*7"}')
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "42"}
    last = client.responses.create(
        model="tiny", input=[{"role": "user", "content": "6*7"}, call.model_dump(), output], tools=TOOLS
    )
    assert last.output_text == "42"
    prompt = engine.tokenizer.decode(engine.requests[-1].prompt_ids)
    assert prompt.rpartition("<|user|>6*7")[2].startswith("<|assistant|><tool_call>"), "the call stands where it was"
    cut = client.responses.create(model="tiny", input="hi", max_output_tokens=2)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")


@pytest.mark.parametrize("text", ["hello", CALL])
def test_a_stream_ends_with_the_whole_response(
    serve_scripted: Callable[..., Any], make_engine: Callable[..., Any], text: str
) -> None:
    client = serve_scripted(make_engine(text)).client()
    events = list(client.responses.create(model="tiny", input="hi", tools=TOOLS, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"
    whole = events[-1].response
    deltas = "".join(event.delta for event in events if event.type.endswith(".delta"))
    assert deltas == (whole.output_text or whole.output[0].arguments)
