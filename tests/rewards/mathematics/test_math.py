from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from temper.errors import UserError, install_line
from temper.rewards.mathematics.math import MathReward
from temper.types import Score, Task, Trajectory

pytestmark = pytest.mark.heavy

pytest.importorskip("math_verify")
Say = Callable[[str], Trajectory]


def task(answer: str | None) -> Task:
    return Task(id="t:1", messages=(), answer=answer)


@pytest.fixture
def reward() -> Iterator[MathReward]:
    reward = MathReward(workers=1, deadline_seconds=10.0)
    yield reward
    asyncio.run(reward.close())


def score(reward: MathReward, gold: str | None, response: Trajectory) -> Score:
    return asyncio.run(reward.score(task(gold), response))


@pytest.mark.parametrize(
    ("gold", "response", "value"),
    [
        ("72", "so 72", 1.0),
        ("72", "so 73", 0.0),
        ("1,000", r"\boxed{1000}", 1.0),
        (r"\frac{1}{2}", r"\boxed{0.5}", 1.0),
        (r"\boxed{x+1}", r"\boxed{1+x}", 1.0),
        (r"\sqrt{2}", r"\boxed{2}", 0.0),
        (r"\sqrt{2}", r"\boxed{!!}", 0.0),
        ("72", "I do not know.", 0.0),
        ("72", r"\boxed{72} or \boxed{73}", 0.0),
        ("1/2", r"\boxed{0.5}, that is \boxed{\frac{1}{2}}", 1.0),
        ("42", r"\boxed{41 = 42}", 0.0),
        ("42", r"\boxed{6 \cdot 7 = 42}", 1.0),
        ("42", r"\boxed{6 \cdot 7}", 0.0),
        (r"5\text{ cm}", r"\boxed{5\text{ km}}", 0.0),
        (r"\text{east}", r"\boxed{\text{seat}}", 0.0),
        ("stop", r"\boxed{post}", 0.0),
        ("72", r"\boxed{48 24}", 0.0),
        ("1011_2", r"\boxed{1011_3}", 0.0),
        ("42", r"\boxed{\frac{6\cdot 7}{1}}", 0.0),
        ("42", r"\boxed{41=42,}", 0.0),
        ("1,2", r"\boxed{1<x<2}", 0.0),
        (r"1.6\times10^{-19}", r"\boxed{9.1\times10^{-31}}", 0.0),
        ("(1,2)", r"\boxed{[1,2]}", 0.0),
        ("3R^2", r"\boxed{3r^2}", 0.0),
        ("42", r"\boxed{42 squared}", 0.0),
        ("42", r"\boxed{42\text{ squared}}", 0.0),
        ("[1,2)", r"\boxed{1 \le x < 2}", 1.0),
        ("-2, 5", r"\boxed{x=-2 \text{ or } x=5}", 1.0),
        ("12:30", r"\boxed{12{:}30}", 1.0),
        ("42", "The final answer is 42, as required.", 1.0),
        ("72", "", 0.0),
    ],
)
def test_right_is_one_and_wrong_or_absent_is_zero(
    reward: MathReward, say: Say, gold: str, response: str, value: float
) -> None:
    assert score(reward, gold, say(response)) == Score.of(value)


def test_power_towers_are_wrong_and_cost_no_worker(reward: MathReward, say: Say) -> None:
    before = len(psutil.Process().children())
    assert score(reward, "x+1", say(r"\boxed{9^{9^{9^{9}}} \cdot \sin(9^{9^{9^{9}}})}")) == Score.of(0.0)
    assert len(psutil.Process().children()) == before


SPECIAL = "\\{}()[]$=+-*/^_!?%&|<>,.;:'\"#~@`09xei"
HOSTILE = [
    "(" * 19 + "x" + ")" * 19, "((((((((((x+1)^2+1)^2+1)^2+1)^2+1)^2+1)^2+1)^2+1)^2+1)^2+1)^2",
    r"\frac{1}{" * 19 + "x" + "}" * 19, r"\sqrt{" * 19 + "2" + "}" * 19, "{" * 20 + "1" + "}" * 20, "(" * 500,
    "[" * 999, r"\left(" * 60 + "1", r"\frac" * 150, "(x+y+z+w+1)^{60}", "(x+y+z+w+1)^{400}",
    "(a+b+c+d+e+f+g)^{999}", "9^{9999}", "(9^{9999})^{9999}", "((9^{999})^{999})^{999}", "2^{2^{2^{2^{x}}}}",
    "x^{x^{x^{x^{x}}}}", "9999!", "9999!^{9999}", r"\binom{9999}{4999}^{999}", r"\sum_{k=1}^{99999999} \frac{1}{k}",
    r"\int_0^1 \sin(\sin(\sin(x^x))) dx", r"\prod_{k=1}^{9999999} k", r"\lim_{x \to 0} \frac{\sin^{99}(x)}{x^{99}}",
    r"\sin(10^{9999})", r"\zeta(3)", "9" * 990, "1/" * 400 + "1", "1+" * 480 + "1", "x+" * 480 + "x",
    "x=" * 480 + "1", "x<" * 480 + "1", "1," * 480 + "1", "x y " * 240, "(1,2)," * 160 + "(1,2)",
    "a_{b_{c_{d_{e}}}}", r"\begin{pmatrix}" * 60, r"\begin{pmatrix}" + "1&" * 300 + r"1\end{pmatrix}",
    r"\text{" * 18 + "a" + "}" * 18, r"\{" * 200 + r"\}" * 200, r"\cup" * 240, "(0,1)" + r"\cup(0,1)" * 90,
    "|" * 300 + "x", "-" * 900 + "1", "!" * 900, "3" + "!" * 300, "0." + "3" * 900,
    r"0.\overline{" + "3" * 900 + "}", "x^{-" * 19 + "1" + "}" * 19, r"\log" * 200 + "2", r"\sin " * 160 + "x",
    "1e99999999", "10^{10^{10}}", "1/0", "0/0", r"\infty-\infty", r"\frac{0}{0}", "i^i^i^i",
]  # fmt: skip


