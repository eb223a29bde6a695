from __future__ import annotations

import asyncio
from fractions import Fraction

import pytest

from temper.envs.library.countdown import BadExpression, CountdownReward, countdown, evaluate
from temper.errors import UserError
from temper.tasks.generators import make_source
from temper.types import Completion, Finish, Message, Score, Status, Task, Trajectory, Turn

TASK = Task(
    id="t",
    messages=(Message(role="user", content="?"),),
    extra={"numbers": "[3, 8, 8, 3]", "target": 24, "signs": "+-*/"},
)


def said(text: str) -> Trajectory:
    completion = Completion(prompt_ids=(1,), token_ids=[2], logprobs=[-1.0], versions=[0], finish=Finish.STOP)
    turn = Turn(completion=completion, message=Message(role="assistant", content=text))
    score = Score.unscorable("not scored yet")
    return Trajectory(task_id="t", group_id="g", index=0, turns=(turn,), status=Status.COMPLETED, score=score)


def score(task: Task, text: str, **options: float) -> Score:
    return asyncio.run(CountdownReward(**options).score(task, said(text)))


def test_the_solution_of_every_generated_task_scores_1_and_its_numbers_alone_do_not() -> None:
    for index in range(300):
        task = countdown(index, 7)
        assert task.answer is not None
        assert score(task, task.answer) == Score.of(1.0)
        assert score(task, str(task.extra["target"])) == Score.of(0.0), "writing the target is no expression"


def test_arithmetic_is_exact_where_floats_are_not() -> None:
    assert evaluate("8 / (3 - 8 / 3)", [3, 8, 8, 3]) == 24
    assert 8 / (3 - 8 / 3) != 24
    assert score(TASK, "I think:\n8/(3-8/3) = 24") == Score.of(1.0)
    assert evaluate("1 / 3", [1, 3]) == Fraction(1, 3)


@pytest.mark.parametrize(
    "text",
    [
        "3 * 8",
        "(3*8)",
        "<answer>3 \u00d7 8</answer>",
        "<answer>1</answer> <answer> 8*3 = 24 </answer>",
        "3*9 = 27\n3*8 = 24",
    ],
)
def test_the_last_answer_counts_in_tags_or_on_the_last_line(text: str) -> None:
    assert score(TASK, text) == Score.of(1.0)


@pytest.mark.parametrize(
    "text",
    [
        "", "24", "12 + 12", "3 * 8 + 8 - 8", "3 * 8 * 1", "3 ** 3 - 3", "3 8", "3 * 8 = 23", "3*8 = 24 = 24", "(3 * 8",
        "3 * 8)", "-3 + 27", "3 * (8 / (3 - 3))", "8 + 8 + 8", "__import__('os').system('true')", "3*8#", "\u0663 * 8",
        "3 * 8 # = 24", "24.0", "(" * 5000 + "3", "(" * 190 + "3 * 8", "3 * 8\nand so on", "9" * 10_000, "0x3 * 8",
        "<answer>3 * 8</answer><answer></answer>", "3 * 8 if 1 else 0",
    ],
)  # fmt: skip
def test_what_is_no_legal_expression_for_the_target_scores_0(text: str) -> None:
    assert score(TASK, text) == Score.of(0.0)


def test_refusals_say_why() -> None:
    for text, why in (("1 / (2 - 2)", "given"), ("4 / (2 - 2)", "divides by 0"), ("(2", "closed"), ("2 +", "missing")):
        with pytest.raises(BadExpression, match=why):
            evaluate(text, [2, 2, 4])
    with pytest.raises(BadExpression, match="not allowed"):
        evaluate("2 * 4", [2, 4], signs="+-")


def test_partial_credit_is_off_unless_asked_for() -> None:
    assert score(TASK, "3 + 8") == Score.of(0.0)
    assert score(TASK, "3 + 8", legal_credit=0.1) == Score.of(0.1)
    assert score(TASK, "3 + 9", legal_credit=0.1) == Score.of(0.0)


def test_a_task_that_cannot_be_scored_is_named_and_never_becomes_a_number() -> None:
    broken = Task(id="b", messages=TASK.messages, extra={"numbers": "[3, 'x']", "target": 24})
    assert "numbers" in (CountdownReward().check(broken) or "")
    assert score(broken, "3 * 8").kind == "error"
    text = Task(id="b", messages=TASK.messages, extra={"numbers": '["3"]', "target": 24})
    assert CountdownReward().check(text) is not None
    assert CountdownReward().check(TASK) is None


def test_equal_seeds_give_equal_tasks_and_options_bound_them() -> None:
    assert countdown(3, 1) == countdown(3, 1)
    assert countdown(3, 1).messages != countdown(3, 2).messages
    for index in range(50):
        task = countdown(index, 0, min_numbers=6, max_numbers=6, largest=9, max_target=50, signs="+-")
        numbers = eval(str(task.extra["numbers"]))
        assert len(numbers) == 6
        assert max(numbers) <= 9
        assert 1 <= int(task.extra["target"]) <= 50
        assert not set("*/") & set(task.answer or "")


def test_bad_options_are_user_errors() -> None:
    for options in ({"min_numbers": 5}, {"signs": "^"}, {"largest": 1}, {"signs": "*", "max_target": 2}):
        with pytest.raises(UserError):
            make_source("countdown", options, seed=0, size=0, generators={"countdown": countdown})
    with pytest.raises(UserError, match="legal_credit"):
        CountdownReward(legal_credit=1.0)
