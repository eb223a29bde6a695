from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Callable
from datetime import date
from pathlib import Path

import pytest

from temper.errors import UserError
from temper.plugins import name_function
from temper.rewards.composite import CompositeReward
from temper.rewards.form.text import TextReward
from temper.rewards.user import SHOWN_LINES, UserReward
from temper.types import Message, Score, ScoreKind, Task, Trajectory

Say = Callable[[str], Trajectory]
TASK = Task(id="t", messages=(Message(role="user", content="q"),), answer="1")


def test_the_function_gets_prompt_response_and_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, say: Say
) -> None:
    monkeypatch.chdir(tmp_path)  # a file beside the recipe can be named
    (tmp_path / "my_reward_here.py").write_text(
        "def f(prompt, response, answer): return [prompt, response, answer] == ['q', 'r', None]"
    )
    task = Task(id="t", messages=(Message(role="system", content="s"), Message(role="user", content="q")))
    reward = UserReward("my_reward_here:f", workers=1)

    async def go() -> Score:
        score = await reward.score(task, say("r"))
        await reward.close()
        return score

    assert asyncio.run(go()) == Score.of(1.0)


def test_none_is_unscorable(misbehaving: str, say: Say) -> None:
    reward = UserReward(f"{misbehaving}:reward", workers=1)

    async def go() -> Score:
        score = await reward.score(Task(id="t", messages=()), say("none"))
        await reward.close()
        return score

    score = asyncio.run(go())
    assert score.kind is ScoreKind.UNSCORABLE
    assert re.fullmatch(rf"the function returned None, in .*{misbehaving}\.py, line \d+", str(score.reason))


def test_mistakes_in_the_name_are_found_at_once(misbehaving: str) -> None:
    with pytest.raises(UserError, match="cannot import no_such_module"):
        UserReward("no_such_module:f")
    with pytest.raises(UserError, match='Did you mean "reward"'):
        UserReward(f"{misbehaving}:rewards")
    with pytest.raises(UserError, match=r"must take \(prompt, response, answer\)"):
        UserReward(f"{misbehaving}:two_arguments")


def two_turns(say: Say) -> Trajectory:
    (turn,) = say("first").turns
    replies = (Message(role="tool", content="found", name="search"),)
    last = dataclasses.replace(turn, message=Message(role="assistant", content="second"))
    return dataclasses.replace(say(""), turns=(dataclasses.replace(turn, replies=replies, reward=0.25), last))


def paid_by(function: str, folder: Path, say: Say) -> tuple[Score, Score, list[float]]:
    """Total, the part itself, and what turns earned, of a function with that body beside an outcome of 0."""
    name = f"paying_{abs(hash(function))}"
    (folder / f"{name}.py").write_text(f"def pay(prompt, turns, answer): {function}")
    reward = UserReward(f"{name}:pay", by_turn=True, workers=1)
    rubric = CompositeReward([(TextReward("exact"), 1.0), (reward, 0.5)])

    async def go() -> tuple[Score, Score, list[float]]:
        total, parts, earned = await rubric.score_turns(TASK, two_turns(say))
        await rubric.close()
        return total, parts["pay"], earned

    return asyncio.run(go())


def test_by_turn_the_function_is_shown_every_turn_and_pays_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, say: Say
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    shown = [
        {"response": "first", "replies": [{"role": "tool", "content": "found", "name": "search"}], "reward": 0.25},
        {"response": "second", "replies": [], "reward": None},
    ]
    body = f"return [0.5, None] if (prompt, turns, answer) == ('q', {shown!r}, '1') else [7.0, 7.0]"
    # 0.25 and 0.5 x 0.5 for the first; what is left of the outcome, 0 - 0.25, for the last.
    assert paid_by(body, tmp_path, say) == (Score.of(0.0), Score.of(0.5), [0.5, -0.25])


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return [0.1]", "1 payments for 2 turns"),
        ("return [0.1] * 3", "3 payments for 2 turns"),
        ("return []", "0 payments for 2 turns"),
        ("return [0.1, float('nan')]", "turn 1 is paid nan"),
        ("return [float('-inf'), 0.1]", "turn 0 is paid -inf"),
        ("return [1e308, 1e308]", "the reward is inf"),
        ("return [0, 10 ** 400]", "OverflowError"),
        ("return [0.1, '0.2']", "the function pays turn 1 '0.2', not a number or None"),
        ("return 0.5", "the function returned 0.5, not a list with a payment for each turn"),
        ("return {0: 0.1, 1: 0.1}", "not a list with a payment for each turn"),
        ("raise KeyError('gone')", "KeyError: 'gone'"),
    ],
)
def test_payments_that_do_not_fit_are_errors_and_never_numbers(
    body: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, say: Say
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    total, part, earned = paid_by(body, tmp_path, say)
    assert (total.kind, part.kind, earned) == (ScoreKind.ERROR, ScoreKind.ERROR, [])
    assert reason in str(part.reason)


def test_payments_that_overflow_with_the_outcome_are_an_error(say: Say) -> None:
    turn = dataclasses.replace(two_turns(say).turns[0], reward=float("inf"))

    class Paying(TextReward):
        pays_turns = True

        async def score_turns(self, task: Task, trajectory: Trajectory) -> tuple[Score, list[float]]:
            return Score.of(0.0), [0.0]

    rubric = CompositeReward([(TextReward("exact"), 1.0), (Paying("edit"), 1.0)])
    total, _, earned = asyncio.run(rubric.score_turns(TASK, dataclasses.replace(say(""), turns=(turn,))))
    assert (total.kind, earned) == (ScoreKind.ERROR, [])
    assert "not all of it is a finite number" in str(total.reason)


def test_no_list_at_all_is_unscorable_and_leaves_the_whole_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, say: Say
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    total, part, earned = paid_by("return None", tmp_path, say)
    assert part.kind is ScoreKind.UNSCORABLE
    assert str(part.reason).startswith("the function returned None, in ")
    assert (total.kind, earned) == (ScoreKind.UNSCORABLE, [])


def test_a_list_without_by_turn_says_what_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, say: Say) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "listing_reward.py").write_text("def f(prompt, response, answer): return [0.1]")
    reward = UserReward("listing_reward:f", workers=1)

    async def go() -> Score:
        score = await reward.score(TASK, say("r"))
        await reward.close()
        return score

    assert not reward.pays_turns
    assert "set options.by_turn = true" in str(asyncio.run(go()).reason)


