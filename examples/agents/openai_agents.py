"""An agent of OpenAI's Agents SDK. Needs: pip install openai-agents. With options.tools = "plain" for tiny models."""

import json
import sys

from agents import Agent, MaxTurnsExceeded, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from calculator import calc
from openai import AsyncOpenAI

set_tracing_disabled(True)
TOOL = function_tool(calc)


async def solve(task: dict) -> str:
    model = OpenAIChatCompletionsModel("policy", AsyncOpenAI())  # made here: the key is this episode's
    agent = Agent(name="calculator", tools=[TOOL], model=model)
    try:
        return str((await Runner.run(agent, task["prompt"], max_turns=3)).final_output)
    except MaxTurnsExceeded:
        return ""


if __name__ == "__main__":
    import asyncio

    print(asyncio.run(solve(json.load(sys.stdin))))
