"""Finding final answers, and what counts as a plain number. The fast path meets math-verify in test_math_worker.py."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from temper.rewards.answers import equal_plain, find_answer, find_boxed, plain_number

DATA = Path(os.environ.get("TEMPER_TEST_DATA", Path(__file__).parents[2].parent / "shared" / "data"))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{5}", "5"),
        (r"first \boxed{4}, then \boxed{\frac{1}{2}} done", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{5.} and then \boxed{unfinished", "5"),
        (r"\boxed{}", None),
        (r"#### 72", "72"),
        ("work 12\n#### 1,234.", "1,234"),
        ("#### 3 \nand more 9", "3"),
        ("The answer is 42.", "42"),
        ("it costs $1,250.50 in all", "1,250.50"),
        ("x = -3", "-3"),
        ("that is 5-3", "3"),
        ("5 - 3 = 2", "2"),
        (r"so it is $\frac{3}{4}$.", r"\frac{3}{4}"),
        ("half, 1/2, of it", "1/2"),
        ("about 50%", "50%"),
        ("1, 2, 3", "3"),
        ("no number here", None),
        ("", None),
    ],
)
def test_find_answer(text: str, answer: str | None) -> None:
    assert find_answer(text) == answer


def test_require_boxed_refuses_the_other_forms() -> None:
    assert find_answer("#### 5", require_boxed=True) is None
    assert find_answer(r"\boxed{5}", require_boxed=True) == "5"


@pytest.mark.parametrize("text", ["1,00", "5.", "1e3", "5%", "1 000", "x", "", "1/0", "2/3/4", "--3", "9" * 5000, "٣"])
def test_what_is_not_clearly_a_plain_number_is_left_to_math_verify(text: str) -> None:
    assert plain_number(text) is None


def test_numbers_that_differ_by_rounding_are_left_to_math_verify() -> None:
    assert equal_plain("1/3", "0.333333") is None
    assert equal_plain("1/3", "0.3333") is False


def test_every_gsm8k_solution_ends_in_its_own_answer() -> None:
    path = DATA / "gsm8k" / "test.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not here; set TEMPER_TEST_DATA to the folder with the data files")
    for line in path.read_text().splitlines():
        solution = json.loads(line)["answer"]
        gold = solution.split("####")[1].strip()
        assert equal_plain(gold, find_answer(solution) or "") is True
        assert find_boxed(solution) is None
