"""Guarantee: a response states one final answer, in a form that is defined, or none."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from temper.rewards.mathematics.answers import count_words, find_answers, find_boxes
from temper.rewards.mathematics.forms import decide, is_refused

DATA = Path(os.environ.get("TEMPER_TEST_DATA", Path(__file__).parents[3].parent / "shared" / "data"))


@pytest.mark.parametrize(
    ("text", "answers"),
    [
        (r"so \boxed{5}", ("5",)),
        (r"first \boxed{4}, then \boxed{\frac{1}{2}} done", ("4", r"\frac{1}{2}")),
        (r"\boxed{5} and again \boxed{5}", ("5",)),
        (r"\boxed{\{1, 2\}}", (r"\{1, 2\}",)),
        (r"\boxed{\boxed{5}}", ("5",)),
        (r"\boxed{5.} and then \boxed{unfinished", ("5",)),
        (r"42, so \boxed{}", ("",)),
        (r"the cut \boxed{42", ()),
        (r"#### 72", ("72",)),
        ("work 12\n#### 1,234.", ("1,234",)),
        ("#### 3 \nand more 9", ("3",)),
        ("#### 3\n#### 4", ("3", "4")),
        ("<answer>7</answer> because 8", ("7",)),
        ("The answer is 42.", ("42",)),
        ("The answer is 3.5 meters. Good.", ("3.5",)),
        ("The answer is 41 or 42.", ("41 or 42",)),
        ("Is the answer is 42? No", ()),
        ("**Final answer:** $x+1$", ("$x+1$",)),
        ("it costs $1,250.50 in all", ("1,250.50",)),
        ("x = -3", ("-3",)),
        ("that is 5-3", ("3",)),
        ("5 - 3 = 2", ("2",)),
        (r"so it is $\frac{3}{4}$.", (r"\frac{3}{4}",)),
        ("half, 1/2, of it", ("1/2",)),
        ("about 50%", ("50%",)),
        ("it is 7. Hope this helps!", ()),
        ("it is not 7", ()),
        ("1, 2, 3", ()),
        ("41 or 42", ()),
        ("41 ... 42", ()),
        ("a 1 b 2 c 3 d 4 e 5 f 6 g 7 h 8 i 9", ()),
        ("<think>The answer is 6.</think> The answer is 7.", ("7",)),
        ("no number here", ()),
        ("The final answer is 42, as required.", ("42",)),
        ("The answer is therefore 42.", ("42",)),
        ("The answer is 42, or 43.", ("42, or 43",)),
        ("The answer is 42 squared.", ("42 squared",)),
        ("Final Answer: The final answer is $42$. I hope it is correct.", ("$42$",)),
        ("It is less than 42.", ()),
        ("Is it 42?", ()),
        ("It cannot be 42.", ()),
        ("We get 42 squared", ()),
        ("42 is wrong", ()),
        ("48 more than 24 is 72", ("72",)),
        ("", ()),
    ],
)
def test_find_answers(text: str, answers: tuple[str, ...]) -> None:
    assert find_answers(text) == answers


def test_require_boxed_refuses_the_other_forms() -> None:
    assert find_answers("#### 5", require_boxed=True) == ()
    assert find_answers(r"\boxed{5}", require_boxed=True) == ("5",)


def test_strict_refuses_only_the_last_number() -> None:
    assert find_answers("so it is 5", is_strict=True) == ()
    assert find_answers("the answer is 5", is_strict=True) == ("5",)


def test_words_are_counted_beside_tags_and_answers() -> None:
    assert count_words(r"<think></think>\boxed{42}", ("42",)) == 0
    assert count_words(r"<think>six times seven</think>\boxed{42}", ("42",)) == 3


DEGENERATE = (
    r"\boxed{", r"\boxed{}", "(", "{", "}", "$", "=", "1+", r"\frac", r"\frac{", " ", "\n", "7", "123,",
    "final answer is ", "answer is\n", "answer is 1? ", "final ", "<answer>", "</answer>", "####",
    "\\", "not ", "42 or ",
    "**", "}{", ". ", "a",
)  # fmt: skip
FRAMES = ("{}", r"\boxed{{{}}}", "The answer is {}?", "{} 42", "<answer>{}", "</answer>{}")


@pytest.mark.parametrize("unit", DEGENERATE)
def test_any_text_of_32k_characters_is_read_in_bounded_time(unit: str) -> None:
    """It runs in the event loop. Linear scans take milliseconds; quadratic ones took seconds."""
    for frame in FRAMES:
        text = frame.format((unit * 32_000)[:32_000])
        start = time.process_time()
        answers = find_answers(text)
        count_words(text, answers[:3])
        [decide(gold, answer) for gold in ("42", "x+1") for answer in answers[:3] if not is_refused(answer)]
        assert time.process_time() - start < 0.5, (unit, frame)


def test_every_gsm8k_solution_ends_in_its_own_answer() -> None:
    path = DATA / "gsm8k" / "test.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not here; set TEMPER_TEST_DATA to the folder with the data files")
    for line in path.read_text().splitlines():
        solution = json.loads(line)["answer"]
        gold = solution.split("####")[1].strip()
        (answer,) = find_answers(solution)
        assert decide(gold, answer) is True
        assert find_boxes(solution) == []
