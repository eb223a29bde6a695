"""Guarantee: each domain's winner is the checkpoint with the highest pass@k, and the average is that of the winners.

Planted fault: choosing by pass@1.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from temper.commands.judging import choose as command
from temper.commands.judging.choose import CheckpointRating, choose, find_candidates, pass_at, render, winner
from temper.commands.judging.evaluate import SuiteRequest
from temper.errors import UserError
from temper.evals.passk import pass_at_k
from temper.models.tiny import make_tiny_model
from temper.runs.results import PromptResult, SampleResult, SuiteResult, load

LETTERS = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [
        make_tiny_model(
            folder / f"m{seed}", layers=1, width=16, heads=2, kv_heads=1, mlp_width=32, context=32, alphabet=LETTERS,
            seed=seed,
        )
        for seed in range(3)
    ]  # fmt: skip


@pytest.fixture
def suites(suite_text: str, tmp_path: Path) -> list[str]:
    """Two domains in which an untrained model is right now and then: a letter of each counts."""
    easy = suite_text.replace("min_letters = 1, max_letters = 2", "min_letters = 3, max_letters = 6")
    easy = easy.replace("size = 6", "size = 16")
    paths = []
    for name, bar in (("one", 0.3), ("two", 0.2)):
        paths.append(tmp_path / f"{name}.toml")
        paths[-1].write_text(f"correct_at = {bar}\n{easy}")
    return [str(path) for path in paths]


def test_the_winners_have_the_highest_pass_at_k_and_are_averaged(
    models: list[Path], suites: list[str], tmp_path: Path
) -> None:
    lines: list[str] = []
    probes = [SuiteRequest(suite=suite) for suite in suites]
    found = choose(models, probes, k=3, out=tmp_path / "out", average=tmp_path / "mean", note=lines.append)
    for suite in ("one", "two"):
        scores = {each.checkpoint: each.scores[suite]["score"] for each in found.rated}
        assert scores[found.winners[suite]] == max(scores.values())
        result = load(tmp_path / "out" / f"{suite}-0.json")
        bar = {"one": 0.3, "two": 0.2}[suite]
        rights = [sum((s.score or 0) >= bar - 1e-9 for s in p.samples) for p in result.prompts]
        assert scores[models[0]] == pytest.approx(sum(pass_at_k(3, right, 3) for right in rights) / len(rights))
        assert len(set(scores.values())) > 1, "the choice is one"
    assert found.average is not None
    record = json.loads((tmp_path / "mean" / "provenance.json").read_text())
    assert record["chosen_by"] == "pass@3"
    assert record["domains"]["one"]["path"] == str(found.winners["one"])
    assert {source["path"] for source in record["sources"]} == {str(path) for path in found.winners.values()}
    table = json.loads((tmp_path / "out" / "choice.json").read_text())
    assert len(table["checkpoints"]) == 4
    console = Console(width=250)
    with console.capture() as shown:
        console.print(render(found))
    assert "pass@3" in shown.get()
    drawn = sum("saved" in line for line in lines)
    again = choose(models, probes, k=3, out=tmp_path / "out", note=lines.append)
    assert again.winners == found.winners
    assert sum("saved" in line for line in lines) == drawn, "what is known is not drawn again"


def result(*rights: tuple[int, int], correct_at: float = 1.0) -> SuiteResult:
    prompts = [
        PromptResult(
            task_id=str(place), prompt="?", gold=None,
            samples=tuple(SampleResult(score=float(k < right), num_tokens=1) for k in range(size)),
        )
        for place, (right, size) in enumerate(rights)
    ]  # fmt: skip
    return SuiteResult(
        suite="s", checkpoint="c", weights_sha256="", created=0.0, budget={"correct_at": correct_at},
        constant_score=None, metrics={}, prompts=tuple(prompts),
    )  # fmt: skip


NARROW = result((4, 4), (4, 4), (0, 4), (0, 4))
"""Right half of the time, always on the same prompts."""
BROAD = result((1, 4), (2, 4), (1, 4), (1, 4))
"""Right a third of the time, on all of them."""


def best_by(k: int) -> Path:
    results = {"narrow": NARROW, "broad": BROAD}
    rated = [
        CheckpointRating(checkpoint=Path(name), scores={"s": pass_at(found, k)}) for name, found in results.items()
    ]
    return winner(rated, "s")


def test_breadth_wins_at_k_where_luck_wins_at_one() -> None:
    assert best_by(4) == Path("broad")
    assert best_by(1) == Path("narrow")


def test_choosing_by_the_first_sample_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    own = command.pass_at
    monkeypatch.setitem(globals(), "pass_at", lambda found, k: own(found, 1))
    with pytest.raises(AssertionError):
        test_breadth_wins_at_k_where_luck_wins_at_one()


def test_equal_scores_choose_the_one_that_trained_least() -> None:
    rated = [CheckpointRating(checkpoint=Path(name), scores={"s": pass_at(BROAD, 2)}) for name in ("first", "second")]
    assert winner(rated, "s") == Path("first")


def test_prompts_with_too_few_scored_samples_are_left_out_and_said() -> None:
    assert pass_at(result((1, 4), (0, 2)), 4)["prompts"] == 1
    with pytest.raises(UserError, match="no prompt has 8 scored samples"):
        pass_at(BROAD, 8)


def test_a_run_brings_the_checkpoints_of_its_policies_in_the_order_of_training(
    models: list[Path], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    for name in ("0-sft/step-9", "0-sft/step-10", "1-reward_model/step-3", "10-rl/step-2", "2-rejection/step-4"):
        folder = run / "checkpoints" / name
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")
    (run / "run.db").touch()
    found = [str(path.relative_to(run / "checkpoints")) for path in find_candidates([run])]
    assert found == ["0-sft/step-9", "0-sft/step-10", "10-rl/step-2"]
    assert len(find_candidates([run, models[0], run], stage="sft")) == 3
    with pytest.raises(UserError, match="no checkpoint of a stage distill"):
        find_candidates([run], stage="distill")


@pytest.mark.parametrize(
    ("asked", "k", "message"),
    [({"samples": 2}, 4, "--samples 2 is less than --k 4"), ({"temperature": 0.0}, 4, "needs different samples")],
)
def test_what_gives_no_pass_at_k_is_refused(
    models: list[Path], suites: list[str], tmp_path: Path, asked: dict[str, object], k: int, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        choose(models, [SuiteRequest(suite=suites[0], **asked)], k=k, out=tmp_path)  # type: ignore[arg-type]


def test_domains_need_names_of_their_own_and_the_average_a_new_place(
    models: list[Path], suites: list[str], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="one suite per domain"):
        choose(models, [SuiteRequest(suite=suites[0])] * 2, k=2, out=tmp_path)
    with pytest.raises(UserError, match="not empty"):
        choose(models, [SuiteRequest(suite=suites[0])], k=2, out=tmp_path / "o", average=models[0])
