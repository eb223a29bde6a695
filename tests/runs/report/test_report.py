"""The summary of a run."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from temper.evals.passk import wilson
from temper.folders.integrity import write_manifest
from temper.runs.report.report import as_json, duration, make_report, newest_checkpoint, render
from temper.runs.report.summary import ScoreChange
from temper.runs.store.run_store import RunStore
from temper.types import Batch, EvaluationResult, StepReport

StepMaker = Callable[..., tuple[StepReport, Batch]]
EvaluationMaker = Callable[..., EvaluationResult]


@pytest.fixture
def run(store: RunStore, make_step: StepMaker, make_evaluation: EvaluationMaker) -> Path:
    """Two stages: 0.1 -> 0.5 -> 0.9 greedy."""
    store.begin_stage(0, "sft", 2)
    store.begin_stage(1, "rl", 2)
    for stage, scores in ((0, (0.1, 0.4, 0.5)), (1, (0.5, 0.7, 0.9))):
        for step, score in enumerate(scores):
            store.evaluation(make_evaluation(step, score, stage))
        for step in (1, 2):
            store.append(*make_step(step, stage))
    store.finish()
    store.close()
    for name in ("0-sft/step-20", "1-rl/step-9", "1-rl/step-10", "1-rl/.tmp-step-11"):
        folder = store.folder / "checkpoints" / name
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(name.encode())
        write_manifest(folder)
    return store.folder


def test_the_numbers_of_a_run(run: Path) -> None:
    report = make_report(run)
    (change,) = report.scores
    assert (change.first.score, change.last.score) == (0.1, 0.9)
    assert change.gain == pytest.approx(0.8)
    assert [stage.scores[0].gain for stage in report.stages] == pytest.approx([0.4, 0.4])
    assert (report.work.num_steps, report.work.tokens_drawn, report.work.tokens_trained) == (4, 48, 24)
    # Trained draws are 2 and 4 in both stages: tasks 2 and 1 of three.
    assert (report.work.prompts_trained, report.work.groups_trained) == (2, 4)
    assert report.work.groups_dropped == {"degenerate": 4}
    assert report.failures == {"error: verifier timed out": 4}
    assert report.work.seconds == {"rollout": 12.0, "train": 4.0}
    assert report.stages[1].work.seconds == {"rollout": 6.0, "train": 2.0}


def test_the_newest_finished_checkpoint_is_hashed(run: Path) -> None:
    report = make_report(run)
    assert report.checkpoint == "checkpoints/1-rl/step-10"
    assert report.weights_sha256 == hashlib.sha256(b"1-rl/step-10").hexdigest()


def test_the_interval_of_a_gain_holds_what_it_promises(make_evaluation: EvaluationMaker) -> None:
    """Fresh runs of the same prompts: a share of them is easy for both policies, so that their scores go together."""
    random = np.random.default_rng(7)
    num_prompts, inside, widths = 200, 0, []
    for _ in range(2000):
        easy = random.random(num_prompts) < 0.5
        before, after = (np.where(easy, 0.9, hard) for hard in (0.05, 0.25))
        ends = []
        for step, chance in enumerate((before, after)):
            right = int((random.random(num_prompts) < chance).sum())
            low, high = wilson(right, num_prompts)
            ends.append(dataclasses.replace(make_evaluation(step, right / num_prompts), low=low, high=high))
        change = ScoreChange(name="greedy", first=ends[0], last=ends[1], differs=())
        assert change.gain_interval is not None
        low, high = change.gain_interval
        inside += low <= 0.1 <= high
        widths.append(high - low)
    assert 0.95 <= inside / 2000 < 0.9999, "conservative where scores go together, and still an interval"
    assert max(widths) < 0.25


def test_the_interval_of_a_gain_leans_as_its_ends_do(make_evaluation: EvaluationMaker) -> None:
    first = dataclasses.replace(make_evaluation(0, 0.0), low=0.0, high=0.1)
    last = dataclasses.replace(make_evaluation(9, 0.5), low=0.4, high=0.55)
    change = ScoreChange(name="greedy", first=first, last=last, differs=())
    assert change.gain_interval == pytest.approx((0.5 - 0.02**0.5, 0.55))


def test_scores_under_different_budgets_show_no_gain(
    store: RunStore, make_evaluation: EvaluationMaker, tmp_path: Path
) -> None:
    store.evaluation(make_evaluation(0, 0.1, tokens=16))
    store.evaluation(make_evaluation(9, 0.9, tokens=64))
    store.close()
    report = make_report(store.folder)
    assert report.scores[0].gain is None
    assert report.scores[0].gain_interval is None
    assert "not comparable: max_new_tokens" in render(report)


def test_the_text_says_what_a_user_looks_for(run: Path) -> None:
    text = render(make_report(run))
    for part in (
        "finished, 4 steps, 16.0 s", "10.0% [5.0, 15.0]", "90.0% [85.0, 95.0]", "+80.0 points [+72.9, +87.1]",
        "commonest answer scores 2.0%",
        "48 drawn, 24 trained", "2 distinct", "rollout 75%, train 25%", "4 degenerate", "4 x error: verifier timed out",
        "checkpoints/1-rl/step-10",
    ):  # fmt: skip
        assert part in text, part


def test_a_failure_names_its_tasks_and_a_score_that_is_alone_has_no_gain(
    run: Path, store: RunStore, make_evaluation: EvaluationMaker
) -> None:
    report = make_report(run)
    (tasks,) = report.failing_tasks.values()
    assert f"4 x error: verifier timed out (tasks {', '.join(tasks)})" in render(report)
    one = dataclasses.replace(report, failing_tasks={"error: verifier timed out": ("a", "b", "c", "d")})
    assert "(tasks a, b, c and 1 more)" in render(one)
    first = dataclasses.replace(report.scores[0], last=report.scores[0].first)
    text = render(dataclasses.replace(report, scores=(first,), stages=report.stages[:1]))
    assert "10.0% [5.0, 15.0]         not measured yet" in text
    assert " points" not in text


def test_the_json_is_strict_and_complete(run: Path) -> None:
    value = json.loads(as_json(make_report(run)), parse_constant=lambda name: pytest.fail(name))
    assert value["scores"][0]["gain"] == pytest.approx(0.8)
    assert value["scores"][0]["gain_interval"] == pytest.approx([0.8 - 0.0707, 0.8 + 0.0707], abs=1e-4)
    assert value["stages"][1]["reward"] == [0.1, 0.2]
    assert value["work"]["prompts_trained"] == 2


def test_a_run_that_has_just_begun_has_a_report(store: RunStore) -> None:
    text = render(make_report(store.folder))
    assert "running, 0 steps" in text
    assert "no held-out scores yet" in text
    assert newest_checkpoint(store.folder) is None
    store.close()


def test_durations_read_like_speech() -> None:
    assert [duration(s) for s in (0.25, 59.4, 192, 7500)] == ["0.2 s", "59.4 s", "3 min 12 s", "2 h 5 min"]


def test_peak_memory_is_shown_by_stage(store: RunStore, make_step: StepMaker) -> None:
    gib = 2.0**30
    for stage, name in enumerate(("sft", "rl")):
        store.begin_stage(stage, name, 2)
    for stage, step, size in ((0, 1, 1.0), (0, 2, 1.5), (1, 1, 0.5)):
        flag = {"sys/peak_memory_since_start": float(stage)}
        store.append(*make_step(step, stage, **{"sys/peak_memory_bytes": size * gib}, **flag))
    store.close()
    report = make_report(store.folder)
    assert [stage.peak_memory_bytes for stage in report.stages] == [1.5 * gib, 0.5 * gib]
    assert report.peak_memory_bytes == 1.5 * gib
    assert "peak memory      1.50 GiB: sft 1.50, rl 0.50 (since the start)" in render(report)


def test_a_checkpoint_of_an_adapter_is_found_and_hashed(run: Path) -> None:
    folder = run / "checkpoints" / "1-rl" / "step-12"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"adapter")
    write_manifest(folder)
    report = make_report(run)
    assert (report.checkpoint, report.weights) == ("checkpoints/1-rl/step-12", "adapter_model.safetensors")
    assert report.weights_sha256 == hashlib.sha256(b"adapter").hexdigest()
    assert "step-12/adapter_model.safetensors" in render(report)


def test_a_table_says_what_each_stage_added(
    store: RunStore, make_step: StepMaker, make_evaluation: EvaluationMaker
) -> None:
    """sft 0.1 -> 0.4; rejection keeps; rl 0.4 -> 0.9; then distillation of the model of stage 1, which ends at 0.6."""
    recipe = '[[stage]]\n[[stage]]\n[[stage]]\n[[stage]]\nmodel = { path = "stage:sft" }\n'
    (store.folder / "config.toml").write_text(recipe)
    ends = {0: (0.1, 0.4), 1: (0.4, 0.4), 2: (0.4, 0.9), 3: (0.4, 0.6)}
    for stage, name in enumerate(("sft", "rejection", "rl", "distill")):
        store.begin_stage(stage, name, 1)
        keeping = {"keep/rows": 30.0, "keep/prompts": 20.0, "keep/share": 0.25, "keep/best_of_n": 0.75}
        store.append(*make_step(1, stage, **(keeping if name == "rejection" else {})))
        for step, score in enumerate(ends[stage]):
            store.evaluation(make_evaluation(step, score, stage))
    store.evaluation(make_evaluation(1, 0.8, 0, name="pairs"))
    store.close()
    report = make_report(store.folder)
    assert [stage.starts_from for stage in report.stages] == ["", "", "", "sft"]
    # The distilled model is not a continuation of RL: its score must not end the run's.
    greedy = next(change for change in report.scores if change.name == "greedy")
    assert (greedy.first.score, greedy.last.score) == (0.1, 0.9)
    rows = {line.split()[1]: line for line in render(report).splitlines() if line[2:3].isdigit() and line[3:4] == " "}
    assert "10.0 → 40.0 ±5.0 (+30.0)" in rows["sft"]
    assert "pairs 80.0 → 80.0" in rows["sft"]
    assert "kept 30 answers (25.0%) to 20 prompts; reward 0.100, best of each group 0.750" in rows["rejection"]
    assert "→" not in rows["rejection"], "the same weights twice are no change"
    assert "40.0 → 90.0 ±5.0 (+50.0)" in rows["rl"]
    assert "4 distill from sft" in rows["distill"]
    assert "stages 1 to 3, 95% interval" in render(report)
