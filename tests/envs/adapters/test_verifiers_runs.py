"""Runs with a verifiers environment that asks a model by itself: the policy, and a model that temper serve serves."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from temper.build import check_stages
from temper.build.policy import open_policy
from temper.commands.serve import ServeSettings, open_app
from temper.commands.training import train as training
from temper.config import load_recipe
from temper.envs.adapters import verifiers as adapter
from temper.errors import TemperError, UserError
from temper.listening import listen
from temper.models.tiny import make_tiny_model
from temper.runs.reader import RunReader
from temper.serve.server import make_server, serve
from tests.test_resume import write_recipe

package = pytest.importorskip("verifiers")
if not hasattr(package, "SingleTurnEnv"):
    pytest.skip(f"verifiers {package.__version__} has no SingleTurnEnv", allow_module_level=True)

MODULE = """
import verifiers as vf
from datasets import Dataset

ROWS = Dataset.from_list([{"question": f"say {letter}", "answer": letter} for letter in "abcdefgh"])


async def rated(judge, prompt, completion, answer, state):
    said = await judge(prompt, completion, answer, state)
    return sum(map(ord, said + completion[-1].content)) % 7 / 7


def judged():
    rubric = vf.JudgeRubric(judge_prompt="rate {response}", judge_sampling_args={"max_tokens": 6, "stop": ["z"]})
    rubric.add_reward_func(rated)
    return vf.SingleTurnEnv(dataset=ROWS, rubric=rubric)


def too_long():
    rubric = vf.JudgeRubric(judge_prompt="rate " + "x" * 200 + "{response}")
    rubric.add_reward_func(rated)
    return vf.SingleTurnEnv(dataset=ROWS, rubric=rubric)
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_runs.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_runs", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    adapter._loaded.cache_clear()


def judged_recipe(
    tiny_recipe: dict[str, Any], folder: Path, options: dict[str, Any], *, name: str = "judged", **tables: Any
) -> Path:
    new = {**tiny_recipe["model"]["new"], "context": 96, "alphabet": "abcdefghijklmnopqrstuvwxyz "}
    # Vowels end an answer: a model of random weights hardly ever does.
    table = {"name": "judged", "model": {"new": new}, "steps": 2, "alarms": {"readiness": "off"}}
    table |= {"sampling": {"max_new_tokens": 24, "stop": ["a", "e", "i", "o", "u"]}, "checkpoint": {"every": 2}}
    table |= {"train": [{"generator": "verifiers", "options": {"environment": f"own_runs:{name}"}}]}
    table |= {"env": {"name": "verifiers", "options": options}, "reward": [{"kind": "env"}]}
    table |= {"rollout": {"groups_per_step": 2, "group_size": 4}, **tables}
    return write_recipe(folder, table)


