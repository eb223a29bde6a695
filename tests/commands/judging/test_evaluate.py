"""Guarantee: evaluating twice gives the same result, more samples keep the first ones, and budgets are never mixed."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest
from rich.console import Console

from temper.catalogue import reward_of
from temper.commands.judging.evaluate import (
    SuiteRequest,
    budget_of,
    default_path,
    evaluate_suite,
    render,
    with_decoding,
)
from temper.errors import UserError
from temper.evals.suites import answer_of, load_suite, read_tasks
from temper.models.tiny import make_tiny_model
from temper.rewards.composite import CompositeReward
from temper.runs.results import SampleResult, SuiteResult, load
from temper.types import Trajectory


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(
        tmp_path_factory.mktemp("models") / "tiny", layers=2, width=32, heads=2, kv_heads=1, mlp_width=64, context=32,
        alphabet="abcdefghijklmnopqrstuvwxyz", seed=0,
    )  # fmt: skip


def evaluate(model: Path, asked: SuiteRequest) -> SuiteResult:
    return evaluate_suite(model, asked, note=lambda line: None, is_live=False)


def timeless(result: SuiteResult, count: int | None = None) -> list[list[SampleResult]]:
    return [[dataclasses.replace(s, seconds=0.0) for s in prompt.samples[:count]] for prompt in result.prompts]


def test_the_same_seed_gives_the_same_result_and_more_samples_keep_the_first(
    model: Path, suite: str, tmp_path: Path
) -> None:
    first = evaluate(model, SuiteRequest(suite=suite, out=tmp_path / "one.json"))
    again = evaluate(model, SuiteRequest(suite=suite, out=tmp_path / "two.json"))
    assert timeless(again) == timeless(first)
    assert (again.metrics, again.budget, again.weights_sha256) == (first.metrics, first.budget, first.weights_sha256)
    more = evaluate(model, SuiteRequest(suite=suite, samples=5, out=tmp_path / "three.json"))
    assert timeless(more, 2) == timeless(first)
    other = evaluate(model, SuiteRequest(suite=suite, seed=1, out=tmp_path / "four.json"))
    assert timeless(other) != timeless(first), "the seed does change what is drawn"
    assert load(tmp_path / "one.json") == first


def test_a_result_of_another_budget_is_not_overwritten_unless_forced(model: Path, suite: str, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    first = evaluate(model, SuiteRequest(suite=suite, out=out, limit=2))
    with pytest.raises(UserError, match=r"samples: 2 and 3(.|\n)*--force") as caught:
        evaluate(model, SuiteRequest(suite=suite, out=out, limit=2, samples=3))
    assert "temperature" not in str(caught.value), "only what differs"
    assert load(out) == first
    evaluate(model, SuiteRequest(suite=suite, out=out, limit=2))
    forced = evaluate(model, SuiteRequest(suite=suite, out=out, limit=2, samples=3, force=True))
    assert load(out) == forced


def test_the_terminal_shows_metrics_constant_answer_and_budget(model: Path, suite: str, tmp_path: Path) -> None:
    result = evaluate(model, SuiteRequest(suite=suite, out=tmp_path / "r.json"))
    console = Console(width=400, record=True, file=(tmp_path / "log").open("w"))
    console.print(render(result))
    text = console.export_text()
    for words in ("pass@1", "pass^2", "maj@2", "best@2", "tokens", "commonest answer", "prompts_sha256", "seed 0"):
        assert words in text
    assert result.constant_score is not None
    assert set(result.budget) >= {
        "prompts_sha256", "temperature", "top_p", "samples", "max_new_tokens", "max_turns", "seed", "verifier",
        "verifier_version", "suite",
    }  # fmt: skip


def test_the_command_line_comes_before_the_suite_and_greedy_means_one_sample() -> None:
    suite = load_suite("gsm8k")
    asked = with_decoding(suite, SuiteRequest(suite="gsm8k", temperature=0.0, max_new_tokens=9)).decoding
    assert (asked.temperature, asked.samples, asked.max_new_tokens) == (0.0, 1, 9)
    with pytest.raises(UserError, match="same answer samples=4 times"):
        with_decoding(suite, SuiteRequest(suite="gsm8k", temperature=0.0, samples=4))
    with pytest.raises(UserError, match="less than or equal to 1"):
        with_decoding(suite, SuiteRequest(suite="gsm8k", top_p=1.5))


def test_the_budget_tells_verifiers_and_seeds_apart() -> None:
    suite = load_suite("knights")
    tasks = read_tasks(suite)
    known = budget_of(suite, tasks, 0)
    assert "same_roles" in str(known["verifier"])
    assert "same_roles" in str(known["verifier_version"]), "functions of the user's own are known by their hash"
    stricter = load_suite("knights", overrides=["correct_at=0.5"])
    assert budget_of(stricter, tasks, 0) != known
    assert budget_of(suite, tasks, 1) != known


def test_a_prompt_that_leaves_no_room_is_refused_before_anything_is_drawn(
    model: Path, suite: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"context of 32\. Use --max-new-tokens"):
        evaluate(model, SuiteRequest(suite=suite, max_new_tokens=31, out=tmp_path / "r.json"))


def test_results_of_a_run_go_where_its_dashboard_looks(tmp_path: Path) -> None:
    assert default_path(tmp_path / "model", "gsm8k") == Path("evaluations") / "model" / "gsm8k.json"
    (tmp_path / "run.db").touch()
    assert default_path(tmp_path, "gsm8k") == tmp_path / "evaluations" / "gsm8k.json"


@pytest.mark.parametrize("name", ["gsm8k", "math500", "svamp"])
def test_noise_and_cut_reasoning_are_no_answers_but_the_stated_form_is(name: str) -> None:
    pytest.importorskip("math_verify", reason="the math suites need math-verify")
    suite = load_suite(name)
    task = next(task for task in read_tasks(suite) if (task.answer or "").isdigit())
    assert task.answer is not None
    said = {
        suite.say.replace("{answer}", task.answer): 1.0,
        f"First she counts the plums and gets {task.answer}": 0.0,
        f"S`^;{task.answer}": 0.0,
    }

    async def verdicts(rubric: CompositeReward) -> list[float | None]:
        try:
            return [(await rubric.score(task, Trajectory.saying(task.id, text)))[0].value for text in said]
        finally:
            await rubric.close()

    assert asyncio.run(verdicts(reward_of(suite.reward))) == list(said.values())
    assert [answer_of(suite)(text) is not None for text in said] == [True, False, False], "only answers vote"
    lenient = suite.model_copy(update={"reward": [suite.reward[0].model_copy(update={"options": {}})]})
    assert asyncio.run(verdicts(reward_of(lenient.reward))) == [1.0] * 3, "the fault that strictness prevents"


def test_the_verifier_of_every_shipped_suite_can_be_made() -> None:
    pytest.importorskip("math_verify", reason="the math suites need math-verify")
    for name in ("gsm8k", "ifeval", "math500", "svamp", "knights"):
        rubric = reward_of(load_suite(name).reward)
        asyncio.run(rubric.close())
        assert rubric.weights
