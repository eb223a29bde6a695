"""The GSM8K benchmark: what it trains on, and its credit for intermediate results."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from temper.config import resolve
from temper.rewards.mathematics.answers import gold_answer

FOLDER = Path(__file__).parents[2] / "benchmarks"
QUESTION = "Natalia sold 48 clips in April and half as many in May. How many did she sell in 3 such springs?"
SOLUTION = "May: <<48/2=24>>24. Both: <<48+24=72>>72. All: <<72*3=216>>216.\n\\boxed{216}"


@pytest.fixture
def gsm8k(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setattr(sys, "argv", ["gsm8k.py"])
    import gsm8k

    return gsm8k


@pytest.fixture
def steps(gsm8k: ModuleType) -> object:
    import gsm8k_steps

    return gsm8k_steps.steps


@pytest.mark.parametrize(
    ("response", "credit"),
    [
        ("48/2 = 24, 48 + 24 = 72, so \\boxed{216}", 0.0),
        ("half is 24, 48 + 24 = 72, 72 * 3 = 217, so \\boxed{217}", 2 / 3),
        ("24 and 72, so \\boxed{72.00}", 1.0),
        ("half is 24, so \\boxed{24}", 1 / 2),
        ("48 * 3, so \\boxed{144}", 0.0),
        ("1 2 4 5 6 7 8 9 10 24 72 100, so \\boxed{5}", 2 / 12),
        ("48/2 = 24, 48 + 24 = 72, and then I was cut", 2 / 3),
        ("", 0.0),
    ],
    ids=["right", "slip", "all but the last", "one", "none", "at random", "cut", "empty"],
)
def test_a_wrong_answer_is_paid_for_the_results_on_its_way(steps, response: str, credit: float) -> None:
    assert steps(QUESTION, response, SOLUTION) == pytest.approx(credit)


def test_results_that_the_question_names_are_worth_nothing(steps) -> None:
    assert steps("48 clips, 24 in May.", "48 and 24, so \\boxed{1}", "<<48/2=24>>\n\\boxed{72}") == 0.0
    assert steps("1,000 of 5", "so 1000 and \\boxed{3}", "<<500*2=1,000>>\n\\boxed{200}") == 0.0


def test_training_problems_keep_their_whole_solution_and_its_answer(gsm8k: ModuleType, tmp_path: Path) -> None:
    rows = [
        {"question": "one", "answer": "<<1+1=2>>2\n#### 2"},
        {"question": "two", "answer": "<<1+1=2>>2 <<2*600=1200>>\n#### 1,200"},
    ]
    (tmp_path / "all.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "out").mkdir()

    def trained(most: int) -> list[dict[str, str]]:
        path = gsm8k.training_file(tmp_path / "all.jsonl", most, tmp_path / "out")
        return [json.loads(line) for line in path.read_text().splitlines()]

    assert [gold_answer(row["answer"]) for row in trained(0)] == ["2", "1,200"]
    assert "<<2*600=1200>>" in trained(0)[1]["answer"]
    assert [row["question"] for row in trained(1)] == ["one"]


@pytest.mark.parametrize("credit", [0.0, 0.3])
def test_the_benchmarks_recipe_is_accepted_and_pays_credit_in_training_alone(gsm8k: ModuleType, credit: float) -> None:
    options = argparse.Namespace(
        model="m", data="d", heldout=512, step_credit=credit, new=320, prompts=32, group=8, microbatch=8192,
        preset="dapo", learning_rate=1e-4, every=50,
    )  # fmt: skip
    (config,) = resolve(gsm8k.recipe_of(options, 0, Path("train.jsonl")), [], where="benchmark")
    assert [part.kind for part in config.evaluation.reward] == ["math"]
    assert [part.weight for part in config.reward] == ([1.0, 0.3] if credit else [1.0])