def test_the_policy_judges_itself_and_none_of_what_it_said_there_is_trained(
    tiny_recipe: dict[str, Any], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    training.train(judged_recipe(tiny_recipe, tmp_path, {"judge": "policy", "judge_max_tokens": 5}), run=run)
    with RunReader(run) as reader:
        assert [point.value for point in reader.metric("gen/turns_mean")] == [1.0, 1.0]
        calls = [point.value for point in reader.metric("gen/model_calls_mean")]
        rollouts = [record for step in (1, 2) for record in reader.trajectories(0, step)]
        trained = sum(int(sum(row.loss_mask)) for record in rollouts for row in record.rows)
        assert trained == pytest.approx(8 * sum(point.value for point in reader.metric("gen/len_mean")))
        judged = [record for record in rollouts if record.events]
        assert len(judged) > 8, "most answers ended, and were judged"
        assert sum(calls) * 8 == len(judged), "once each"
        for record in judged:
            (event,) = record.events
            answer = event["detail"].partition("answered: ")[2]
            assert (event["kind"], event["name"]) == ("model_call", "policy")
            assert event["detail"].startswith("asked: rate ")
            assert len(answer) <= 5
            assert record.score == pytest.approx(sum(map(ord, answer + record.text)) % 7 / 7)
    assert not [file for file in run.rglob("*") if file.is_file() and b"temper-" in file.read_bytes()], "no key is kept"
    _ask_the_served_model(tiny_recipe, tmp_path, run)


def _ask_the_served_model(tiny_recipe: dict[str, Any], tmp_path: Path, run: Path) -> None:
    """The same environment, judged by what temper serve serves: the checkpoint of the run before."""
    app, ending, name = open_app(run, ServeSettings(name="critic", shutdown_seconds=1.0), "key-of-the-server")
    server, bound = make_server(app, 1.0), listen("127.0.0.1", 0)
    thread = threading.Thread(target=lambda: asyncio.run(serve(server, bound, ending)), daemon=True)
    thread.start()
    until = time.monotonic() + 30.0
    while not server.started and time.monotonic() < until:
        time.sleep(0.01)
    address = f"http://127.0.0.1:{bound.getsockname()[1]}/v1"
    options = {"judge": address, "judge_model": name, "judge_key_variable": "SERVER_KEY"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SERVER_KEY", "key-of-the-server")
        training.train(judged_recipe(tiny_recipe, tmp_path, options), run=tmp_path / "other")
    server.should_exit = True
    thread.join(timeout=30.0)
    with RunReader(tmp_path / "other") as reader:
        events = [event for step in (1, 2) for record in reader.trajectories(0, step) for event in record.events]
    assert events
    assert {(event["kind"], event["name"]) for event in events} == {("model_call", "critic")}
    for file in (tmp_path / "other").rglob("*"):
        assert not file.is_file() or b"key-of-the-server" not in file.read_bytes()


def test_a_model_of_its_own_judges_from_a_directory_beside_the_recipe(
    tiny_recipe: dict[str, Any], tmp_path: Path
) -> None:
    recipe = judged_recipe(tiny_recipe, tmp_path, {"judge": "critic", "judge_max_tokens": 4}, steps=1)
    new = load_recipe(recipe, [])[0].model.new
    assert new is not None
    make_tiny_model(tmp_path / "critic", **{**new.model_dump(exclude_none=True), "seed": 5})
    training.train(recipe, run=tmp_path / "run")
    with RunReader(tmp_path / "run") as reader:
        assert [point.value for point in reader.metric("gen/turns_mean")] == [1.0]
        events = [event for record in reader.trajectories(0, 1) for event in record.events]
    assert events
    assert {event["name"] for event in events} == {"critic"}
    said = [event["detail"].removeprefix("asked: ").split("\nanswered: ") for event in events]
    assert [answer for _, answer in said] == asyncio.run(_ask(tmp_path / "critic", [question for question, _ in said]))


async def _ask(folder: Path, questions: list[str]) -> list[str]:
    policy = open_policy(folder)
    asked = [[{"role": "user", "content": question}] for question in questions]
    answers = await policy.answer(asked, 1, temperature=0.0, max_new_tokens=4)
    await policy.engine.close()
    return [answer.partition("z")[0] for (answer,) in answers]


def test_a_judge_that_cannot_answer_stops_the_run_with_its_reason(tiny_recipe: dict[str, Any], tmp_path: Path) -> None:
    recipe = judged_recipe(tiny_recipe, tmp_path, {"judge": "policy"}, name="too_long")
    with pytest.raises(TemperError, match="judge failed: status 400"):
        training.train(recipe, run=tmp_path / "run")


@pytest.mark.parametrize(
    ("options", "tables", "message"),
    [
        ({"judge": "policy"}, {"objective": {"advantage": "step_values"}}, "cannot answer their environments alike"),
        ({"judge": "policy", "judge_model": "x"}, {}, "judge_model would change nothing"),
        ({"judg": "policy"}, {}, 'option "judg" is unknown'),
    ],
)
def test_what_a_judge_cannot_do_is_said_before_anything_is_read(
    tiny_recipe: dict[str, Any], tmp_path: Path, options: dict[str, Any], tables: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        check_stages(load_recipe(judged_recipe(tiny_recipe, tmp_path, options, **tables), []))
