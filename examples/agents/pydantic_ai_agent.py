"""An agent of Pydantic AI. Needs: pip install "pydantic-ai-slim[openai]". options.tools = "plain" for tiny models."""

import json
import sys

from calculator import calc
from pydantic_ai import Agent
from pydantic_ai.exceptions import UnexpectedModelBehavior, UsageLimitExceeded
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.usage import UsageLimits


async def solve(task: dict) -> str:
    agent = Agent(OpenAIChatModel("policy"), tools=[calc], retries=0)  # made here: the key is this episode's
    try:
        return (await agent.run(task["prompt"], usage_limits=UsageLimits(request_limit=3))).output
    except (UnexpectedModelBehavior, UsageLimitExceeded):  # an empty answer, or calls without end
        return ""


if __name__ == "__main__":
    import asyncio

    print(asyncio.run(solve(json.load(sys.stdin))))
