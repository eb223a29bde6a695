"""The tool loop of OpenAI's own client. Needs: pip install openai. With options.tools = "plain" for tiny models."""

import json
import sys

from calculator import calc
from openai import OpenAI

PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
TOOLS = [{"type": "function", "function": {"name": "calc", "description": calc.__doc__, "parameters": PARAMETERS}}]


def solve(task: dict) -> str:
    client, messages = OpenAI(), list(task["messages"])  # address and key come from the environment
    for _ in range(3):
        said = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS).choices[0].message
        if not said.tool_calls:
            break
        messages.append(said)
        for call in said.tool_calls:
            value = calc(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": value})
    return said.content or ""


if __name__ == "__main__":
    print(solve(json.load(sys.stdin)))
