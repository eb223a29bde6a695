"""Credits are compared on equal rewards: the environments pay the way and the end, each once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from temper.config import load_recipe
from temper.envs.library.calculator import arithmetic
from temper.envs.library.shop import shop
from temper.envs.threads import play_script
from temper.envs.tool_calls import write_call
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


def test_the_shop_pays_each_call_that_holds_takes_back_what_is_undone_and_pays_the_end(credit: ModuleType) -> None:
    task = next(task for task in (shop(i, 1, items=4, max_wishes=1) for i in range(9)) if len(calls_of(task)) == 2)
    (add, arguments), pay = calls_of(task)
    put, paid = write_call("plain", add, arguments), write_call("plain", *pay)
    away = write_call("plain", "remove", arguments)

    def visit(*said: str) -> list[tuple[float | None, str | None]]:
        env = credit.PayingShop(call_format="plain", show_tools="no")
        env.allow(["pay"], must_exist=True)
        return [(reply.reward, reply.result) for reply in play(env, task, (*said, "done"))]

    assert visit(put, paid) == [(0.25, "missed"), (0.25, "reached"), (1.0, "reached")]
    assert visit(put, away, put) == [(0.25, "missed"), (-0.25, "missed"), (0.25, "missed"), (0.0, "missed")]
    assert [credit.is_reached("", said, None) for said in ("reached", "missed")] == [1.0, 0.0]


def calls_of(task: Task) -> list[tuple[str, dict[str, object]]]:
    return [(name, arguments) for name, arguments in json.loads(str(task.extra["solution"]))]


@pytest.mark.parametrize("task", ["calculator", "shop"])
def test_runs_differ_in_their_advantage_alone_and_are_judged_by_the_end(credit: ModuleType, task: str) -> None:
    comparison = credit.COMPARISONS[task]
    _, practice = load_recipe(comparison.recipe)
    advantages = [credit.advantage_of(kind, samples=2) for kind in credit.CREDITS]
    assert [one for one in advantages if "samples" in one] == [{"name": "step_values", "samples": 2}]
    configs = [credit.configured(practice, comparison, advantage, Path("checkpoint")) for advantage in advantages]
    tables = [config.model_dump(exclude={"objective"}) for config in configs]
    assert all(table == tables[0] for table in tables)
    assert [config.objective.advantage for config in configs] == advantages
    assert configs[0].heldout[0].seed not in {source.seed for source in (*practice.heldout, *practice.train)}
    assert [part.kind for part in configs[0].reward] == ["env"]
    assert [part.kind for part in configs[0].evaluation.reward] == [comparison.outcome["kind"]]


def test_what_a_credit_drew_stands_beside_what_it_gained(credit: ModuleType) -> None:
    def achieved(end: float, num_drawn: int) -> object:
        return credit.Achieved(start=(0.1, 0.0, 0.2), end=(end, end - 0.1, end + 0.1), num_drawn=num_drawn)

    results = {
        "trajectory": [achieved(0.2, 32_600), achieved(0.3, 32_700)],
        "step": [achieved(0.4, 195_000), achieved(0.5, 196_000)],
    }
    lines = credit.page(results).splitlines()
    assert lines[-1].startswith("| step (`step_values`) | 10.0 | 40.0 [30.0, 50.0], 50.0 [40.0, 60.0] | +35.0 [")
    assert "| 196,000 | +20.0 [+20.0, +20.0] |" in lines[-1]
    assert "| 33,000 |  |" in lines[-2]
