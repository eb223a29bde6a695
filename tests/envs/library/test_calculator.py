"""The calculator computes and nothing else, and a model of fifty characters can use it."""

from __future__ import annotations

import ast
import asyncio
import os
import random
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from temper.batching.rows import rows_of
from temper.envs.library.calculator import Calculator, arithmetic, arithmetic_demo, calc, evaluate, show
from temper.envs.threads import check_isolation_of_episodes
from temper.envs.tool_calls import PARSERS, detect_format, write_call
from temper.envs.tools import ToolError
from temper.errors import UserError
from temper.models.load import load_tokenizer
from temper.models.tiny import character_tokenizer
from temper.protocols import EnvReply
from temper.rollout.episode import EpisodeSetup, run_episode
from temper.tasks.render import Renderer
from temper.types import Message, Request, SamplingParams, Score, Status, Task, Trajectory
from tests.fakes.episodes import FakeScorer
from tests.fakes.sampler import FakeSampler

MODELS = (
    Path(os.environ.get("TEMPER_TEST_DATA", Path(__file__).parents[3].parent / "shared" / "data")).parent / "models"
)
ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789+-*/=?.,:;!'() "
PROBLEM = Task(id="t", messages=(Message(role="user", content="47*83"),), env="calculator", answer="3901")


async def steps(env: Calculator, *said: str) -> list[EnvReply]:
    await env.start(PROBLEM, 0)
    return [await env.step(Message(role="assistant", content=text)) for text in said]


@pytest.mark.parametrize(
    ("expression", "shown"),
    [
        ("47*83", "3901"),
        ("2-5", "-3"),
        ("1/3", "0.333333"),
        ("-1/2", "-0.5"),
        ("2*(3+4)*5", "70"),
        ("0.1+0.2", "0.3"),
        ("-(-(+3))", "3"),
        ("1/10000000", "0"),
        (" 7 / 7 ", "1"),
    ],
)
def test_arithmetic_is_exact(expression: str, shown: str) -> None:
    assert show(evaluate(expression)) == shown


