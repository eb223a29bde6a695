"""Every kind of stage in one recipe, through the real command: what each reads, starts from and leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from temper.build import build_stage, check_stages
from temper.commands.checkpoints import evaluate_checkpoint
from temper.commands.find import find_model
from temper.commands.training import train as training
from temper.commands.training.preflight import dry_run
from temper.commands.training.train import outputs_of, train
from temper.config import RunConfig, resolve, to_toml
from temper.errors import UserError
from temper.rewards.learned.discriminator import DiscriminatorReward
from temper.rewards.learned.process import ProcessReward
from temper.runs.reader import RunReader
from temper.types import Message, Task, Trajectory

LETTERS = {"min_letters": 2, "max_letters": 3}
PAIRS = [{"generator": "rearrange_pairs", "seed": 3, "options": LETTERS}]
HELDOUT_PAIRS = {"generator": "rearrange_pairs", "seed": 2, "size": 4, "options": LETTERS}
LEARNED = [{"kind": "reward_model", "options": {"path": "stage:reward_model"}}]


@pytest.fixture
def chain(tiny_recipe: dict[str, Any]) -> dict[str, Any]:
    """All stages that there are, two steps each."""
    return {
        **tiny_recipe,
        "train": [{"generator": "rearrange", "seed": 1, "options": LETTERS}],
        "heldout": {"generator": "rearrange", "seed": 2, "size": 4, "options": LETTERS},
        "reward": [{"kind": "rearranged"}],
        "sampling": {"max_new_tokens": 8},
        "optim": {"learning_rate": 3e-3},
        "trainer": {"examples_per_step": 4},
        "rollout": {"groups_per_step": 4, "group_size": 4},
        "stage": [
            {"kind": "sft", "steps": 2},
            {"kind": "reward_model", "steps": 2, "train": PAIRS, "heldout": HELDOUT_PAIRS},
            {"kind": "rejection", "steps": 2, "rollout": {"keep": "best"}},
            {"kind": "sft", "steps": 2, "train": [{"path": "stage:rejection"}]},
            {"kind": "preference", "steps": 2, "objective": {"preset": "online_dpo"}, "reward": LEARNED},
            {"kind": "preference", "steps": 2, "train": PAIRS, "heldout": HELDOUT_PAIRS},
            {"kind": "rl", "steps": 2, "reward": LEARNED},
            {"kind": "distill", "steps": 2, "model": {"path": "stage:sft", "teacher": "stage:rl"}},
            {"kind": "distill", "steps": 2, "model": {"path": "stage:first", "teacher": "stage:distill"}},
        ],
    }


def write(recipe: dict[str, Any], folder: Path) -> Path:
    path = folder / "recipe.toml"
    path.write_text(to_toml(resolve(recipe, [], where="chain")))
    return path


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def is_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    assert first.keys() == second.keys()
    return all(torch.equal(first[name], second[name]) for name in first)


def test_a_recipe_of_all_stages_runs_and_each_starts_from_the_right_weights(
    chain: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[dict[str, torch.Tensor]] = []
    taught: list[dict[str, torch.Tensor]] = []

    def watched(config: RunConfig, index: int, model: Path, *rest: Any, **more: Any) -> Any:
        stage = build_stage(config, index, model, *rest, **more)
        begun.append({name: tensor.detach().clone() for name, tensor in stage.model.named_parameters()})
        if config.stage == "distill":
            taught.append(weights(Path(config.model.teacher)))
        return stage

    monkeypatch.setattr(training, "build_stage", watched)
    path = write(chain, tmp_path)
    run = train(path, run=tmp_path / "run")

    kinds = [stage["kind"] for stage in chain["stage"]]
    left = [run / "checkpoints" / f"{index}-{kind}" / "step-2" for index, kind in enumerate(kinds)]
    ends = [weights(folder) for folder in left]
    first = weights(run / "model")
    # sft; reward model and rejection leave the policy as it was; both distillations name another student.
    origins = [first, ends[0], ends[0], ends[0], ends[3], ends[4], ends[5], ends[3], first]
    for index, (found, wanted) in enumerate(zip(begun, origins, strict=True)):
        shared = {name: tensor for name, tensor in found.items() if name in wanted and not name.startswith("score.")}
        assert len(shared) > 10, "the decoder is compared"
        assert is_same(shared, {name: wanted[name] for name in shared}), f"stage {index} began elsewhere"
    assert is_same(taught[0], ends[6])
    assert is_same(taught[1], ends[7]), "the last stage of a kind is meant"
    assert is_same(ends[2], ends[0]), "rejection sampling trains nothing"
    assert not any(is_same(ends[n], ends[m]) for n, m in ((0, 3), (3, 4), (4, 5), (5, 6), (3, 7)))
    rows = [json.loads(line) for line in (left[2] / "kept.jsonl").read_text().splitlines()]
    assert rows
    assert all(row["completion"] for row in rows)
    assert (left[1] / "temper_scale.json").is_file()

    with RunReader(run) as reader:
        assert reader.is_finished
        assert [(stage.stage, stage.name, stage.steps) for stage in reader.stages()] == [
            (index, kind, 2) for index, kind in enumerate(kinds)
        ]
        assert [(step.stage, step.step) for step in reader.steps()] == [(n, m) for n in range(9) for m in (1, 2)]
        ways = {(result.stage, result.step, result.name) for result in reader.evaluations()}
    judged_by_pairs = (1, 5)
    assert ways == {
        (stage, step, name)
        for stage in range(9)
        for step in (0, 2)
        for name in (("pairs",) if stage in judged_by_pairs else ("greedy", "sampled"))
    }
    assert find_model(run) == left[8]
    scored = evaluate_checkpoint(run, path)
    with RunReader(run) as reader:
        last = [result for result in reader.evaluations() if (result.stage, result.step) == (8, 2)]
    assert [result.score for result in scored] == [result.score for result in last], "with the teacher of the run"
    assert outputs_of(resolve(chain, [], where="chain"), run)["rejection"] == left[2] / "kept.jsonl"


def test_a_runs_model_is_its_last_policy_and_never_a_reward_model(tmp_path: Path) -> None:
    def leave(stage: str, *steps: int) -> None:
        for step in steps:
            folder = tmp_path / "checkpoints" / stage / f"step-{step}"
            folder.mkdir(parents=True)
            (folder / "manifest.json").write_text("{}")

    (tmp_path / "run.db").touch()
    with pytest.raises(UserError, match=r"without a checkpoint of a policy yet: one is written every .* last$"):
        find_model(tmp_path)
    leave("0-reward_model", 5)
    with pytest.raises(UserError, match="Name a checkpoint directory of its reward model"):
        find_model(tmp_path)
    leave("2-sft", 9, 10)
    leave("11-reward_model", 3)
    assert find_model(tmp_path).parts[-2:] == ("2-sft", "step-10")
    leave("10-rl", 1)
    assert find_model(tmp_path).parts[-2:] == ("10-rl", "step-1"), "in order of numbers, not of letters"


ALONE: dict[str, Callable[[Path], dict[str, Any]]] = {
    "reward_model": lambda _: {"train": PAIRS, "heldout": HELDOUT_PAIRS},
    "rejection": lambda _: {"rollout": {"keep": "best"}},
    "preference": lambda _: {"train": PAIRS},
    "rl": lambda _: {},
    "distill": lambda _: {"model": {"teacher": "stage:first"}},
}


@pytest.mark.parametrize("kind", ALONE)
def test_each_stage_runs_alone(kind: str, chain: dict[str, Any], tmp_path: Path) -> None:
    chain["stage"] = [{"kind": kind, "steps": 1, **ALONE[kind](tmp_path)}]
    run = train(write(chain, tmp_path), run=tmp_path / "run")
    with RunReader(run) as reader:
        assert reader.is_finished
        assert [(step.stage, step.step) for step in reader.steps()] == [(0, 1)]
        assert {result.step for result in reader.evaluations()} == {0, 1}


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([{"model": {"path": "stage:rl"}}], r"stage 1 \(sft\): model.path is .stage:rl., and no stage before it"),
        ([{}, {"kind": "rl", "reward": LEARNED}], r"reward.options.path is .stage:reward_model., and no stage before"),
        ([{}, {"model": {"teacher": "stage:sfd"}}], 'Did you mean "sft"'),
        ([{}, {"kind": "distill", "model": {"teacher": "stage:distill"}}], "Before it: first, sft"),
        ([{}, {"train": [{"path": "stage:sft"}]}], "leaves a model and no rows"),
        ([{"kind": "rejection"}, {"model": {"path": "stage:rejection"}}], "leaves rows and no model"),
        (
            [{"kind": "reward_model", "train": PAIRS}, {"model": {"path": "stage:reward_model"}}],
            "can neither answer nor teach",
        ),
        ([{}, {"model": {"new": {"layers": 3}}}], "only the first stage can make a model"),
    ],
)  # fmt: skip
def test_what_no_earlier_stage_leaves_is_refused_before_anything_is_read(
    stages: list[dict[str, Any]], message: str, chain: dict[str, Any]
) -> None:
    chain["stage"] = [{"kind": "sft", "steps": 1, **stage} for stage in stages]
    with pytest.raises(UserError, match=message):
        check_stages(resolve(chain, [], where="chain"))


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ({"kind": "rl", "objective": {"preset": "dpo"}}, "a stage of kind rl cannot train with objective dpo"),
        ({"kind": "rejection", "rollout": {"keep": "bets"}}, 'Did you mean "best"'),
        ({"kind": "distill"}, "needs a teacher"),
    ],
)
def test_a_mistake_in_a_later_stage_is_found_before_the_first_one_runs(
    stage: dict[str, Any], message: str, chain: dict[str, Any], tmp_path: Path
) -> None:
    chain["stage"] = [{"kind": "sft", "steps": 1}, {"steps": 1, **stage}]
    path = write(chain, tmp_path)
    with pytest.raises(UserError, match=message):
        train(path, run=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match=message):
        dry_run(path)


@pytest.mark.parametrize("command", [dry_run, train])
def test_preferences_without_pairs_and_without_a_reward_are_refused(
    command: Callable[[Path], Any], chain: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    chain |= {"stage": [{"kind": "preference", "steps": 1}], "reward": []}
    with pytest.raises(UserError, match="held-out tasks that are no pairs are answered and judged"):
        command(write(chain, tmp_path))
    chain.pop("heldout")
    with pytest.raises(UserError, match="a preference stage compares pairs: its training data has none"):
        command(write(chain, tmp_path))


def test_held_out_pairs_need_no_reward(chain: dict[str, Any], tmp_path: Path) -> None:
    chain |= {"stage": [{"kind": "preference", "steps": 1, "train": PAIRS, "heldout": HELDOUT_PAIRS}], "reward": []}
    run = train(write(chain, tmp_path), run=tmp_path / "run")
    with RunReader(run) as reader:
        assert [result.name for result in reader.evaluations()] == ["pairs", "pairs"]


def test_kto_trains_on_labelled_rows_of_a_file(chain: dict[str, Any], tmp_path: Path) -> None:
    rows = [{"prompt": f"ab{c}", "completion": f"{c}ba" if n % 2 else "zz", "label": bool(n % 2)}
            for n, c in enumerate("cdefghijkl")]  # fmt: skip
    (tmp_path / "labelled.jsonl").write_text("\n".join(map(json.dumps, rows)))
    chain["stage"] = [
        {"kind": "preference", "steps": 2, "objective": {"preset": "kto"},
         "train": [{"path": str(tmp_path / "labelled.jsonl")}]}
    ]  # fmt: skip
    path = write(chain, tmp_path)
    assert "labelled completions" in dry_run(path)
    run = train(path, run=tmp_path / "run")
    assert not is_same(weights(run / "model"), weights(find_model(run)))
    assert (run / "caches" / "0-preference" / "references.bin").stat().st_size > 0


def step_file(folder: Path) -> Path:
    """A step is good when it is "aa"."""
    made = [[step for bit in (1, 2, 4) for step in ("aa" if number & bit else "bb",)] for number in range(8)]
    rows = [{"prompt": f"q{'abcdefgh'[n]}", "completions": steps, "labels": [step == "aa" for step in steps]}
            for n, steps in enumerate(made)]  # fmt: skip
    path = folder / "steps.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_a_process_reward_model_learns_step_labels_and_rewards_a_later_stage(
    chain: dict[str, Any], tmp_path: Path
) -> None:
    chain["model"]["new"] |= {"alphabet": "abcdefghijklmnopqrstuvwxyz\n", "context": 48}
    chain["stage"] = [
        {"kind": "reward_model", "steps": 40, "objective": {"preset": "process_reward_model"},
         "train": [{"path": str(step_file(tmp_path))}], "heldout": {"path": str(step_file(tmp_path)), "size": 2},
         "optim": {"learning_rate": 1e-2}, "trainer": {"examples_per_step": 6}},
        {"kind": "rl", "steps": 1,
         "reward": [{"kind": "process", "options": {"path": "stage:reward_model"}}]},
    ]  # fmt: skip
    path = write(chain, tmp_path)
    assert "solutions with labelled steps" in dry_run(path)
    run = train(path, run=tmp_path / "run")
    scorer = run / "checkpoints" / "0-reward_model" / "step-40"
    assert json.loads((scorer / "config.json").read_text())["architectures"][0].endswith("ForTokenClassification")
    assert not (scorer / "temper_scale.json").exists(), "probabilities have no scale"

    async def steps_of(text: str) -> list[float]:
        reward = ProcessReward(path=str(scorer))
        task = Task(id="t", messages=(Message(role="user", content="qz"),))
        try:
            judged, _ = await reward.score_steps(task, Trajectory.saying("t", text))
        finally:
            await reward.close()
        return [score.value or 0.0 for _, score in judged]

    good, bad = asyncio.run(steps_of("aa\n\nbb"))
    assert good > 0.9 > 0.1 > bad
    assert find_model(run) == run / "checkpoints" / "1-rl" / "step-1"


@pytest.mark.heavy
def test_a_discriminator_learns_to_tell_the_students_texts_from_the_teachers(
    chain: dict[str, Any], tmp_path: Path
) -> None:
    chain["stage"] = [
        {"kind": "rl", "steps": 10, "optim": {"learning_rate": 0.0},  # a student that does not learn meanwhile
         "reward": [{"kind": "discriminator", "options": {"path": "stage:first", "learning_rate": 3e-3}}]}
    ]  # fmt: skip
    run = train(write(chain, tmp_path), run=tmp_path / "run")
    with RunReader(run) as reader:
        said = [member for step in (9, 10) for member in reader.trajectories(0, step)]
        rewards = [point.value for point in reader.metric("reward/mean")]
    assert rewards[0] == 0.0, "a head of zeros has no opinion"
    assert rewards[-1] not in (0.0, None)

    async def wins(trained: bool) -> float:
        """Share of texts that are worth less than the teacher's answer to the same question."""
        reward = DiscriminatorReward(path=str(run / "model"))
        if trained:
            reward.load(find_model(run) / "rewards" / "discriminator")
        won = 0
        for member in said:
            task = Task(id=member.task_id, messages=(Message(role="user", content=member.prompt[-1].content),))
            gold = await reward.score(task, Trajectory.saying("t", str(member.answer)))
            own = await reward.score(task, Trajectory.saying("t", member.text))
            won += (gold.value or 0.0) > (own.value or 0.0)
        await reward.close()
        return won / len(said)

    assert asyncio.run(wins(trained=True)) > 0.8
    assert asyncio.run(wins(trained=False)) == 0.0


