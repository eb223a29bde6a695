from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from temper.envs.adapters import verifiers as adapter
from temper.envs.adapters.verifiers import VerifiersEnv, VerifiersReward, verifiers
from temper.errors import TaskError, UserError, install_line
from temper.protocols import EnvReply
from temper.types import Completion, EventKind, Finish, Message, Score, ScoreKind, Status, Task, Trajectory, Turn

package = pytest.importorskip("verifiers")
if not hasattr(package, "SingleTurnEnv"):
    pytest.skip(f"verifiers {package.__version__} has no SingleTurnEnv", allow_module_level=True)

MODULE = '''
import time
import verifiers as vf
from datasets import Dataset

ROWS = [{"question": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(8)]


def right(completion, answer):
    text = completion[-1].content if hasattr(completion[-1], "content") else completion[-1]["content"]
    if "explode" in text:
        raise ZeroDivisionError("the rubric broke")
    if "hang" in text:
        time.sleep(5)
    if "nan" in text:
        return float("nan")
    return 1.0 if answer in text else 0.0


def short(completion):
    return 0.5


def single(system="Add."):
    rubric = vf.Rubric(funcs=[right, short], weights=[1.0, 0.2])
    return vf.SingleTurnEnv(dataset=Dataset.from_list(ROWS), system_prompt=system, rubric=rubric)


class Countdown(vf.MultiTurnEnv):
    """Say numbers from 3 to 0."""

    async def setup_state(self, state):
        state["left"] = 3
        return state

    async def env_response(self, messages, state, **kwargs):
        said = messages[-1].content
        if said == "crash":
            raise vf.ToolCallError("the countdown broke")
        if said == "block":
            time.sleep(5)
        if said == str(state["left"]):
            state["left"] -= 1
        if state["left"] == 0:
            state["final_env_response"] = [{"role": "user", "content": "Lift-off!"}]
            return []
        return [{"role": "user", "content": f"Next after {said}?"}]


def left(state):
    return 3.0 - state["left"]


def countdown():
    rows = [{"question": "Count down from 3.", "answer": ""}]
    return Countdown(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[left]), max_turns=6)


def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: One number.
        b: Another.
    """
    return a + b


def tools():
    rubric = vf.Rubric(funcs=[right])
    return vf.ToolEnv(dataset=Dataset.from_list(ROWS), tools=[add], rubric=rubric, max_turns=4)


def nothing():
    return 3
'''


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_verifiers.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_verifiers", raising=False)
    adapter._loaded.cache_clear()


def task(function: str, index: int = 0, **options: Any) -> Task:
    return verifiers(index, 0, environment=f"own_verifiers:{function}", **options)


async def play(task: Task, *said: str, seconds: float = 30.0) -> list[EnvReply]:
    env = VerifiersEnv(step_seconds=seconds)
    try:
        await env.start(task, 0)
        return [await env.step(Message(role="assistant", content=text)) for text in said]
    finally:
        await env.close()


def trajectory(*said: str, finish: Finish = Finish.STOP) -> Trajectory:
    completion = Completion(prompt_ids=(1,), token_ids=[2], logprobs=[-1.0], versions=[0], finish=finish)
    turns = tuple(Turn(completion=completion, message=Message(role="assistant", content=text)) for text in said)
    score = Score.unscorable("not scored yet")
    return Trajectory(task_id="t", group_id="g", index=0, turns=turns, status=Status.COMPLETED, score=score)


def test_rows_become_tasks_in_an_order_of_the_seed_without_repeats() -> None:
    tasks = [task("single", index) for index in range(16)]
    assert len({one.id for one in tasks[:8]}) == 8
    assert [one.id for one in tasks[:8]] != [one.id for one in tasks[8:]]
    assert tasks[0].messages[0] == Message(role="system", content="Add.")
    assert tasks[0].messages[1].content.startswith("What is")
    assert task("single", system="Sum.").messages[0].content == "Sum."
    assert verifiers(0, 1, environment="own_verifiers:single").env == "verifiers"


def test_a_single_turn_is_judged_by_the_rubric_with_its_weights() -> None:
    one = task("single")
    (right,) = asyncio.run(play(one, f"It is {one.answer}"))
    (wrong,) = asyncio.run(play(one, "no idea"))
    assert (right.is_done, right.reward) == (True, pytest.approx(1.1))
    assert wrong.reward == pytest.approx(0.1)


def test_the_reward_judges_a_trajectory_alike() -> None:
    one = task("single")
    reward = VerifiersReward()
    assert reward.check(one) is None
    assert "generator verifiers" in (reward.check(Task(id="t", messages=())) or "")
    assert asyncio.run(reward.score(one, trajectory(f"{one.answer}"))).value == pytest.approx(1.1)
    cut = trajectory("it is", finish=Finish.LENGTH)
    assert asyncio.run(reward.score(one, cut)).value == pytest.approx(0.1)


