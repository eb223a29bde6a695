"""Credits are compared on equal rewards: the environments pay the way and the end, each once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from temper.config import load_recipe
from temper.envs.library.calculator import arithmetic
from temper.envs.threads import play_script
from temper.protocols import Env, EnvReply
from temper.types import Task

ROOT = Path(__file__).parents[2]


@pytest.fixture
def credit(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import credit

    return credit


def play(env: Env, task: Task, said: Sequence[str]) -> list[EnvReply]:
    return asyncio.run(play_script(env, task, said))


def test_the_calculator_pays_the_first_right_call_and_the_right_answer(credit: ModuleType) -> None:
    task = arithmetic(3, 1)
    question, answer = task.messages[0].content, str(task.answer)
    said = {
        (f"calc({question})", f"calc({question})", answer): [0.5, 0.0, 1.0],
        (f"calc({question})", "no"): [0.5, 0.0],
        ("calc(1+1)", answer): [0.0, 1.0],
    }
    for words, paid in said.items():
        assert [reply.reward for reply in play(credit.PayingCalculator(), task, words)] == paid


def test_runs_differ_in_their_advantage_alone_and_are_judged_by_the_end(credit: ModuleType) -> None:
    comparison = credit.COMPARISONS["calculator"]
    _, practice = load_recipe(comparison.recipe)
    configs = [credit.configured(practice, comparison, kind, Path("checkpoint")) for kind in credit.CREDITS]
    tables = [config.model_dump(exclude={"objective"}) for config in configs]
    assert tables[0] == tables[1] == tables[2]
    assert {str(config.objective.advantage) for config in configs} == set(credit.CREDITS.values())
    assert configs[0].heldout[0].seed not in {source.seed for source in (*practice.heldout, *practice.train)}
    assert [part.kind for part in configs[0].reward] == ["env"]
    assert [part.kind for part in configs[0].evaluation.reward] == [comparison.outcome["kind"]]
