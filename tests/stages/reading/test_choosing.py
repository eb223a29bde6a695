"""Choosers in a stage: refused where they have nothing to do, and the same after a kill as without one."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest

from temper.build.check import check_stages
from temper.commands.training import train as training
from temper.commands.training.preflight import dry_run
from temper.commands.training.train import train_stages
from temper.config import resolve, to_toml
from temper.errors import UserError
from temper.runs.reader import RunReader
from temper.stages.reading.choosing import doubt_choosers
from temper.types import Batch, EvaluationResult, StepReport
from tests.fakes.prompts import make_tasks

LETTERS = {"min_letters": 1, "max_letters": 2}
BOUNDED = {"generator": "spell_backward", "seed": 1, "size": 6, "options": LETTERS}
OTHER = {"generator": "rearrange", "seed": 1, "size": 4, "options": {"min_letters": 2, "max_letters": 2}}
CHOOSERS: dict[str, Any] = {
    # The tiny model solves little: thresholds and bands lie where its pass rates do.
    "no_positive_resampling": {"name": "no_positive_resampling", "threshold": 0.1},
    "band": {"name": "band", "low": 0.02, "high": 0.2, "skip": 0.8},
    "pools": {"name": "pools", "easy_from": 0.1, "hard_to": 0.01},
    "adaptive_sources": {"name": "adaptive_sources", "newest": 0.5},
}
METRICS = {
    "no_positive_resampling": "data/solved_share",
    "band": "data/in_band",
    "pools": "data/pool_hard",
    "adaptive_sources": "data/weight/rearrange",
}


@pytest.fixture
def recipe(tiny_recipe: dict[str, Any]) -> dict[str, Any]:
    """One RL stage over ten prompts of two sources: every prompt comes back a few times."""
    table = copy.deepcopy(tiny_recipe)
    stage = {**table["stage"][1], "evaluation": {"every": 0}, "rollout": {"groups_per_step": 4, "group_size": 4}}
    return {**table, "train": [BOUNDED, OTHER], "checkpoint": {"every": 1, "keep": 8}, "stage": [stage]}


def refused(table: dict[str, Any]) -> str:
    with pytest.raises(UserError) as caught:
        check_stages(resolve(table, [], where="test"))
    return str(caught.value)


def test_a_mixture_of_one_source_has_no_weights_to_adapt(recipe: dict[str, Any]) -> None:
    recipe["data"] = {"choose": ["adaptive_sources"]}
    check_stages(resolve(recipe, [], where="test"))
    recipe["train"] = [BOUNDED]
    assert "adaptive_sources moves draws from one source to another, and there is only spell_backward" in refused(
        recipe
    )
    recipe["train"] = [BOUNDED, {**BOUNDED, "seed": 5}]  # one name: one source
    assert "Add a [[train]] table with another name" in refused(recipe)


def test_floors_of_all_sources_fit_into_the_whole(recipe: dict[str, Any]) -> None:
    recipe["data"] = {"choose": [{"name": "adaptive_sources", "floor": 0.6}]}
    assert "floor=0.6 for each of 2 sources is more than all draws. Use at most floor = 0.5" in refused(recipe)


@pytest.mark.parametrize("name", ["no_positive_resampling", "band", "pools"])
def test_prompts_that_never_come_back_cannot_be_chosen_by_their_histories(recipe: dict[str, Any], name: str) -> None:
    endless = {"generator": "spell_backward", "options": LETTERS}
    recipe |= {"data": {"choose": [name]}, "train": [endless]}
    assert f"{name} goes by what was seen of a prompt before, and a generator without end" in refused(recipe)
    recipe["train"] = [endless, OTHER]  # the one with an end is enough
    check_stages(resolve(recipe, [], where="test"))


@pytest.mark.parametrize("kind", ["sft", "distill", "reward_model"])
def test_a_stage_without_judged_samples_has_no_histories_to_choose_by(recipe: dict[str, Any], kind: str) -> None:
    stage = {"kind": kind, "steps": 2, "data": {"choose": ["band"]}}
    recipe["model"] = {**recipe["model"], "teacher": "somewhere"} if kind == "distill" else recipe["model"]
    recipe["stage"] = [stage]
    recipe.pop("heldout") if kind == "reward_model" else None
    assert f"a stage of kind {kind} has none. Leave it out here" in refused(recipe)


def test_pairs_that_are_given_are_not_chosen_by_what_nobody_samples(recipe: dict[str, Any], tmp_path: Path) -> None:
    pairs = {"generator": "rearrange_pairs", "seed": 3, "size": 6, "options": {"min_letters": 2, "max_letters": 3}}
    recipe |= {"train": [pairs], "data": {"choose": ["band"]}, "stage": [{"kind": "preference", "steps": 1}]}
    recipe.pop("heldout")
    with pytest.raises(UserError, match="this stage of kind preference reads given answers"):
        train_stages(resolve(recipe, [], where="test"), run=tmp_path / "run", resume=False)


def test_a_misspelt_chooser_is_answered_before_anything_is_loaded(recipe: dict[str, Any]) -> None:
    recipe["data"] = {"choose": [{"name": "pool"}]}
    assert "data.choose: 'pool' is unknown. Did you mean \"pools\"?" in refused(recipe)


def test_a_stage_too_short_for_a_prompt_to_come_back_is_doubted(recipe: dict[str, Any]) -> None:
    recipe["data"] = {"choose": ["band", "adaptive_sources"]}
    (config,) = resolve(recipe, [], where="test")
    tasks = [make_tasks(name, size) for name, size in (("a", 16), ("b", 17))]
    doubt = doubt_choosers(config, tasks)  # 8 steps of 4 groups over two sources of equal weight: 16 of each
    assert doubt is not None
    assert "band will choose nothing" in doubt
    assert "8 steps of 4 groups are about 32 draws of 33 prompts" in doubt
    assert doubt_choosers(config, [make_tasks("a", 15), tasks[1]]) is None, "one that comes back is enough"
    recipe["data"] = {"choose": ["adaptive_sources"]}
    (config,) = resolve(recipe, [], where="test")
    assert doubt_choosers(config, tasks) is None, "it goes by sources"


def test_a_dry_run_says_what_chooses_and_what_is_in_doubt(recipe: dict[str, Any], tmp_path: Path) -> None:
    recipe["data"] = {"choose": ["no_positive_resampling", "pools"]}
    path = tmp_path / "recipe.toml"
    path.write_text(to_toml(resolve(recipe, [], where="test")))
    assert re.search(r"chooses +no_positive_resampling, pools", dry_run(path))
    recipe["train"] = [{**BOUNDED, "size": 26}]
    recipe["stage"][0] |= {"steps": 2}
    path.write_text(to_toml(resolve(recipe, [], where="test")))
    assert "warning: data.choose: no_positive_resampling, pools will choose nothing" in dry_run(path)


def test_a_file_of_tasks_under_the_key_of_choosers_is_told_its_place(recipe: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"data: training tasks are \[\[train\]\] tables"):
        resolve({**recipe, "data": "train.jsonl"}, [], where="test")


class Killed(Exception):
    """The power went."""


class Killer:
    """A recorder that ends the run, as it were, after the records of a step and before its checkpoint."""

    def __init__(self, step: int) -> None:
        self._step = step

    def append(self, report: StepReport, batch: Batch) -> None:
        if report.step == self._step:
            raise Killed

    def evaluation(self, result: EvaluationResult) -> None:
        """Nothing happens here."""


def train_killed(stages: Any, run: Path, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    make_plan = training.make_plan
    with monkeypatch.context() as patch:
        patch.setattr(
            training, "make_plan",
            lambda *parts, recorders, **more: make_plan(*parts, recorders=(*recorders, Killer(step)), **more),
        )  # fmt: skip
        with pytest.raises(Killed):
            train_stages(stages, run=run, resume=False)


def drawn(run: Path) -> list[tuple[int | None, str]]:
    with RunReader(run) as reader:
        return [(entry.draw, entry.task_id) for entry in reader.ledger()]


@pytest.mark.heavy
@pytest.mark.parametrize("name", CHOOSERS)
def test_a_chooser_acts_and_a_run_that_was_killed_draws_what_the_unbroken_one_draws(
    name: str, recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = train_stages(resolve(recipe, [], where="test"), run=tmp_path / "plain", resume=False)
    recipe["data"] = {"choose": [CHOOSERS[name]]}
    stages = resolve(recipe, [], where="test")
    alone = train_stages(stages, run=tmp_path / "alone", resume=False)
    assert drawn(alone) != drawn(plain), f"{name} changed nothing"
    train_killed(stages, tmp_path / "killed", 6, monkeypatch)
    train_stages(stages, run=tmp_path / "killed", resume=True)
    with RunReader(alone) as one, RunReader(tmp_path / "killed") as other:
        assert one.fingerprint() == other.fingerprint()
        assert [point.step for point in one.metric(METRICS[name])] == list(range(1, 9))
        assert one.prompts() == other.prompts() != []
    last = "checkpoints/0-rl/step-8/state.json"
    assert (alone / last).read_bytes() == (tmp_path / "killed" / last).read_bytes()


def test_histories_reach_the_run_store_and_add_up(recipe: dict[str, Any], tmp_path: Path) -> None:
    recipe["stage"][0] |= {"steps": 3}
    recipe["checkpoint"] = {"every": 3}
    recipe.pop("heldout")
    run = train_stages(resolve(recipe, [], where="test"), run=tmp_path / "run", resume=False)
    with RunReader(run) as reader:
        prompts = reader.prompts()
        ledger = [entry.task_id for entry in reader.ledger()]
        scores = reader.query("SELECT task_id, score FROM trajectories JOIN groups USING (stage, step, group_id)")
        known = [point.value for point in reader.metric("data/prompts_known")]
        history = reader.prompt_history(0, ledger[0])
    assert {prompt.task_id: prompt.draws for prompt in prompts} == {name: ledger.count(name) for name in ledger}
    for prompt in prompts:
        own = [row["score"] for row in scores if row["task_id"] == prompt.task_id]
        assert prompt.attempts == len(own)
        assert prompt.passed == pytest.approx(sum(own))
        assert prompt.source in ("spell_backward", "rearrange")
    assert known[-1] == len(prompts)
    assert [one.draws for one in history] == sorted(one.draws for one in history)