def test_a_reward_function_that_raises_is_an_error_although_the_rubric_itself_makes_it_zero() -> None:
    one = task("single")
    score = asyncio.run(VerifiersReward().score(one, trajectory("explode")))
    assert score.kind is ScoreKind.ERROR
    assert "right failed: ZeroDivisionError: the rubric broke" in (score.reason or "")
    with pytest.raises(TaskError, match="the rubric broke"):
        asyncio.run(play(one, "explode"))
    assert asyncio.run(VerifiersReward().score(one, trajectory("fine"))).is_value, "one failure must not stick"


def test_a_rubric_that_gives_no_number_or_hangs_is_an_error() -> None:
    one = task("single")
    assert "nan" in (asyncio.run(VerifiersReward().score(one, trajectory("nan"))).reason or "")
    late = asyncio.run(VerifiersReward(deadline_seconds=0.5).score(one, trajectory("hang")))
    assert "took longer than 0.5 s" in (late.reason or "")


def test_a_multi_turn_environment_answers_and_is_judged_by_its_state() -> None:
    replies = asyncio.run(play(task("countdown"), "3", "5", "2", "1"))
    assert [reply.messages[0].content for reply in replies[:3]] == ["Next after 3?", "Next after 5?", "Next after 2?"]
    assert [reply.is_done for reply in replies] == [False, False, False, True]
    assert replies[-1].reward == 3.0


def test_the_environments_own_turn_limit_ends_the_episode() -> None:
    replies = asyncio.run(play(task("countdown"), *["9"] * 6))
    assert (replies[-1].is_done, replies[-1].reward) == (True, 0.0)


def test_an_exception_of_the_environment_is_a_task_error() -> None:
    with pytest.raises(TaskError, match="the countdown broke"):
        asyncio.run(play(task("countdown"), "crash"))


def test_an_environment_that_blocks_in_a_coroutine_blocks_no_other_episode() -> None:
    async def go() -> tuple[Any, list[EnvReply]]:
        await play(task("countdown"), "3")  # loaded before anything is measured
        blocked = asyncio.ensure_future(play(task("countdown"), "block", seconds=1.0))
        fine = await play(task("countdown"), "3", "2", "1")
        assert not blocked.done(), "the other episode had to wait for the one that blocks"
        (outcome,) = await asyncio.gather(blocked, return_exceptions=True)
        return outcome, fine

    outcome, fine = asyncio.run(go())
    assert isinstance(outcome, TaskError)
    assert fine[-1].reward == 3.0


def test_tools_can_be_shown_in_words_with_the_way_to_call_them() -> None:
    async def go() -> None:
        env = VerifiersEnv(show_tools="text")
        try:
            opening = await env.start(task("tools"), 0)
            said = "".join(message.content for message in opening.messages)
            assert opening.tools == ()
            assert "add(a, b)" in said
            assert "<tool_call>" in said
        finally:
            await env.close()

    asyncio.run(go())


def test_tools_are_shown_called_and_answered() -> None:
    async def go() -> None:
        one = task("tools")
        env = VerifiersEnv()
        try:
            opening = await env.start(one, 0)
            assert opening.tools[0]["function"]["name"] == "add"
            assert set(opening.tools[0]["function"]["parameters"]["properties"]) == {"a", "b"}
            body = json.dumps({"name": "add", "arguments": {"a": 20, "b": 22}})
            reply = await env.step(Message(role="assistant", content=f"<tool_call>{body}</tool_call>"))
            assert (reply.messages[0].role, reply.messages[0].content, reply.messages[0].name) == ("tool", "42", "add")
            assert [event.kind for event in reply.events] == [EventKind.TOOL_CALL]
            last = await env.step(Message(role="assistant", content=f"It is {one.answer}"))
            assert (last.is_done, last.reward) == (True, 1.0)
        finally:
            await env.close()

    asyncio.run(go())


def test_a_call_that_cannot_be_read_is_an_event() -> None:
    (reply,) = asyncio.run(play(task("tools"), "<tool_call>{oops</tool_call>"))
    assert [event.kind for event in reply.events] == [EventKind.BAD_CALL]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"environment": "own_verifiers:singel"}, 'Did you mean "single"'),
        ({"environment": "own_verifiers:single", "systm": "x"}, "cannot load"),
        ({"environment": "own_verifiers:nothing"}, "must be a SingleTurnEnv"),
        ({"environment": "own_verifiers:single", "split": "test"}, 'split "test" is unknown'),
        ({"environment": "no-such-environment"}, "cannot load"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        verifiers(0, 0, **options)


def test_without_the_package_or_with_a_newer_one_the_install_line_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", SimpleNamespace(__version__="0.4.0"))
    with pytest.raises(UserError, match=r"ended with version 0\.2"):
        task("single")
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(UserError, match=re.escape(install_line("verifiers"))):
        task("single")
