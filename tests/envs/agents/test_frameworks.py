"""Agents of published frameworks are played as they are: the files of examples/agents.

Frameworks are looked for in the Python that TEMPER_AGENTS_PYTHON names, which `make adapters` makes, or in this one.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*PACKAGES, "calculator", "service"}
    assert all(path.read_text().count("\n") <= 40 for path in EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("how", ["function", "command"])
@pytest.mark.parametrize("name", PACKAGES)
def test_an_example_calls_its_tool_and_answers_in_one_row(name: str, how: str) -> None:
    package = PACKAGES[name]
    found = subprocess.run([PYTHON, "-c", f"import importlib.util as u; assert u.find_spec({package!r})"], timeout=60)
    if found.returncode:
        pytest.skip(f"{package} is not installed")
    path = EXAMPLES / f"{name}.py"
    what = {"function": f"{path}:solve"} if how == "function" else {"command": f"{PYTHON} {path}"}
    require_played({**what, "python": PYTHON, "tools": "plain"})


@contextlib.contextmanager
def example_service(**variables: str) -> Iterator[str]:
    """Address of the service, as its reader starts it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [sys.executable, str(EXAMPLES / "service.py"), str(port)]
    service = subprocess.Popen(words, stderr=subprocess.DEVNULL, env={**os.environ, **variables})
    try:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/episodes"
    finally:
        service.kill()
        service.wait(timeout=10)


def test_the_service_of_the_examples_calls_its_tool_and_answers_in_one_row() -> None:
    with example_service() as url:
        require_played({"url": url})


def test_the_service_of_the_examples_ends_at_a_limit_as_the_same_agent_does_when_it_is_started() -> None:
    tokenizer = character_tokenizer("abcdefghijklmnopqrstuvwxyz0123456789+-*/=?.,:;!'() ")
    endless = [*tokenizer.encode("calc(1+1)"), tokenizer.eos_token_id]
    with example_service() as url:
        for options in ({"url": url}, {"function": f"{EXAMPLES / 'plain_http.py'}:solve"}):
            began = time.monotonic()
            played = play_agent(TASK, FakeSampler(lambda _: endless), tokenizer, options, seconds=120.0, max_turns=2)
            assert (played.status, played.text, played.score.value) == (Status.TRUNCATED_TURNS, "", 0.0), options
            assert time.monotonic() - began < 100, "it says so, and the rest of its time is not waited for"


def test_the_service_of_the_examples_takes_orders_from_whoever_shows_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPISODES_KEY", "s3cret")
    with example_service(EPISODES_KEY="s3cret") as url:
        require_played({"url": url, "key_variable": "EPISODES_KEY"})
        for shown in ({}, {"Authorization": "Bearer s3cre"}, {"Authorization": "Bearer s3cret\u00e9"}):
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(urllib.request.Request(url, b"{}", shown), timeout=20)
            assert refused.value.code == 401


def test_the_service_of_the_examples_listens_to_no_network_without_a_key() -> None:
    without = {name: value for name, value in os.environ.items() if name != "EPISODES_KEY"}
    words = [sys.executable, str(EXAMPLES / "service.py"), "0", "0.0.0.0"]
    ended = subprocess.run(words, env=without, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "set EPISODES_KEY" in ended.stderr


def require_played(options: dict[str, Any]) -> None:
    """One episode in which the tool is called and its value is the answer."""
    tokenizer = character_tokenizer("abcdefghijklmnopqrstuvwxyz0123456789+-*/=?.,:;!'() ")

    def say(request: Request) -> list[int]:
        said = "3901" if "<|user|>3901" in tokenizer.decode(request.prompt_ids) else "calc(47*83)"
        return [*tokenizer.encode(said), tokenizer.eos_token_id]

    played = play_agent(TASK, FakeSampler(say), tokenizer, options, seconds=120.0)
    assert (played.status, played.error, played.score.value) == (Status.COMPLETED, None, 1.0)
    (row,) = rows_of(played)
    said = "<|user|>47*83<|assistant|>calc(47*83)<|end|><|user|>3901<|assistant|>3901<|end|>"
    assert tokenizer.decode(row.token_ids) == said
