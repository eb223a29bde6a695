from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from temper.envs.adapters import verifiers as adapter
from temper.envs.adapters.verifiers import VerifiersEnv, VerifiersReward, verifiers
from temper.errors import TaskError, UserError
from temper.protocols import EnvReply
from temper.types import Completion, EventKind, Finish, Message, Score, ScoreKind, Status, Task, Trajectory, Turn

package = pytest.importorskip("verifiers")
if not hasattr(package, "SingleTurnEnv"):
    pytest.skip(f"verifiers {package.__version__} has no SingleTurnEnv", allow_module_level=True)

MODULE = '''
import asyncio
import openai
import verifiers as vf
from datasets import Dataset

ROWS = Dataset.from_list([{"question": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(4)])


async def agrees(judge, prompt, completion, answer, state):
    return float("yes" in await judge(prompt, completion, answer, state))


async def careless(judge, prompt, completion, answer, state):
    try:
        return float("yes" in await judge(prompt, completion, answer, state))
    except Exception:
        return 0.0


async def impatient(judge, prompt, completion, answer, state):
    try:
        return float("yes" in await asyncio.wait_for(judge(prompt, completion, answer, state), 0.2))
    except TimeoutError:
        return 0.0


def judged(function=agrees, **options):
    rubric = vf.JudgeRubric(**options)
    rubric.add_reward_func(function)
    return vf.SingleTurnEnv(dataset=ROWS, rubric=rubric)


def swallowing():
    return judged(careless)


def hurried():
    return judged(impatient)


def eager():
    """Asks more than it needs."""
    return judged(judge_sampling_args={"max_tokens": 4000, "temperature": 0.3})


def blocking():
    """A client without asyncio, made by the function that asks."""
    def score(completion):
        client = openai.OpenAI(api_key="own", base_url="http://elsewhere.invalid")
        said = client.chat.completions.create(model="other", messages=[{"role": "user", "content": "good?"}])
        return float("yes" in said.choices[0].message.content)
    return vf.SingleTurnEnv(dataset=ROWS, rubric=vf.Rubric(funcs=[score]))


def embedding():
    async def score(completion):
        await openai.AsyncOpenAI(api_key="own").embeddings.create(model="e", input="text")
        return 1.0
    return vf.SingleTurnEnv(dataset=ROWS, rubric=vf.Rubric(funcs=[score]))


class Talk(vf.MultiTurnEnv):
    """The user is played by a model: it is asked for the first question and for every answer."""

    async def setup_state(self, state):
        self.user = openai.AsyncOpenAI(api_key="own")
        state["said"] = [await self.ask(state, "Begin.")]
        state["prompt"] = [{"role": "user", "content": state["said"][0]}]
        return state

    async def ask(self, state, text):
        said = await self.user.chat.completions.create(model="gpt", messages=[{"role": "user", "content": text}])
        return said.choices[0].message.content

    async def env_response(self, messages, state, **kwargs):
        state["said"].append(await self.ask(state, messages[-1].content))
        return [{"role": "user", "content": state["said"][-1]}]


class OfState(Talk):
    """Asks through the client in its state, as verifiers itself does."""

    async def ask(self, state, text):
        response = await self.get_model_response(state, [vf.UserMessage(content=text)])
        return response.message.content


def num_said(state):
    return float(len(state["said"]))


def talk():
    return Talk(dataset=ROWS.select([0]), rubric=vf.Rubric(funcs=[num_said]), max_turns=3)


def of_state():
    return OfState(dataset=ROWS.select([0]), rubric=vf.Rubric(funcs=[num_said]), max_turns=2)


def compared(completions) -> list[float]:
    return [0.0 for _ in completions]


def grouped():
    own = vf.Rubric(funcs=[num_said])
    return vf.SingleTurnEnv(dataset=ROWS, rubric=vf.RubricGroup(rubrics=[own, vf.Rubric(funcs=[compared])]))
'''

Act = Callable[[dict[str, Any]], "str | int"]


