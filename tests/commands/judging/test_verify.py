"""`temper verify`: rates, reasons, wrong verdicts, and when the command fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from temper.commands.judging.verify import compare, read_options, render, verify
from temper.errors import UserError
from temper.protocols import Reward
from temper.rewards.form.text import TextReward
from temper.types import Score, Task, Trajectory

pytestmark = pytest.mark.heavy


class Scripted(Reward):
    """Gives the number that the response spells; "down" breaks and "shy" will not answer."""

    name = "scripted"

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        if trajectory.text == "down":
            raise RuntimeError("the verifier is down")
        if trajectory.text == "shy":
            return Score.unscorable("nothing to judge by")
        return Score.of(float(trajectory.text))

    def check(self, task: Task) -> str | None:
        return None

    async def close(self) -> None:
        pass


def golden(folder: Path, *rows: tuple[str, bool]) -> Path:
    path = folder / "own.jsonl"
    path.write_text("".join(json.dumps({"response": text, "is_correct": label}) + "\n" for text, label in rows))
    return path


def test_rates_leave_out_what_has_no_number(tmp_path: Path) -> None:
    path = golden(tmp_path, ("1", True), ("0", True), ("1", False), ("0", False), ("0", False), ("shy", True))
    result = verify("scripted", golden=path, rewards={"scripted": Scripted})
    positive, negative = result.rates
    assert (positive.count, positive.total) == (1, 3)
    assert (negative.count, negative.total) == (1, 2)
    assert result.is_fine
    text = render(result)
    assert "33.33% (1 of 3; 95% interval" in text
    assert "unscorable: 1 x nothing to judge by" in text or "unscorable: 1 x" in text
    assert "own.jsonl:2" in text
    assert "own.jsonl:3" in text


def test_a_verifier_that_breaks_fails_the_command_and_is_no_verdict(tmp_path: Path) -> None:
    result = verify("scripted", golden=golden(tmp_path, ("1", True), ("down", False)), rewards={"scripted": Scripted})
    assert not result.is_fine
    assert result.wrong == []
    assert "the verifier is down" in render(result)


def test_gold_answers_that_cannot_be_scored_are_errors(tmp_path: Path) -> None:
    result = verify("exact", golden=golden(tmp_path, ("1", True)), rewards={"exact": lambda: TextReward("exact")})
    assert not result.is_fine
    assert "no gold answer" in render(result)


def test_options_of_the_command_line_must_be_a_json_object() -> None:
    assert read_options('{"strict": true}') == {"strict": True}
    for text in ("strict", "[1]"):
        with pytest.raises(UserError, match="--options"):
            read_options(text)


def test_the_shipped_math_set_is_judged_without_a_mistake_and_better_than_by_others() -> None:
    pytest.importorskip("math_verify")
    result = verify("math")
    assert result.wrong == []
    assert result.is_fine
    table = compare(result)
    assert table.index('reward "math"') < table.index("math-verify alone") < table.index("equal strings")
    assert table.count("false positives 0.00%") == 1, "the others are fooled by some rows"


def test_the_shipped_format_set_is_judged_without_a_mistake() -> None:
    assert verify("format").wrong == []
