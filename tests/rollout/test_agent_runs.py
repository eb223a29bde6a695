"""Agents through the loop with a model: asynchronous, interrupted between two tokens, and failing now and then."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from temper.commands.training import train as training
from temper.errors import TemperError, UserError
from temper.runs.reader import RunReader
from temper.sandbox import require_sandbox
from tests.test_resume import write_recipe

AGENT = """
import json, os, random, sys, urllib.request

def ask(messages):
    body = json.dumps({"model": "any", "messages": messages}).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["choices"][0]["message"]

def solve(task):
    said = ask(task["messages"])
    if random.random() < CRASHES:
        raise RuntimeError("the world broke")
    ask([{"role": "user", "content": "b"}])
    return ask([*task["messages"], said, {"role": "user", "content": "a"}])["content"]
"""


def agent_recipe(tiny_recipe: dict[str, Any], folder: Path, crashes: float, **rollout: Any) -> Path:
    (folder / "agent.py").write_text(AGENT.replace("CRASHES", str(crashes)))
    table = {key: tiny_recipe[key] for key in ("name", "model", "train", "reward", "alarms", "heldout")}
    table |= {"sampling": {"max_new_tokens": 8}, "steps": 3, "checkpoint": {"every": 1, "keep": 2}}
    table["env"] = {"name": "agent", "options": {"function": "agent.py:solve", "max_running": 8}}
    table["rollout"] = {"groups_per_step": 2, "group_size": 2, "max_turns": 4, **rollout}
    return write_recipe(folder, table)


@pytest.mark.heavy
def test_agents_are_trained_while_weights_change_under_them(tiny_recipe: dict[str, Any], tmp_path: Path) -> None:
    control = {"controls": [{"name": "partial"}], "max_staleness": 1, "order": "finished"}
    training.train(agent_recipe(tiny_recipe, tmp_path, 0.0, **control), run=tmp_path / "run")
    with RunReader(tmp_path / "run") as reader:
        steps = list(reader.steps())
        assert len(steps) == 3
        assert max(step.max_staleness for step in steps) <= 1
        assert all(point.value == 3.0 for point in reader.metric("gen/turns_mean"))


@pytest.mark.heavy
def test_agents_behind_the_wall_are_trained_by_what_they_ask(tiny_recipe: dict[str, Any], tmp_path: Path) -> None:
    try:
        require_sandbox()
    except UserError as error:
        pytest.skip(str(error))
    recipe = agent_recipe(tiny_recipe, tmp_path, 0.0)
    walled = f'command = "{sys.executable} {tmp_path}/agent.py"\nsandbox = true'
    text = recipe.read_text()
    assert 'function = "agent.py:solve"' in text
    recipe.write_text(text.replace('function = "agent.py:solve"', walled))
    with (tmp_path / "agent.py").open("a") as file:
        file.write("\nprint(solve(json.load(sys.stdin)))\n")
    training.train(recipe, run=tmp_path / "run")
    with RunReader(tmp_path / "run") as reader:
        assert len(list(reader.steps())) == 3
        assert all(point.value == 3.0 for point in reader.metric("gen/turns_mean"))


@pytest.mark.heavy
def test_agents_that_fail_too_often_stop_the_run_with_their_own_words(
    tiny_recipe: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(TemperError, match="the world broke"):
        training.train(agent_recipe(tiny_recipe, tmp_path, 0.7), run=tmp_path / "run")