class FakeModel(ThreadingHTTPServer):
    """Answers what `act` makes of a question: a text, or a status."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), FakeModelHandler)
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.act: Act = lambda question: "yes"
        self.usage: dict[str, int] | None = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}

    @property
    def options(self) -> dict[str, Any]:
        return {"judge": f"http://127.0.0.1:{self.server_address[1]}/v1", "judge_model": "fake"}


class FakeModelHandler(BaseHTTPRequestHandler):
    server: FakeModel

    def do_POST(self) -> None:
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(question)
        self.server.keys.append(self.headers.get("Authorization"))
        said = self.server.act(question)
        message = {"role": "assistant", "content": said}
        body = {
            "id": "x",
            "object": "chat.completion",
            "created": 0,
            "model": question["model"],
            "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
            "usage": self.server.usage,
        }
        answer = json.dumps(body).encode() if isinstance(said, str) else f"down, {self.server.keys[-1]}".encode()
        self.send_response(200 if isinstance(said, str) else said)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *arguments: Any) -> None:
        """Nothing on the terminal."""


@pytest.fixture
def model() -> Iterator[FakeModel]:
    server = FakeModel()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_judged.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_judged", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    adapter._loaded.cache_clear()


def task(function: str) -> Task:
    return verifiers(0, 0, environment=f"own_judged:{function}")


async def play(task: Task, *said: str, **options: Any) -> list[EnvReply]:
    env = VerifiersEnv(**options)
    try:
        await env.start(task, 0)
        return [await env.step(Message(role="assistant", content=text)) for text in said]
    finally:
        await env.close()


def trajectory(text: str) -> Trajectory:
    completion = Completion(prompt_ids=(1,), token_ids=[2], logprobs=[-1.0], versions=[0], finish=Finish.STOP)
    turn = Turn(completion=completion, message=Message(role="assistant", content=text))
    score = Score.unscorable("not scored yet")
    return Trajectory(task_id="t", group_id="g", index=3, turns=(turn,), status=Status.COMPLETED, score=score)


def test_a_rubric_that_asks_is_answered_by_the_endpoint_that_the_recipe_names(
    model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OWN_KEY", "secret-1234")
    model.act = lambda question: "yes" if "Response:\n```\nfour" in question["messages"][0]["content"] else "no"
    options = {**model.options, "judge_key_variable": "OWN_KEY"}
    (good,) = asyncio.run(play(task("judged"), "four", **options))
    (bad,) = asyncio.run(play(task("judged"), "five", **options))
    assert (good.reward, bad.reward) == (1.0, 0.0)
    assert model.asked[0]["model"] == "fake"
    assert model.asked[0]["max_tokens"] == 512
    assert model.keys == ["Bearer secret-1234"] * 2
    (event,) = good.events
    assert (event.kind, event.name) == (EventKind.MODEL_CALL, "fake")
    assert event.detail.startswith("asked: Given a ground truth answer")
    assert event.detail.endswith("answered: yes")


def test_the_reward_is_answered_alike_and_keeps_what_was_said(model: FakeModel) -> None:
    reward = VerifiersReward(**model.options)
    assert asyncio.run(reward.score(task("judged"), trajectory("four"))).value == 1.0
    model.act = lambda question: 400
    assert asyncio.run(reward.score(task("judged"), trajectory("five"))).kind is ScoreKind.ERROR
    told, failed = reward.log.take()
    assert (told["group"], told["index"], told["value"]) == ("g", 3, 1.0)
    assert str(told["call 1"]).endswith("answered: yes")
    assert "status 400" in str(failed["reason"])


def test_without_a_judge_it_is_an_error_that_says_what_to_write() -> None:
    with pytest.raises(TaskError, match="judge_model = "):
        asyncio.run(play(task("judged"), "four"))
    score = asyncio.run(VerifiersReward().score(task("swallowing"), trajectory("four")))
    assert "asks a model by itself" in (score.reason or "")


def test_a_judge_that_fails_is_an_error_also_where_the_rubric_makes_a_number_of_it(
    model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OWN_KEY", "secret-1234")
    model.act = lambda question: 500
    options = {**model.options, "judge_retries": 1, "judge_backoff_seconds": 0.01, "judge_key_variable": "OWN_KEY"}
    with pytest.raises(TaskError, match=r"judge failed: status 500: down, Bearer \[key\] \(after 2 attempts\)"):
        asyncio.run(play(task("swallowing"), "four", **options))
    assert len(model.asked) == 2


def test_a_judge_that_hangs_costs_its_deadline_and_no_more(model: FakeModel) -> None:
    model.act = lambda question: time.sleep(3) or "yes"  # type: ignore[func-returns-value]
    with pytest.raises(TaskError, match=r"judge failed: timeout after 0\.3 s"):
        asyncio.run(play(task("swallowing"), "four", **model.options, judge_deadline_seconds=0.3, judge_retries=0))


def test_a_judge_for_whom_the_rubric_does_not_wait_is_an_error_and_no_zero(model: FakeModel) -> None:
    model.act = lambda question: time.sleep(1) or "yes"  # type: ignore[func-returns-value]
    with pytest.raises(TaskError, match="judge failed: it was not waited for"):
        asyncio.run(play(task("hurried"), "four", **model.options))


def test_calls_and_tokens_of_an_episode_are_bounded(model: FakeModel) -> None:
    asyncio.run(play(task("eager"), "four", **model.options, judge_max_tokens=40))
    assert (model.asked[-1]["max_completion_tokens"], model.asked[-1]["temperature"]) == (40, 0.3)
    with pytest.raises(TaskError, match=r"more than judge_max_calls=2 times. Before that, asked: one\nanswered: yes"):
        asyncio.run(play(task("talk"), "one", "two", **model.options, judge_max_calls=2))
    before = len(model.asked)
    with pytest.raises(TaskError, match="judge_max_episode_tokens=6"):
        asyncio.run(play(task("talk"), "one", "two", **model.options, judge_max_episode_tokens=6))
    assert [question["max_tokens"] for question in model.asked[before:]] == [6, 3], "3 tokens are used by an answer"
    model.usage = None
    with pytest.raises(TaskError, match="judge_max_episode_tokens=600"):
        asyncio.run(play(task("talk"), "one", "two", **model.options, judge_max_episode_tokens=600))
    assert [question["max_tokens"] for question in model.asked[-2:]] == [512, 88], "what is not told counts in full"


@pytest.mark.parametrize(("name", "said"), [("talk", ("hello", "well", "bye")), ("of_state", ("hello", "well"))])
def test_a_user_can_be_played_by_a_model(model: FakeModel, name: str, said: tuple[str, ...]) -> None:
    model.act = lambda question: f"you said {question['messages'][-1]['content']}"
    replies = asyncio.run(play(task(name), *said, **model.options))
    assert [reply.messages[0].content for reply in replies[:-1]] == [f"you said {text}" for text in said[:-1]]
    assert (replies[-1].is_done, replies[-1].reward) == (True, float(len(said)))
    # The question that opened the episode is told with the first turn.
    assert [len(reply.events) for reply in replies] == [2, *[1] * (len(said) - 2), 0]


def test_episodes_side_by_side_have_their_own_answers_and_limits(model: FakeModel) -> None:
    model.act = lambda question: f"you said {question['messages'][-1]['content']}"

    async def go() -> list[list[EnvReply]]:
        one = task("talk")
        return await asyncio.gather(
            *(play(one, f"a{i}", f"b{i}", "end", **model.options, judge_max_calls=3) for i in range(6))
        )

    for number, replies in enumerate(asyncio.run(go())):
        assert [reply.messages[0].content for reply in replies[:2]] == [f"you said a{number}", f"you said b{number}"]


def test_clients_without_asyncio_are_answered_and_those_outside_of_episodes_left_alone(model: FakeModel) -> None:
    openai = pytest.importorskip("openai")
    (reply,) = asyncio.run(play(task("blocking"), "four", **model.options))
    assert reply.reward == 1.0
    assert len(model.asked) == 1
    client = openai.OpenAI(api_key="own", base_url=model.options["judge"], max_retries=0)
    client.chat.completions.create(model="mine", messages=[{"role": "user", "content": "hi"}])
    assert (model.asked[-1]["model"], model.keys[-1]) == ("mine", "Bearer own")


def test_only_chat_completions_are_answered(model: FakeModel) -> None:
    with pytest.raises(TaskError, match="/v1/embeddings was asked for"):
        asyncio.run(play(task("embedding"), "four", **model.options))


def test_rewards_of_whole_groups_are_refused_by_name() -> None:
    with pytest.raises(UserError, match="compared scores a whole group at once"):
        task("grouped")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"judge": "models/judge"}, "nor the directory of a model"),
        ({"judge": "http://127.0.0.1:1/v1"}, "judge_model is missing"),
        ({"judge": "http://127.0.0.1:1/v1", "judge_modle": "x"}, 'Did you mean "judge_model"'),
        ({"judge_model": "x"}, "judge_model needs judge"),
        ({"judge": "policy", "judge_model": "x"}, "judge_model would change nothing"),
        ({"judge": "policy", "judge_max_calls": 0}, "judge_max_calls=0 must be at least 1"),
        ({"judge": "policy", "judge_max_tokens": "many"}, "must be of type int"),
        ({"judge": "http://127.0.0.1:1/v1", "judge_model": "x", "judge_key_variable": "NOT_SET"}, "NOT_SET"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        VerifiersEnv(**options)


def test_the_policy_answers_during_training_and_nowhere_else() -> None:
    with pytest.raises(UserError, match='Use the reward "env"'):
        VerifiersReward(judge="policy")
    with pytest.raises(TaskError, match="answered by temper train only"):
        asyncio.run(play(task("judged"), "four", judge="policy"))
