"""A dry run plays one episode of the agent, and refuses what training would find hours later."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from temper.build import first_model, resolve_objective
from temper.cli import app
from temper.commands.training import agent_trial
from temper.commands.training.agent_trial import try_agent
from temper.commands.training.preflight import count_doubts, dry_run
from temper.config import resolve, to_toml
from temper.errors import UserError
from temper.sandbox import require_sandbox
from temper.stages.kinds import kind_of
from temper.stages.reading.data import open_data
from tests.fakes.agent_service import agent_service

AGENT = """
import json, os, sys, time, urllib.request

def post(path, body, key=None):
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + (key or os.environ["OPENAI_API_KEY"])}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        sys.exit(f"refused with {error.code}")

def ask(key=None, prompt=None, **options):
    messages = [{"role": "user", "content": prompt}] if prompt else task["messages"]
    answer = post("/chat/completions", {"model": "m", "messages": messages, **options}, key)
    return answer["choices"][0]["message"]["content"]

def solve(given):
    global task
    task = given
    exec(WORK)
    return "done"

if __name__ == "__main__":
    print(solve(json.load(sys.stdin)))
"""
Try = Callable[..., dict[str, str]]


@pytest.fixture
def table(tiny_recipe: dict[str, Any]) -> dict[str, Any]:
    return {key: tiny_recipe[key] for key in ("name", "model", "train", "reward", "heldout")} | {
        "sampling": {"max_new_tokens": 8},
        "steps": 1,
        "env": {"name": "agent", "options": {}},
        "rollout": {"groups_per_step": 2, "group_size": 2, "max_turns": 4, "episode_seconds": 30.0},
    }


@pytest.fixture
def attempt(table: dict[str, Any], tmp_path: Path) -> Try:
    """Tries an agent that does this work. options: of env "agent"; without any, it is a command."""

    def attempt_agent(work: str = "", *, rollout: dict[str, Any] | None = None, **options: Any) -> dict[str, str]:
        path = tmp_path / "agent.py"
        path.write_text(AGENT.replace("WORK", repr(work)))
        table["env"]["options"] = options or {"command": f"{sys.executable} {path}"}
        table["rollout"] |= rollout or {}
        (config,) = resolve(table, [], where="tiny")
        objective = resolve_objective(config)
        data = open_data(config, objective, kind_of(config).reading, first_model(config, tmp_path))
        return asyncio.run(try_agent(config, objective, data))

    return attempt_agent


def test_an_agent_is_played_and_what_it_did_is_told(attempt: Try, tmp_path: Path) -> None:
    (line,) = attempt("said = ask(); ask(); print(said, file=sys.stderr)").items()
    assert line[0] == "agent"
    assert re.search(r"agent\.py played spell_backward:2:0: asked the model 2 times, was answered 'ok', ", line[1])
    assert line[1].endswith("ended with exit code 0, handed in 'done'. It said: ok"), "what a policy would have said"
    called = attempt("ask()", function=f"{tmp_path / 'agent.py'}:solve")
    assert "agent.py:solve played spell_backward:2:0: asked the model once" in called["agent"]


@pytest.mark.parametrize(
    ("work", "message"),
    [
        ("raise ImportError('no such thing')", r"agent.py does not play: .* exit code 1\. It said: .*no such thing"),
        ("os.kill(os.getpid(), 9)", "the agent ended with signal 9"),
        ("print('noticed nothing', file=sys.stderr)", r"without asking the model: is .*\? It said: noticed nothing"),
        ("ask(key='sk-mine')", "refused with 401.* It was refused: 401 this key belongs to no running episode"),
        ("ask(response_format={'type': 'json_object'})", "It was refused: 400 response_format is not implemented"),
        ("print('waits', file=sys.stderr, flush=True); time.sleep(60)", r"nothing in the 2 s .*\. It said: waits"),
    ],
)
def test_an_agent_that_would_fail_whatever_the_policy_says_is_refused(attempt: Try, work: str, message: str) -> None:
    with pytest.raises(UserError, match=re.compile(message, re.DOTALL)):
        attempt(work, rollout={"episode_seconds": 2.0 if "sleep" in work else 30.0})


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("{agent}:solv", r"agent\.py:solv cannot be started: AttributeError: .*'solv'"),
        ("no_such_pkg.mod:solve", "no_such_pkg.mod:solve cannot be started: ModuleNotFoundError"),
        ("{agent}:os", "does not play: .*'module' object is not callable"),
    ],
)
def test_a_function_that_is_not_there_is_refused(attempt: Try, tmp_path: Path, function: str, message: str) -> None:
    with pytest.raises(UserError, match=re.compile(message, re.DOTALL)):
        attempt(function=function.format(agent=tmp_path / "agent.py"))


@pytest.mark.parametrize(
    ("work", "told"),
    [
        ("int(ask())", r"asked the model once, .* ended with exit code 1\. It said: .*invalid literal.*'ok'.*a result"),
        ("ask(); time.sleep(60)", r"asked the model once, .* had not ended after 3 s\. In training .* after 3 s"),
        ("post('/result', {'result': 'mine'})", "asked the model nothing, posted a result, ended with exit code 0"),
        ("ask(prompt='a' * 40)", "was refused: 400 the prompt has 42 tokens, .* a longer context"),
        ("if os.fork() == 0: time.sleep(60)\nask()", "exit code 0 and left 1 processes running"),
    ],
)
def test_an_agent_that_ends_badly_after_it_was_answered_is_doubted_and_not_refused(
    attempt: Try, work: str, told: str
) -> None:
    """It may be for what the stand-in says, or for the task."""
    found = attempt(work, rollout={"episode_seconds": 3.0 if work.endswith("(60)") else 30.0})
    assert list(found) == ["agent in doubt"]
    assert re.search(told, found["agent in doubt"], re.DOTALL), found


def test_a_trial_that_is_shorter_than_an_episode_refuses_nobody(attempt: Try, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_trial, "TRIAL_SECONDS", 2.0)
    found = attempt("time.sleep(60)")
    assert "asked the model nothing, had not ended after 2 s" in found["agent in doubt"]
    assert "after 30 s (rollout.episode_seconds)" in found["agent in doubt"]


def test_limits_are_those_of_training_and_no_doubt(attempt: Try) -> None:
    (name, told), *_ = attempt("while True: ask()", rollout={"max_turns": 3}).items()
    assert name == "agent"
    assert "3 times, was answered 'ok', was refused: 403 the episode has made its 3 calls (rollout.max_turns)" in told
    assert "ended with exit code 1, handed in ''. It said: refused with 403" in told


def test_a_recipe_that_draws_from_the_likeliest_tokens_is_tried_as_well(attempt: Try, table: dict[str, Any]) -> None:
    """Their probabilities are nothing that a stand-in could know."""
    table["sampling"] |= {"top_k": 5, "top_p": 0.9}
    assert "asked the model once" in attempt("ask(logprobs=True)")["agent"]


def test_a_stage_that_plays_nothing_starts_nobody(attempt: Try, table: dict[str, Any], tmp_path: Path) -> None:
    del table["heldout"]
    table["stage"] = [{"kind": "sft"}]
    assert attempt(f"open({str(tmp_path / 'note')!r}, 'w')") == {}
    assert not (tmp_path / "note").exists()


def test_the_wall_stands_around_it(attempt: Try, tmp_path: Path) -> None:
    try:
        require_sandbox()
    except UserError as error:
        pytest.skip(str(error))
    (tmp_path / "agent.py").touch()
    hidden = tmp_path / "gold.txt"
    hidden.write_text("42")
    told = attempt(
        f"ask(); print(open({str(hidden)!r}).read(), file=sys.stderr)",
        command=f"{sys.executable} {tmp_path / 'agent.py'}", sandbox=True, hide=[str(hidden)],
    )  # fmt: skip
    assert "PermissionError" in told["agent in doubt"]


def test_beside_a_run_of_the_same_recipe_it_is_not_played_and_not_refused(attempt: Try, tmp_path: Path) -> None:
    (tmp_path / "agent.py").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        found = attempt("ask()", command=f"{sys.executable} {tmp_path / 'agent.py'}", listen=listen)
    assert f"not tried: it would not find the model, for Temper cannot listen on {listen}" in found["agent in doubt"]


def test_a_service_is_looked_for_and_told_of_nothing(attempt: Try) -> None:
    with agent_service(lambda asked, order: None) as server:
        found = attempt(url=server.url)
        assert found == {"agent": f"{server.url} takes connections. {agent_trial.UNTOLD}"}
        assert (server.orders, server.over) == ([], [])
    found = attempt(url=server.url)
    assert f"{server.url} cannot be reached now (ConnectionRefusedError" in found["agent in doubt"]


def test_a_dry_run_shows_it_counts_its_doubts_and_is_not_in_order_where_it_is_refused(
    table: dict[str, Any], tmp_path: Path
) -> None:
    def write(work: str) -> Path:
        (tmp_path / "agent.py").write_text(AGENT.replace("WORK", repr(work)))
        table["env"]["options"] = {"function": f"{tmp_path / 'agent.py'}:solve"}
        path = tmp_path / "recipe.toml"
        path.write_text(to_toml(resolve(table, [], where="tiny")))
        return path

    found = dry_run(write("ask()"))
    assert re.search(r"\n  agent +\S+agent\.py:solve played ", found)
    assert "environment" not in found, "nothing else was started"
    assert count_doubts(found) == 0
    loud = dry_run(write("ask(); print('warning: 1\\nwarning: 2', file=sys.stderr)"))
    assert "It said: warning: 1 / warning: 2" in loud
    assert count_doubts(loud) == 0, "lines of the agent's are none of Temper's"
    assert count_doubts(dry_run(write("int(ask())"))) == 1
    ran = CliRunner().invoke(app, ["train", str(write("ask()")), "--set", "env.options.function=json:nothing",
                                   "--dry-run"])  # fmt: skip
    assert isinstance(ran.exception, UserError), ran.output
    assert "in order" not in ran.output


def test_what_the_agent_imports_is_not_imported_here(attempt: Try, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    (tmp_path / "mine.py").write_text(f"import os\nopen({str(note)!r}, 'w').write(str(os.getpid()))\ndef solve(t): 0")
    with pytest.raises(UserError, match="without asking the model"):
        attempt(function=f"{tmp_path / 'mine.py'}:solve")
    assert json.loads(note.read_text()) != os.getpid()