def test_a_later_stage_may_start_from_a_directory_of_its_own(chain: dict[str, Any], tmp_path: Path) -> None:
    chain["stage"] = [{"kind": "sft", "steps": 1}]
    first = train(write(chain, tmp_path), run=tmp_path / "first")
    chain["model"] = {"path": str(first / "model")}
    chain["stage"] = [
        {"kind": "sft", "steps": 1},
        {"kind": "sft", "steps": 1, "optim": {"learning_rate": 0.0}, "model": {"path": str(find_model(first))}},
    ]
    second = train(write(chain, tmp_path), run=tmp_path / "second")
    assert is_same(weights(find_model(second)), weights(find_model(first)))


def test_a_dry_run_says_what_each_stage_will_read(chain: dict[str, Any], tmp_path: Path) -> None:
    text = dry_run(write(chain, tmp_path))
    stages = dict(enumerate(text.split("\n\n"), start=1))
    assert "starts from              a new model" in stages[1]
    assert "pairs " in stages[2]
    assert "8 of them read by the head" in stages[2]
    assert "best() of each group" in stages[3]
    assert "what stage 1 (sft) leaves" in stages[4], "neither the reward model's nor the rejection's"
    assert "what stage 3 (rejection) leaves" in stages[4]
    assert "reward reward_model  what stage 2 (reward_model) leaves" in stages[5]
    assert "by the reward" in stages[5]
    assert "pairs" in stages[6]
    assert "completions a step" not in stages[6], "it samples nothing"
    assert "what stage 7 (rl) leaves" in stages[8]
    assert "50% of the steps" in stages[8]
    assert "the run's first model" in stages[9]
    assert "what stage 8 (distill) leaves" in stages[9]


def test_a_dry_run_finds_held_out_tasks_that_a_reward_model_cannot_compare(
    chain: dict[str, Any], tmp_path: Path
) -> None:
    del chain["stage"][1]["heldout"]
    with pytest.raises(UserError, match="is no pair: a reward model needs a chosen and a rejected answer"):
        dry_run(write(chain, tmp_path))
