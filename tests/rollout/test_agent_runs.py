"""Agents through the loop with a model: asynchronous, interrupted between two tokens, and failing now and then."""

from __future__ import annotations

import random
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from temper.commands.training import train as training
from temper.commands.training.preflight import dry_run
from temper.errors import TemperError, UserError
from temper.runs.reader import RunReader
from temper.sandbox import require_sandbox
from tests.fakes.agent_service import Announced, agent_service, ask, hand_in
from tests.test_resume import finish, identity, kill_somewhere, start, write_recipe

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


@pytest.mark.heavy
def test_a_run_whose_agents_run_elsewhere_is_killed_and_resumed_to_the_bit(
    tiny_recipe: dict[str, Any], tmp_path: Path
) -> None:
    """Trained, evaluated, and never more episodes at the same time than the recipe allows."""
    lock, alive = threading.Lock(), [0, 0]

    def play(asked: Announced, order: dict[str, Any]) -> None:
        with lock:
            alive[0] += 1
            alive[1] = max(alive)
        asked.reply(202, b"")
        messages = order["task"]["messages"]
        said = ask(order, messages)
        ask(order, [{"role": "user", "content": "b"}])
        result = ask(order, [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": "a"}])
        with lock:
            alive[0] -= 1
        hand_in(order, result)

    with socket.create_server(("127.0.0.1", 0)) as free:
        listen = f"127.0.0.1:{free.getsockname()[1]}"
    with agent_service(play) as server:
        recipe = agent_recipe(tiny_recipe, tmp_path, 0.0)
        elsewhere = f'url = "{server.url}"\nlisten = "{listen}"'
        text = recipe.read_text()
        assert 'function = "agent.py:solve"' in text
        text = text.replace('function = "agent.py:solve"', elsewhere).replace("max_running = 8", "max_running = 2")
        recipe.write_text(text)
        finish(start(recipe, tmp_path / "whole", resume=False))
        assert alive[1] == 2
        killed = start(recipe, tmp_path / "run", resume=False)
        kill_somewhere(killed, tmp_path / "run", random.Random(0))
        finish(start(recipe, tmp_path / "run", resume=True))
    resumed, whole = identity(tmp_path / "run"), identity(tmp_path / "whole")
    assert resumed["files"] == whole["files"], "weights and states of every checkpoint"
    assert resumed["ledger"] == whole["ledger"]
    with RunReader(tmp_path / "whole") as reader:
        assert len(list(reader.steps())) == 3
        assert all(point.value == 3.0 for point in reader.metric("gen/turns_mean"))


def test_credit_for_payments_that_nobody_makes_is_refused(tiny_recipe: dict[str, Any], tmp_path: Path) -> None:
    recipe = agent_recipe(tiny_recipe, tmp_path, 0.0)
    recipe.write_text(recipe.read_text() + '\n[objective]\nadvantage = "turn_returns"\n')
    with pytest.raises(UserError, match='and env "agent" pays none'):
        dry_run(recipe)