def scored(reward: UserReward, task: Task, trajectory: Trajectory) -> Score:
    async def go() -> Score:
        score = await reward.score(task, trajectory)
        await reward.close()
        return score

    return asyncio.run(go())


def own(folder: Path, source: str, **options: object) -> UserReward:
    path = folder / f"own_{abs(hash(source))}.py"
    path.write_text(source)
    return UserReward(f"{path}:f", workers=1, **options)  # type: ignore[arg-type]


ROW = Task(
    id="t",
    messages=(Message(role="user", content="q"),),
    answer="1",
    extra={"level": 3},
    columns={"tests": ["a", {"b": 2}], "when": date(2026, 1, 31), "answer": "raw"},
)


@pytest.mark.parametrize(
    "signature",
    [
        "prompt, response, answer, level, tests, when",
        "prompt, response, answer, *, when, tests, level=0",
        "prompt, response, answer, **columns",
    ],
)
def test_columns_of_the_row_reach_a_function_that_asks_for_them(signature: str, tmp_path: Path, say: Say) -> None:
    source = f"""
def f({signature}):
    columns = locals().get("columns") or {{"level": level, "tests": tests, "when": when}}
    assert (prompt, response, answer) == ("q", "r", "1"), (prompt, response, answer)
    return columns == {{"level": 3, "tests": ["a", {{"b": 2}}], "when": "2026-01-31"}}
"""
    assert scored(own(tmp_path, source), ROW, say("r")) == Score.of(1.0)


def test_a_function_that_asks_for_no_column_gets_none(tmp_path: Path, say: Say) -> None:
    assert scored(own(tmp_path, "def f(*said): return len(said)"), ROW, say("r")) == Score.of(3.0)


def test_columns_reach_a_function_that_was_handed_over_and_one_that_pays_turns(tmp_path: Path, say: Say) -> None:
    def handed_over(prompt: str, response: str, answer: str, level: int) -> float:
        return float(level)

    assert scored(UserReward(name_function(handed_over)), ROW, say("r")) == Score.of(3.0)
    paying = own(tmp_path, "def f(prompt, turns, answer, level): return [float(level)]", by_turn=True)
    assert scored(paying, ROW, say("r")) == Score.of(3.0)


def test_a_column_that_a_row_lacks_is_found_before_training(tmp_path: Path) -> None:
    reward = own(tmp_path, "def f(prompt, response, answer, levle, tests=None): return 1")
    said = str(reward.check(ROW))
    assert 'has a parameter "levle", which is no column of the row. Did you mean "level"?' in said
    assert "Columns: tests, when, level" in said
    assert re.search(r", in .*own_\d+\.py, line 1$", said)
    assert own(tmp_path, "def f(prompt, response, answer, levle=0): return 1").check(ROW) is None


@pytest.mark.parametrize("signature", ["completions, **kwargs", "prompts, completions, answer, **kwargs"])
def test_a_reward_of_trl_is_answered_with_the_signature_of_here(signature: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as found:
        own(tmp_path, f"def f({signature}): return [1.0]")
    said = str(found.value)
    assert "as TRL calls it" in said
    assert "def f(prompt, response, answer, **columns) -> number or None" in said
    assert "by_turn" not in said


def test_the_first_lines_that_a_function_prints_are_shown(
    tmp_path: Path, say: Say, capsys: pytest.CaptureFixture[str]
) -> None:
    source = "import sys\ndef f(p, r, a):\n    print('seen', r)\n    print('\\x1b[2J', file=sys.stderr)\n    return 1"
    assert scored(own(tmp_path, source), TASK, say("this")) == Score.of(1.0)
    assert capsys.readouterr().err.splitlines() == ["f prints: seen this", "f prints: ␛[2J"]
    lines = 3 * SHOWN_LINES
    assert (
        scored(own(tmp_path, f"def f(p, r, a):\n    print('x\\n' * {lines})\n    return 1"), TASK, say("r")).value == 1
    )
    said = capsys.readouterr().err
    assert said.count("f prints: x") == SHOWN_LINES
    assert said.endswith("f prints more; the rest is not shown\n")


def test_what_a_function_printed_before_it_failed_is_shown_with_its_line(
    tmp_path: Path, say: Say, capsys: pytest.CaptureFixture[str]
) -> None:
    source = "def f(p, r, a):\n    print('before')\n    return {}[r]\n"
    score = scored(own(tmp_path, source), TASK, say("gone"))
    assert re.fullmatch(r"KeyError: 'gone', in .*own_\d+\.py, line 3", str(score.reason))
    assert capsys.readouterr().err == "f prints: before\n"
