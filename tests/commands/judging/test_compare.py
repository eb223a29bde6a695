"""Comparing and scaling real checkpoints: the same questions for both, files that can be read, refusals before work."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from rich.console import Console

from temper.commands.judging.compare import compare_models, render
from temper.commands.judging.evaluate import SuiteRequest, evaluate_suite
from temper.commands.judging.scale import Ways, default_budgets, parse_budgets, require_single_turn, scale
from temper.commands.judging.scale import render as render_points
from temper.errors import UserError, install_line
from temper.evals.scaling import ThinkingBudget
from temper.evals.suites import load_suite, read_tasks
from temper.models.tiny import make_tiny_model
from temper.runs.results import load


def quiet(line: str) -> None:
    """Notes are read by nobody."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    base, trained = (
        make_tiny_model(
            folder / name, layers=2, width=32, heads=2, kv_heads=1, mlp_width=64, context=64,
            alphabet="abcdefghijklmnopqrstuvwxyz", seed=seed,
        )
        for seed, name in enumerate(("base", "trained"))
    )  # fmt: skip
    return base, trained


def shown(what) -> str:
    console = Console(width=160)
    with console.capture() as capture:
        console.print(what)
    return capture.get()


def test_two_checkpoints_are_asked_the_same_and_their_files_written(models, suite: str, tmp_path: Path) -> None:
    notes: list[str] = []
    out = tmp_path / "out"
    comparison = compare_models(*models, SuiteRequest(suite=suite, samples=4), out=out, note=notes.append)
    base, trained = load(out / "base.json"), load(out / "trained.json")
    assert base.budget == trained.budget
    assert base.weights_sha256 != trained.weights_sha256
    table = json.loads((out / "compare.json").read_text())
    assert table["verdict"]["kind"] == comparison.verdict.kind
    assert {row["name"] for row in table["differences"]} >= {"pass@1", "pass@4", "maj@4", "best@4", "mean score"}
    assert len(table["prompts"]) == 6
    assert "<svg" in (out / "compare.html").read_text()
    assert (out / "compare.png").is_file() or any(install_line("plots") in line for line in notes)
    text = shown(render(comparison))
    assert comparison.verdict.kind in text
    assert "prompts got worse" in text


def test_results_are_compared_without_any_model_and_equal_ones_are_equal(models, suite: str, tmp_path: Path) -> None:
    file = tmp_path / "base.json"
    evaluate_suite(models[0], SuiteRequest(suite=suite, out=file), note=quiet, is_live=False)
    comparison = compare_models(file, file, SuiteRequest(suite=""), out=tmp_path / "out", note=quiet)
    assert all(row.difference == 0 for row in comparison.differences)
    assert not comparison.regressions
    # The checkpoint is asked as the file was: two samples, not the 64 of a plain comparison.
    again = compare_models(file, models[0], SuiteRequest(suite=suite), out=tmp_path / "again", note=quiet)
    assert again.num_samples == 2
    assert all(row.difference == 0 for row in again.differences)


def test_a_checkpoint_that_would_be_asked_otherwise_is_refused_before_it_is_asked(models, suite, tmp_path) -> None:
    file = tmp_path / "base.json"
    evaluate_suite(models[0], SuiteRequest(suite=suite, out=file), note=quiet, is_live=False)
    with pytest.raises(UserError, match=r"max_new_tokens: 4 and 3"):
        compare_models(file, models[1], SuiteRequest(suite=suite, max_new_tokens=3), out=tmp_path / "out", note=quiet)
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match="--suite"):
        compare_models(*models, SuiteRequest(suite=""), out=tmp_path / "out", note=quiet)


def test_a_missing_matplotlib_costs_the_picture_only(models, suite: str, tmp_path: Path, monkeypatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr("temper.evals.comparison.page.import_module", missing)
    notes: list[str] = []
    out = tmp_path / "out"
    compare_models(*models, SuiteRequest(suite=suite, samples=2), out=out, note=notes.append)
    assert (out / "compare.html").is_file()
    assert not (out / "compare.png").exists()
    assert any(install_line("plots") in line for line in notes)


def test_all_modes_run_on_a_real_engine_and_again_give_the_same_numbers(models, suite: str, tmp_path: Path) -> None:
    ways = Ways(
        modes=("best_of", "majority", "budget", "refine"),
        samples=4,
        budgets=(
            ThinkingBudget(max_tokens=2, answer_tokens=2, continuation="wait", answer_prefix="so"),
            ThinkingBudget(min_tokens=6, max_tokens=9, answer_tokens=2, continuation="wait", answer_prefix="so"),
        ),
        rounds=2,
        request="again",
    )
    points = scale(models[0], SuiteRequest(suite=suite), ways, out=tmp_path / "one", note=quiet)
    again = scale(models[0], SuiteRequest(suite=suite), ways, out=tmp_path / "two", note=quiet)
    assert points == again
    settings = {(point.mode, point.setting) for point in points}
    assert settings >= {("best of N by reward", "4 samples"), ("majority", "2 samples"), ("refine", "round 2")}
    short, long = (point for point in points if point.mode == "budget")
    assert short.tokens <= 4 < long.tokens
    assert long.injected > 0
    rounds = [point.tokens for point in points if point.mode == "refine"]
    assert rounds == sorted(rounds)
    assert rounds[0] < rounds[2] <= 3 * 4
    table = json.loads((tmp_path / "one" / "scaling.json").read_text())
    assert table["points"] == [dataclasses.asdict(point) for point in points]
    assert "majority" in (tmp_path / "one" / "scaling.svg").read_text()
    assert "injected" in shown(render_points(points))


def test_unknown_modes_budgets_and_environments_are_refused(suite_text: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match='Did you mean "majority"'):
        Ways(modes=("majorty",))
    with pytest.raises(UserError, match="32-256"):
        parse_budgets("a lot", ThinkingBudget(max_tokens=1))
    file = tmp_path / "agent.toml"
    file.write_text(suite_text + 'max_turns = 4\n[env]\nname = "calculator"\n')
    agent = load_suite(str(file))
    with pytest.raises(UserError, match="plays in calculator over up to 4 turns"):
        require_single_turn(agent, read_tasks(agent))


def test_budgets_are_read_as_ranges() -> None:
    shape = ThinkingBudget(max_tokens=1, continuation="go on")
    found = parse_budgets("64, 32-256", shape)
    assert [(budget.min_tokens, budget.max_tokens) for budget in found] == [(0, 64), (32, 256)]
    assert {budget.continuation for budget in found} == {"go on"}
    made = default_budgets(8, shape)
    assert [(budget.min_tokens, budget.max_tokens) for budget in made] == [(0, 2), (0, 4), (0, 8), (4, 8)]
    assert {budget.continuation for budget in made} == {"go on"}
