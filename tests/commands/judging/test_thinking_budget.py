"""temper eval --thinking-budget: a checkpoint is asked as training with rollout.thinking asks it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from temper.cli import main
from temper.commands.checkpoints import evaluate_checkpoint
from temper.commands.judging.compare import compare_models
from temper.commands.judging.evaluate import SuiteRequest, evaluate_suite, with_decoding
from temper.commands.judging.scale import Ways, scale
from temper.commands.training.train import train
from temper.config import resolve, to_toml
from temper.errors import UserError
from temper.evals.suites import load_suite
from temper.models.tiny import make_tiny_model
from temper.runs.results import SuiteResult, load

CLOSING = 'decoding.thinking={budget=3, closing="zy", end="zy"}'
"""Of a model whose tokens are letters."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(
        tmp_path_factory.mktemp("models") / "tiny", layers=2, width=32, heads=2, kv_heads=1, mlp_width=64, context=32,
        alphabet="abcdefghijklmnopqrstuvwxyz", seed=0,
    )  # fmt: skip


def ask(model: Path, suite: str, out: Path, *overrides: str, **asked: Any) -> SuiteResult:
    request = SuiteRequest(suite=suite, out=out, samples=8, max_new_tokens=10, overrides=overrides, **asked)
    return evaluate_suite(model, request, note=lambda line: None, is_live=False)


def test_thinking_is_closed_at_the_budget_and_the_answer_goes_on(model: Path, suite: str, tmp_path: Path) -> None:
    plain = ask(model, suite, tmp_path / "plain.json")
    closed = ask(model, suite, tmp_path / "closed.json", CLOSING, thinking_budget=4)
    pairs = [
        (before, after)
        for prompt, again in zip(plain.prompts, closed.prompts, strict=True)
        for before, after in zip(prompt.samples, again.samples, strict=True)
    ]
    interrupted = [after for _, after in pairs if after.is_closed]
    assert len(interrupted) > 10
    for sample in interrupted:
        # Behind at most four letters: some tokens are no text.
        assert "zy" in sample.text[:6], "the budget of the command line, and the text of the suite"
        assert sample.num_tokens <= 10 - 2, "what was put in was not drawn, and counts up to max_new_tokens"
    assert max(sample.text.find("zy") for sample in interrupted) == 4
    assert max(len(sample.text) for sample in interrupted) > 6, "and on"
    in_time = [(before.text, after.text) for before, after in pairs if not after.is_closed]
    assert len(in_time) > 3
    assert all(before == after for before, after in in_time), "who ends in time is who it was"
    assert closed.metrics["closed"]["score"] == pytest.approx(len(interrupted) / len(pairs))
    assert "closed" not in plain.metrics
    assert {sample.is_closed for prompt in plain.prompts for sample in prompt.samples} == {None}
    assert load(tmp_path / "closed.json") == closed


def test_results_of_other_budgets_are_not_mixed(model: Path, suite: str, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    first = ask(model, suite, out, CLOSING, thinking_budget=4)
    texts = {name: first.budget[f"thinking_{name}"] for name in ("budget", "closing", "end")}
    assert texts == {"budget": 4, "closing": "zy", "end": "zy"}
    with pytest.raises(UserError, match="thinking_budget: 4 and 5"):
        ask(model, suite, out, CLOSING, thinking_budget=5)
    with pytest.raises(UserError, match="thinking_budget: 4 and nothing"):
        ask(model, suite, out)


def test_a_checkpoint_is_compared_with_a_result_at_its_budget(model: Path, suite: str, tmp_path: Path) -> None:
    ask(model, suite, tmp_path / "base.json", CLOSING, thinking_budget=4)
    asked = SuiteRequest(suite=suite, overrides=(CLOSING,))
    said: list[str] = []
    compare_models(tmp_path / "base.json", model, asked, out=tmp_path / "comparison", note=said.append)
    assert (tmp_path / "comparison").is_dir()


@pytest.mark.parametrize(
    ("overrides", "budget", "message"),
    [
        ((CLOSING,), 8, r"decoding.thinking \(--thinking-budget\): budget=8 and the 2 tokens of the closing text leave "
                        r"nothing of decoding.max_new_tokens=10 for an answer. Use a smaller budget, or max_new_"),
        (("decoding.thinking={budget=3, closing=\"z<|end|>\", end=\"z\"}",), 3, "holds a token that ends the turn"),
        ((CLOSING, 'decoding.stop=["y"]'), 3, "holds the stop text 'y'"),
        ((), 3, "cannot encode"),
        ((), 0, "greater than or equal to 1"),
        (('decoding.thinking={budget=3, closing="z"}',), 3, "does not hold end='</think>'"),
    ],
)  # fmt: skip
def test_a_budget_that_cannot_act_is_refused(
    model: Path, suite: str, tmp_path: Path, overrides: tuple[str, ...], budget: int, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        ask(model, suite, tmp_path / "result.json", *overrides, thinking_budget=budget)
    assert not (tmp_path / "result.json").exists()


def test_without_texts_those_of_training_are_used() -> None:
    asked = with_decoding(load_suite("gsm8k"), SuiteRequest(suite="gsm8k", thinking_budget=64)).decoding.thinking
    assert asked is not None
    assert (asked.budget, asked.closing, asked.end) == (64, "\n</think>\n\n", "</think>")


def test_scaling_has_budgets_of_its_own(model: Path, suite: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="temper scale has budgets of its own"):
        scale(model, SuiteRequest(suite=suite, overrides=(CLOSING,)), Ways(modes=("best_of",)), out=tmp_path / "out")


def test_held_out_tasks_of_a_run_are_asked_at_another_budget(
    tiny_recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_recipe["sampling"]["max_new_tokens"] = 8
    thinking = {"budget": 3, "closing": "zy", "end": "zy"}
    tiny_recipe["stage"] = [{**tiny_recipe["stage"][1], "steps": 1}]
    tiny_recipe["stage"][0]["rollout"] |= {"thinking": thinking}
    (tmp_path / "recipe.toml").write_text(to_toml(resolve(tiny_recipe, [], where="tiny")))
    run = train(tmp_path / "recipe.toml", run=tmp_path / "run")
    budgets = [
        {
            result.budget["thinking_budget"]
            for result in evaluate_checkpoint(run, run / "config.toml", thinking_budget=n)
        }
        for n in (None, 5)
    ]
    assert budgets == [{3}, {5}]
    early, late = (evaluate_checkpoint(run, run / "config.toml", thinking_budget=n)[-1].details for n in (1, 5))
    assert early["closed"]["score"] > late["closed"]["score"], "fewer think so long"  # type: ignore[index]
    monkeypatch.setattr(sys, "argv", ["temper", "eval", str(run), "--thinking-budget", "7"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert "rollout.thinking: budget=7 and the 2 tokens of the closing text" in capsys.readouterr().err