@pytest.mark.parametrize("gold", ["42", r"\frac{x}{2}+1", r"\text{east}", r"(1, \sqrt{2})"])
def test_no_hostile_response_comes_out_as_an_error(say: Say, gold: str) -> None:
    """Whatever a response does to the verifier, it is wrong: a policy must not be able to choose an error."""
    reward = MathReward(workers=2, deadline_seconds=1.0)
    texts = [rf"\boxed{{{answer}}}" for answer in HOSTILE]
    for sign in SPECIAL:
        texts += [sign * 32_000, rf"\boxed{{{sign * 900}}}", rf"\boxed{{{sign * 32_000}", f"The answer is {sign * 900}"]

    async def score_all() -> list[Score]:
        try:
            return list(await asyncio.gather(*(reward.score(task(gold), say(text)) for text in texts)))
        finally:
            await reward.close()

    scores = asyncio.run(score_all())
    assert [(text[:80], found) for text, found in zip(texts, scores, strict=True) if found.value != 0.0] == []


def test_an_answer_that_hangs_sympy_is_wrong_and_the_next_one_is_scored(say: Say) -> None:
    reward = MathReward(workers=1, deadline_seconds=2.0)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    hanging = score(reward, "x+1", say(r"\boxed{(9^{9999})^{9999}}"))
    right = score(reward, "x+1", say(r"\boxed{1+x}"))
    asyncio.run(reward.close())
    assert hanging == Score.of(0.0, "it used up its CPU time")
    assert right == Score.of(1.0)
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


def test_a_contradicted_verdict_is_unscorable_and_never_a_number(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    reward = MathReward(workers=1, second_opinion=True)
    assert score(reward, "72", say("so 72")) == Score.of(1.0)
    monkeypatch.setattr("temper.rewards.mathematics.math.ask_second", lambda gold, answer: False)
    assert "contradicts" in (score(reward, "72", say("so 72")).reason or "")
    monkeypatch.setattr("temper.rewards.mathematics.math.ask_second", lambda gold, answer: None)
    assert score(reward, "72", say("so 72")) == Score.of(1.0)
    asyncio.run(reward.close())


def test_options_ask_for_more_than_the_answer(say: Say) -> None:
    assert score(MathReward(strict=True), "72", say("so 72")) == Score.of(0.0)
    assert score(MathReward(strict=True), "72", say("the answer is 72")) == Score.of(1.0)
    assert score(MathReward(min_words=3), "72", say("<think></think> #### 72")) == Score.of(0.0)
    assert score(MathReward(min_words=3), "72", say("<think>eight times nine</think> #### 72")) == Score.of(1.0)


def test_gold_that_cannot_be_parsed_is_found_when_data_is_loaded(reward: MathReward, say: Say) -> None:
    assert reward.check(task("72")) is None
    assert reward.check(task(r"\frac{\pi}{3}")) is None
    assert "cannot be parsed" in (reward.check(task("{")) or "")
    assert "answer_pattern" not in (reward.check(task("{")) or "")
    gsm8k = "Tom has 3 + 4 = <<3+4=7>>7 apples.\n#### 7"
    assert (reward.check(task(gsm8k)) or "").endswith('set answer_pattern = "#### (.+)"')
    assert "no gold answer" in (reward.check(task(None)) or "")
    assert not score(reward, "{", say(r"\boxed{x}")).is_value
    assert not score(reward, None, say("5")).is_value


def test_plain_numbers_start_no_worker(reward: MathReward, say: Say) -> None:
    before = len(psutil.Process().children())
    assert score(reward, "5", say("5")) == Score.of(1.0)
    assert len(psutil.Process().children()) == before


def test_without_math_verify_the_install_line_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=re.escape(install_line("math"))):
        MathReward()


def real_answers() -> list[str]:
    data = Path(os.environ.get("TEMPER_TEST_DATA", Path(__file__).parents[3].parent / "shared" / "data"))
    math500, gsm8k = data / "math500" / "test.jsonl", data / "gsm8k" / "test.jsonl"
    if not math500.exists() or not gsm8k.exists():
        pytest.skip(f"{math500} or {gsm8k} is not here; set TEMPER_TEST_DATA to the folder with the data files")
    rows = [json.loads(line)["answer"] for path in (math500, gsm8k) for line in path.read_text().splitlines()]
    return [answer.rpartition("####")[2].strip() for answer in rows]


def test_every_gold_answer_of_math500_and_gsm8k_can_be_scored(reward: MathReward) -> None:
    assert [reason for answer in real_answers() if (reason := reward.check(task(answer)))] == []
