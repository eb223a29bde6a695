"""An agent that knows nothing but HTTP: it asks the model, runs the calculator that the model calls, and asks again.

Temper starts it for every episode of recipes/agent_http.toml. The task comes on standard input as JSON; what it prints
is its answer, which the recipe's reward judges.
"""

import json
import os
import re
import sys
from urllib.request import Request, urlopen

from calculator import calc


def post(url: str, key: str, body: dict) -> dict:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    with urlopen(Request(url, json.dumps(body).encode(), headers), timeout=60) as response:
        return json.load(response)


def solve(task: dict, address: str = "", key: str = "") -> str:
    address, key = address or os.environ["OPENAI_BASE_URL"], key or os.environ["OPENAI_API_KEY"]
    messages, said = list(task["messages"]), ""
    for _ in range(3):
        answer = post(f"{address}/chat/completions", key, {"model": "policy", "messages": messages})
        said = answer["choices"][0]["message"]["content"]
        call = re.fullmatch(r"calc\((.*)\)", said)
        if call is None:
            break
        messages += [{"role": "assistant", "content": said}, {"role": "tool", "content": calc(call[1])}]
    return said


if __name__ == "__main__":
    print(solve(json.load(sys.stdin)))