def test_a_fault_of_python_between_two_threads_is_no_answer_of_the_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen once in some ten thousand calls: the call was right, and the model was told that it was not."""
    parse, faults = ast.parse, iter([SystemError("AST constructor recursion depth mismatch (before=27, after=28)")])

    def parse_among_threads(*arguments: Any, **settings: Any) -> Any:
        for fault in faults:
            raise fault
        return parse(*arguments, **settings)

    monkeypatch.setattr(ast, "parse", parse_among_threads)
    assert evaluate("2*(3+4)") == 14


def test_values_agree_with_fractions_on_random_expressions() -> None:
    draw = random.Random(0)
    for _ in range(200):
        a, b, c = (draw.randint(1, 99) for _ in range(3))
        assert evaluate(f"({a}-{b})*{c}/{b}+{a}") == Fraction((a - b) * c, b) + a


@pytest.mark.parametrize(
    "expression",
    [
        "", "1/0", "2**9", "9**9**9", "a", "__import__(0)", "1 if 1 else 2", "[1]", "1,2", "f(1)", "1j", "True",
        "'a'*9", "1//2", "5%3", "(" * 199, "-" * 199, "1e999", "1e300*1e300", "9" * 31, "9" * 201, "1\n2", "\0", "x:=1",
        "1=1", "lambda: 1", "007",
    ],
)  # fmt: skip
def test_what_is_not_arithmetic_is_refused_in_words_of_the_alphabet(expression: str) -> None:
    with pytest.raises(ToolError) as caught:
        evaluate(expression)
    assert set(str(caught.value)) <= set(ALPHABET)


def test_everything_the_environment_says_can_be_said_by_a_character_model() -> None:
    draw = random.Random(0)
    pieces = [*ALPHABET, "calc(", "calc(", "cal(", ")", ")"]
    heard: set[str] = set()
    for _ in range(300):
        said = "".join(draw.choices(pieces, k=draw.randint(1, 12)))
        for reply in asyncio.run(steps(Calculator(), said)):
            heard |= {character for message in reply.messages for character in message.content}
    assert heard
    assert heard <= set(ALPHABET)


@pytest.mark.parametrize("call_format", ["plain", "hermes", "llama3", "mistral"])
def test_an_episode_in_every_convention(call_format: str) -> None:
    call = write_call(call_format, "calc", {"expression": "47*83"})
    for chosen in (call_format, "auto"):
        called, done = asyncio.run(steps(Calculator(call_format=chosen), call, "3901"))
        assert [(message.role, message.name, message.content) for message in called.messages] == [
            ("tool", "calc", "3901")
        ]
        assert done.is_done
    assert set(PARSERS) == {"plain", "hermes", "llama3", "mistral", "auto"}


def test_the_tools_are_shown_where_a_template_can_show_them() -> None:
    assert asyncio.run(Calculator().start(PROBLEM, 0)).tools == ()
    assert asyncio.run(Calculator(call_format="hermes").start(PROBLEM, 0)).tools == (calc.schema,)


def test_calls_are_limited() -> None:
    replies = asyncio.run(steps(Calculator(max_calls=1), "calc(1+1)", "calc(1+2)"))
    assert replies[1].messages[0].content == "denied: no calls are left of 1"


def test_episodes_share_nothing() -> None:
    said, other = ("calc(1+1)", "calc(x)", "2"), ("calc(9*9)", "calc(", "calc(", "calc(")
    asyncio.run(check_isolation_of_episodes(Calculator, PROBLEM, said=said, other=other))


def test_tasks_are_the_same_in_every_process_and_have_right_answers() -> None:
    assert arithmetic(3, 1) == arithmetic(3, 1)
    assert arithmetic(3, 1) != arithmetic(3, 2)
    for index in range(200):
        task = arithmetic(index, 7, digits=2, operations="+-*/", terms=3)
        assert task.env == "calculator"
        assert task.answer == show(evaluate(task.messages[0].content))
    assert len(arithmetic(0, 0, digits=3, operations="+").messages[0].content) == 7


def test_bad_options_are_refused() -> None:
    with pytest.raises(UserError, match="operations='%'"):
        arithmetic(0, 0, operations="%")
    with pytest.raises(UserError, match="digits=0"):
        arithmetic(0, 0, digits=0)


class Exact(FakeScorer):
    async def score(self, task: Task, trajectory: Trajectory) -> tuple[Score, Mapping[str, Score]]:
        return Score.of(float(trajectory.text == task.answer)), {}


def roll(task: Task, said: list[str], renderer: Renderer | None = None, env: Calculator | None = None) -> Trajectory:
    renderer, turns = renderer or Renderer(character_tokenizer(ALPHABET)), iter(said)

    def draw(request: Request) -> list[int]:
        return renderer.completion_ids(next(turns))

    setup = EpisodeSetup(
        sampler=FakeSampler(draw),
        renderer=renderer,
        scorer=Exact(),
        make_env=lambda name: env or Calculator(),
        params=SamplingParams(max_new_tokens=80, stop_ids=renderer.stop_ids),
        max_turns=4,
        episode_seconds=20,
        seed=0,
    )
    return asyncio.run(run_episode(setup, task, group_id="g", index=0, request_id="r"))


def test_a_character_model_plays_an_episode_and_only_its_own_tokens_are_trained() -> None:
    trajectory = roll(PROBLEM, ["calc(47*83)", "3901"])
    assert (trajectory.status, trajectory.score) == (Status.COMPLETED, Score.of(1.0))
    (row,) = rows_of(trajectory)
    tokenizer = character_tokenizer(ALPHABET)
    drawn = [token for token, is_drawn in zip(row.token_ids, row.loss_mask, strict=True) if is_drawn]
    assert tokenizer.decode(drawn) == "calc(47*83)<|end|>3901<|end|>"
    assert tokenizer.decode(row.token_ids).count("3901") == 2


QWEN = MODELS / "qwen2.5-coder-0.5b-instruct"


@pytest.mark.skipif(not QWEN.exists(), reason=f"{QWEN} is not there")
def test_a_real_template_shows_the_tool_and_its_calls_are_read_and_answered() -> None:
    tokenizer = load_tokenizer(QWEN)
    assert detect_format(tokenizer.chat_template) == "hermes"
    renderer = Renderer(tokenizer)
    call = write_call("hermes", "calc", {"expression": "47*83"})
    trajectory = roll(PROBLEM, [call, "3901"], renderer, Calculator(call_format="hermes"))
    assert (trajectory.status, trajectory.score) == (Status.COMPLETED, Score.of(1.0))
    (row,) = rows_of(trajectory)
    drawn = [token for token, is_drawn in zip(row.token_ids, row.loss_mask, strict=True) if is_drawn]
    assert drawn == [token for turn in trajectory.turns for token in turn.completion.token_ids]
    masked = [token for token, is_drawn in zip(row.token_ids, row.loss_mask, strict=True) if not is_drawn]
    assert '"name": "calc"' in tokenizer.decode(masked)
    assert "<tool_response>\n3901\n</tool_response>" in tokenizer.decode(masked)


def test_demonstrations_show_the_very_tokens_of_an_episode() -> None:
    """What supervised training sees before each turn is, id by id, what the policy will see in its rollouts."""
    renderer = Renderer(character_tokenizer(ALPHABET))
    for index in range(0, 20, 2):
        call, answer = (arithmetic_demo(place, 5) for place in (index, index + 1))
        assert call.answer is not None
        assert answer.answer is not None
        task = Task(id="t", messages=call.messages, env="calculator", answer=answer.answer)
        trajectory = roll(task, [call.answer, answer.answer])
        assert trajectory.score == Score.of(1.0)
        for demo, turn in zip((call, answer), trajectory.turns, strict=True):
            assert renderer.prompt_ids(renderer.prompt_messages(demo)) == turn.completion.prompt_ids
            assert renderer.completion_ids(str(demo.answer)) == turn.completion.token_ids
