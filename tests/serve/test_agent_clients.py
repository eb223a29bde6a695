"""OpenAI's own client inside an episode: streams together with tools, by chat completions and by responses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from temper.batching import rows_of
from temper.types import Message, Request, Status, Task
from tests.fakes.agents import play_agent
from tests.fakes.sampler import FakeSampler

pytest.importorskip("openai", reason="the openai client is not installed")
TASK = Task(id="t", messages=(Message(role="user", content="six times seven"),), answer="42")
PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}}

CHAT = """
def answer(messages, is_streamed):
    asked = dict(model="policy", messages=messages, tools=[{"type": "function", "function": TOOL}])
    if not is_streamed:
        said = client.chat.completions.create(**asked).choices[0].message
        calls = [(call.id, call.function.name, call.function.arguments) for call in said.tool_calls or ()]
        return said.content or "", calls
    text, calls = "", {}
    for part in client.chat.completions.create(**asked, stream=True):
        for choice in part.choices:
            text += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                held = calls.setdefault(call.index, ["", "", ""])
                held[0] += call.id or ""
                held[1] += call.function.name or ""
                held[2] += call.function.arguments or ""
    return text, list(calls.values())

def lead(task, is_streamed):
    messages = list(task["messages"])
    for _ in range(3):
        text, calls = answer(messages, is_streamed)
        if not calls:
            return text
        asked = [{"id": i, "type": "function", "function": {"name": n, "arguments": a}} for i, n, a in calls]
        messages.append({"role": "assistant", "content": text or None, "tool_calls": asked})
        for i, name, arguments in calls:
            assert name == "calc", name
            messages.append({"role": "tool", "tool_call_id": i, "content": calc(json.loads(arguments))})
"""
RESPONSES = """
def answer(items, is_streamed):
    asked = dict(model="policy", input=items, tools=[{"type": "function", **TOOL}], store=False)
    if not is_streamed:
        return client.responses.create(**asked).output
    events = list(client.responses.create(**asked, stream=True))
    assert events[0].type == "response.created", events[0].type
    assert events[-1].type == "response.completed", events[-1].type
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.type for item in done] == [item.type for item in events[-1].response.output]
    return done

def lead(task, is_streamed):
    items = list(task["messages"])
    for _ in range(3):
        output = answer(items, is_streamed)
        items += [item.model_dump(exclude_none=True) for item in output]
        calls = [item for item in output if item.type == "function_call"]
        if not calls:
            return output[-1].content[0].text
        for call in calls:
            found = calc(json.loads(call.arguments))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": found})
"""
AGENT = """
import json
from openai import OpenAI

client = None
TOOL = {tool!r}

def calc(arguments):
    left, right = map(int, arguments["expression"].split("*"))
    return str(left * right)
{lead}
def solve(task):
    global client
    client = OpenAI(max_retries=0)
    return lead(task, {is_streamed})
"""


def spoken(expression: str) -> str:
    return f'<tool_call>\n{{"name": "calc", "arguments": {{"expression": "{expression}"}}}}\n</tool_call>'


@pytest.mark.parametrize("calls", [("6*7",), ("2*3", "6*7")], ids=["one call", "two calls in one answer"])
@pytest.mark.parametrize("is_streamed", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("lead", [CHAT, RESPONSES], ids=["chat completions", "responses"])
def test_tools_and_streams_together_are_one_row_of_exact_tokens(
    tokenizer: Any, tmp_path: Path, lead: str, is_streamed: bool, calls: tuple[str, ...]
) -> None:
    """The first answer hides a special token that no client sees: encoded again, its ids would be others."""
    tool = {"name": "calc", "parameters": PARAMETERS}
    path = tmp_path / "agent.py"
    path.write_text(AGENT.format(tool=tool, lead=lead, is_streamed=is_streamed))
    first = [*tokenizer.encode("\n".join(map(spoken, calls))), tokenizer.convert_tokens_to_ids("<|pad|>")]
    last, end = tokenizer.encode("42"), tokenizer.eos_token_id

    def say(request: Request) -> list[int]:
        has_result = tokenizer.decode(request.prompt_ids).endswith("<|user|>42<|assistant|>")
        return [*(last if has_result else first), end]

    played = play_agent(
        TASK, FakeSampler(say), tokenizer, {"function": f"{path}:solve"}, seconds=120.0, max_new_tokens=200
    )
    assert (played.status, played.error, played.text, played.score.value) == (Status.COMPLETED, None, "42", 1.0)
    (row,) = rows_of(played)
    drawn = [token for token, is_drawn in zip(row.token_ids, row.loss_mask, strict=True) if is_drawn]
    assert drawn == [*first, end, *last, end]
    results = "".join(f"<|user|>{6 if call == '2*3' else 42}" for call in calls)
    between = tokenizer.decode(row.token_ids).partition("<|pad|><|end|>")[2]
    assert between == f"{results}<|assistant|>42<|end|>"
    assert json.dumps(PARAMETERS)[1:20] in tokenizer.decode(row.token_ids), "the template shows the tools"
