"""Agents of published frameworks are played as they are: the files of examples/agents.

Frameworks are looked for in the Python that TEMPER_AGENTS_PYTHON names, which `make adapters` makes, or in this one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from temper.batching import rows_of
from temper.models.tiny import character_tokenizer
from temper.types import Message, Request, Status, Task
from tests.fakes.agents import play_agent
from tests.fakes.sampler import FakeSampler

EXAMPLES = Path(__file__).parents[3] / "examples" / "agents"
PYTHON = os.environ.get("TEMPER_AGENTS_PYTHON", sys.executable)
PACKAGES = {
    "plain_http": "json",
    "openai_client": "openai",
    "openai_agents": "agents",
    "pydantic_ai_agent": "pydantic_ai",
    "langgraph_agent": "langgraph",
}
TASK = Task(id="t", messages=(Message(role="user", content="47*83"),), answer="3901")


def test_every_example_is_played_and_short() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*PACKAGES, "calculator"}
    assert all(path.read_text().count("\n") <= 40 for path in EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("how", ["function", "command"])
@pytest.mark.parametrize("name", PACKAGES)
def test_an_example_calls_its_tool_and_answers_in_one_row(name: str, how: str) -> None:
    package = PACKAGES[name]
    found = subprocess.run([PYTHON, "-c", f"import importlib.util as u; assert u.find_spec({package!r})"], timeout=60)
    if found.returncode:
        pytest.skip(f"{package} is not installed")
    tokenizer = character_tokenizer("abcdefghijklmnopqrstuvwxyz0123456789+-*/=?.,:;!'() ")

    def say(request: Request) -> list[int]:
        said = "3901" if "<|user|>3901" in tokenizer.decode(request.prompt_ids) else "calc(47*83)"
        return [*tokenizer.encode(said), tokenizer.eos_token_id]

    path = EXAMPLES / f"{name}.py"
    what = {"function": f"{path}:solve"} if how == "function" else {"command": f"{PYTHON} {path}"}
    options = {**what, "python": PYTHON, "tools": "plain"}
    played = play_agent(TASK, FakeSampler(say), tokenizer, options, seconds=120.0)
    assert (played.status, played.error, played.score.value) == (Status.COMPLETED, None, 1.0)
    (row,) = rows_of(played)
    said = "<|user|>47*83<|assistant|>calc(47*83)<|end|><|user|>3901<|assistant|>3901<|end|>"
    assert tokenizer.decode(row.token_ids) == said
