"""Kill it at any instant; what a resume gives is the uninterrupted run, to the bit."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from temper.commands.training import train as training
from temper.config import resolve, to_toml
from temper.rewards.composite import CompositeReward
from temper.runs.reader import RunReader
from temper.types import Batch, EvaluationResult, StepReport
from tests.commands.training.test_train_routes import write_glm

KILLS = 10
DEADLINE_SECONDS = 240.0


KILLED_IN_A_WRITE = """
import os, signal, sys
from temper.trainer import checkpoint
from temper.cli import main
name = sys.argv.pop(1)
assert hasattr(checkpoint, name), f"checkpoint.py has no {name}: nothing would be killed"
setattr(checkpoint, name, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
main()
"""
INSTANTS_OF_A_WRITE = ("write_manifest", "_sync", "_move_into_place")
"""Parts are there and no manifest; the manifest is there; everything is on the disk and not yet in its place."""


def start(recipe: Path, run: Path, *, resume: bool, killed_in: str = "") -> subprocess.Popen[bytes]:
    """killed_in: the function of a checkpoint's write that SIGKILLs the process instead of doing its work."""
    program = ["-c", KILLED_IN_A_WRITE, killed_in] if killed_in else ["-m", "temper"]
    command = [sys.executable, *program, "train", str(recipe), "--run", str(run)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, "--resume"] if resume else command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def write_recipe(folder: Path, recipe: dict[str, Any]) -> Path:
    path = folder / "recipe.toml"
    path.write_text(to_toml(resolve(recipe, [], where="tiny")))
    return path


def finish(process: subprocess.Popen[bytes]) -> None:
    output, _ = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 0, output.decode()


def identity(run: Path) -> dict[str, Any]:
    """Everything of a run that must not depend on whether it was killed."""
    parts = {}
    for checkpoint in sorted((run / "checkpoints").glob("*/step-*")):
        for file in sorted(checkpoint.rglob("*")):
            if file.is_file():
                parts[str(file.relative_to(run))] = hashlib.sha256(file.read_bytes()).hexdigest()
    with RunReader(run) as reader:
        assert reader.is_finished
        return {
            "files": parts,
            "records": reader.fingerprint(),
            "ledger": [(e.stage, e.draw, e.task_id, e.step) for e in reader.ledger()],
        }


def kill_somewhere(process: subprocess.Popen[bytes], run: Path, random_: random.Random) -> None:
    """Lets the run get on for a moment, then SIGKILLs it."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while process.poll() is None and not (run / "run.db").exists() and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(random_.uniform(0.0, 2.0))
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)


LETTERS = {"min_letters": 2, "max_letters": 3}
# So few that rows come back, and are found in the cache of references where an earlier process left them.
PAIRS = [{"generator": "rearrange_pairs", "seed": 3, "size": 6, "options": LETTERS}]
HELDOUT_PAIRS = {"generator": "rearrange_pairs", "seed": 2, "size": 4, "options": LETTERS}


def every_stage(recipe: dict[str, Any]) -> dict[str, Any]:
    """A chain with each kind of stage and each kind of source, three steps long."""
    learned = [{"kind": "reward_model", "options": {"path": "stage:reward_model"}}]
    rival = [{"kind": "discriminator", "options": {"path": "stage:sft", "learning_rate": 1e-3, "warmup_groups": 2}}]
    stages = [
        {"kind": "sft"},
        {"kind": "reward_model", "train": PAIRS, "heldout": HELDOUT_PAIRS},
        {"kind": "rejection", "rollout": {"keep": "best"}},
        {"kind": "sft", "train": [{"path": "stage:rejection"}]},
        {"kind": "preference", "train": PAIRS, "heldout": HELDOUT_PAIRS},
        {"kind": "preference", "train": PAIRS, "objective": {"preset": "kto"}},
        {"kind": "preference", "objective": {"preset": "online_dpo"}},
        {"kind": "rl", "reward": learned, "trainer": {"epochs": 2, "updates_per_batch": 2}},
        {"kind": "rl", "reward": rival, "rollout": {"thinking": {"budget": 3, "closing": "zy", "end": "zy"}}},
        {"kind": "distill", "model": {"path": "stage:sft", "teacher": "stage:rl"}, "seed": 1},
        {"kind": "preference", "objective": {"preset": "xpo"}},
        {"kind": "preference", "objective": {"preset": "nash_md"}},
    ]
    return {
        **recipe,
        "train": [{"generator": "rearrange", "seed": 1, "options": LETTERS}],
        "heldout": {"generator": "rearrange", "seed": 2, "size": 4, "options": LETTERS},
        "reward": [{"kind": "edit"}],
        "sampling": {"max_new_tokens": 8},
        "optim": {"learning_rate": 3e-3},
        "trainer": {"examples_per_step": 4},
        "rollout": {"groups_per_step": 4, "group_size": 4},
        "checkpoint": {"every": 1, "keep": 3},
        "stage": [{"steps": 3, **stage} for stage in stages],
    }


class Interrupted(Exception):
    """The power went."""


class Interrupter:
    """A recorder that ends the process, as it were, once: after the records of a step, before its checkpoint."""

    def __init__(self, stage: int, step: int) -> None:
        self._place = (stage, step)

    def append(self, report: StepReport, batch: Batch) -> None:
        if (report.stage, report.step) == self._place:
            raise Interrupted

    def evaluation(self, result: EvaluationResult) -> None:
        """Nothing happens here."""


def interrupted(recipe: Path, run: Path, interrupter: Interrupter, monkeypatch: pytest.MonkeyPatch) -> None:
    make_plan = training.make_plan

    def with_interrupter(*parts: Any, recorders: Any, **more: Any) -> Any:
        return make_plan(*parts, recorders=(*recorders, interrupter), **more)

    with monkeypatch.context() as patch:
        patch.setattr(training, "make_plan", with_interrupter)
        with pytest.raises(Interrupted):
            training.train(recipe, run=run, resume=run.exists())


@pytest.mark.parametrize(
    "model",
    [
        pytest.param({}, id="whole", marks=pytest.mark.heavy),
        pytest.param({"lora": {"rank": 4}, "offload": True}, id="lora", marks=pytest.mark.heavy),
    ],
)
def test_every_kind_of_stage_resumes_to_the_bit(
    model: dict[str, Any], tiny_recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = every_stage(tiny_recipe)
    table["model"] |= model
    recipe, num_stages = write_recipe(tmp_path, table), len(table["stage"])
    run = tmp_path / "run"
    expected = identity(training.train(recipe, run=run))
    with RunReader(run) as reader:
        mixed = {point.value for point in reader.metric("distillation/on_policy")}
    assert mixed == {0.0, 1.0}, "both of the mixture's sources are to be resumed"
    run.rename(tmp_path / "alone")  # the other run has its place: an adapter records where its model lies
    for stage in range(num_stages):  # by turns before its first checkpoint, after it, and after two
        interrupted(recipe, run, Interrupter(stage, 1 + stage % 3), monkeypatch)
    actual = identity(training.train(recipe, run=run, resume=True))
    assert [name for name, digest in expected["files"].items() if actual["files"].get(name) != digest] == []
    assert actual["files"].keys() == expected["files"].keys()
    assert actual["ledger"] == expected["ledger"]
    assert actual["records"] == expected["records"]
    assert len({name.split("/")[1] for name in expected["files"]}) == num_stages


@pytest.mark.parametrize("staleness", [0, pytest.param(1, marks=pytest.mark.heavy)])
def test_an_adapter_over_a_base_in_four_bits_resumes_to_the_bit(
    staleness: int, tiny_recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_recipe["model"]["lora"] = {"rank": 4, "base": "4bit"}
    kl = {"regularizers": [{"name": "kl", "coefficient": 0.01}]}
    rl = {**tiny_recipe["stage"][1], "steps": 4, "objective": kl}
    rl["rollout"] = {**rl["rollout"], "max_staleness": staleness}
    table = {**tiny_recipe, "checkpoint": {"every": 1, "keep": 4}, "stage": [{"kind": "sft", "steps": 2}, rl]}
    recipe, run = write_recipe(tmp_path, table), tmp_path / "run"
    expected = identity(training.train(recipe, run=run))
    assert any(name.endswith("adapter_model.safetensors") for name in expected["files"])
    assert not any(name.endswith("/model.safetensors") for name in expected["files"])
    if staleness:
        return  # runs ahead of its trainer: finished is what can be asked for
    run.rename(tmp_path / "alone")
    interrupted(recipe, run, Interrupter(1, 3), monkeypatch)
    actual = identity(training.train(recipe, run=run, resume=True))
    assert actual["files"] == expected["files"]
    assert actual["records"] == expected["records"]


@pytest.mark.heavy
@pytest.mark.parametrize("part", ["adapters on experts", "biases of routers"])
def test_experts_resume_to_the_bit(
    part: str, tiny_recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = {**tiny_recipe["model"]["new"], "experts": 4, "mlp_width": 16}
    tiny_recipe["model"] = {"new": new, "lora": {"rank": 2, "targets": ["q_proj", "experts"]}}
    if part == "biases of routers":
        tiny_recipe["model"] = {"path": str(write_glm(tmp_path / "glm")), "routers": {"bias": 0.01}}
    rl = {**tiny_recipe["stage"][1], "steps": 3, "engine": {"numerics": "exact"}}
    table = {**tiny_recipe, "checkpoint": {"every": 1, "keep": 4}, "stage": [{"kind": "sft", "steps": 1}, rl]}
    recipe, run = write_recipe(tmp_path, table), tmp_path / "run"
    expected = identity(training.train(recipe, run=run))
    whole = any(name.endswith("/model.safetensors") for name in expected["files"])
    assert whole == (part == "biases of routers")
    with RunReader(run) as reader:
        assert {point.value for point in reader.metric("mismatch/logp_abs_max")} == {0.0}
    run.rename(tmp_path / "alone")
    interrupted(recipe, run, Interrupter(1, 2), monkeypatch)
    actual = identity(training.train(recipe, run=run, resume=True))
    assert actual["files"] == expected["files"]
    assert actual["records"] == expected["records"]


@pytest.mark.heavy
def test_a_resume_that_forgets_what_a_reward_has_learned_is_seen(
    tiny_recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutation: a discriminator that starts anew when its stage goes on."""
    table = every_stage(tiny_recipe)
    table["stage"] = [{"kind": "sft", "steps": 1}, {**table["stage"][8], "steps": 3}]
    recipe, run = write_recipe(tmp_path, table), tmp_path / "run"
    expected = identity(training.train(recipe, run=run))
    run.rename(tmp_path / "alone")
    monkeypatch.setattr(CompositeReward, "load", lambda self, folder: None)
    interrupted(recipe, run, Interrupter(1, 3), monkeypatch)
    assert identity(training.train(recipe, run=run, resume=True))["files"] != expected["files"]


@pytest.mark.heavy
@pytest.mark.parametrize("model", [{}, {"lora": {"rank": 4}}], ids=["whole", "lora"])
def test_a_chain_of_all_stages_killed_again_and_again_ends_like_one_that_was_left_alone(
    model: dict[str, Any], tiny_recipe: dict[str, Any], tmp_path: Path
) -> None:
    table = every_stage(tiny_recipe)
    table["model"] |= model
    recipe = write_recipe(tmp_path, table)
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    finish(start(recipe, killed, resume=False))
    expected = identity(killed)
    killed.rename(alone)  # the other run has its place: an adapter records where its model lies
    random_ = random.Random(1)
    for _ in range(2 * KILLS):
        kill_somewhere(start(recipe, killed, resume=killed.exists()), killed, random_)
    finish(start(recipe, killed, resume=True))
    actual = identity(killed)
    assert actual["files"] == expected["files"]
    assert actual["ledger"] == expected["ledger"]
    assert actual["records"] == expected["records"]


@pytest.mark.heavy
def test_a_run_killed_ten_times_ends_like_one_that_was_left_alone(tiny_recipe: dict[str, Any], tmp_path: Path) -> None:
    tiny_recipe["checkpoint"] = {"every": 1, "keep": 2}
    tiny_recipe["evaluation"] = {"samples": 2, "temperature": 0.7, "reward": [{"kind": "exact"}]}
    recipe = write_recipe(tmp_path, tiny_recipe)
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    finish(start(recipe, alone, resume=False))
    random_ = random.Random(0)
    for number in range(KILLS):
        aimed = INSTANTS_OF_A_WRITE[number] if number < len(INSTANTS_OF_A_WRITE) else ""
        process = start(recipe, killed, resume=killed.exists(), killed_in=aimed)
        if not aimed:
            kill_somewhere(process, killed, random_)
            continue
        output, _ = process.communicate(timeout=DEADLINE_SECONDS)
        assert process.returncode == -signal.SIGKILL, output.decode()
        assert list((killed / "checkpoints").glob("*/.tmp-step-*")), f"the kill in {aimed} met no write"
    finish(start(recipe, killed, resume=True))
    expected, actual = identity(alone), identity(killed)
    assert actual["files"] == expected["files"]
    assert actual["ledger"] == expected["ledger"]
    assert actual["records"] == expected["records"]
    with RunReader(killed) as reader:
        audited = {(audit.stage, audit.step) for audit in reader.audits()}
    assert audited == {(0, 0), (0, 6), (1, 0), (1, 3), (1, 6), (1, 8)}


@pytest.mark.heavy
def test_the_identity_sees_a_single_changed_weight(tiny_recipe: dict[str, Any], tmp_path: Path) -> None:
    """The mutation: without it, the comparison above could be blind."""
    for stage in tiny_recipe["stage"]:
        stage["steps"] = 1
    finish(start(write_recipe(tmp_path, tiny_recipe), tmp_path / "a", resume=False))
    before = identity(tmp_path / "a")
    weights = next((tmp_path / "a" / "checkpoints").glob("1-rl/step-1/model.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(bytes(content))
    assert identity(tmp_path / "a")["files"] != before["files"]


@pytest.mark.heavy
def test_another_seed_is_another_run(tiny_recipe: dict[str, Any], tmp_path: Path) -> None:
    """And the same is the same: that is what everything above compares."""
    identities = []
    for name, seed in (("a", 0), ("b", 1)):
        tiny_recipe["seed"] = seed
        (tmp_path / name).mkdir()
        recipe = write_recipe(tmp_path / name, tiny_recipe)
        finish(start(recipe, tmp_path / name / "run", resume=False))
        identities.append(json.dumps(identity(tmp_path / name / "run"), sort_keys=True))
    assert identities[0] != identities[1]


@pytest.mark.heavy
def test_a_run_that_chooses_its_prompts_survives_kills_as_if_there_had_been_none(
    tiny_recipe: dict[str, Any], tmp_path: Path
) -> None:
    """All choosers at once: what they know is in the checkpoint, or the ledgers differ."""
    letters = {"min_letters": 1, "max_letters": 2}
    stage = {**tiny_recipe["stage"][1], "steps": 10, "evaluation": {"every": 0}}
    table = {
        **tiny_recipe,
        "train": [
            {"generator": "spell_backward", "seed": 1, "size": 6, "options": letters},
            {"generator": "rearrange", "seed": 1, "size": 4, "options": {"min_letters": 2, "max_letters": 2}},
        ],
        "data": {
            "choose": [
                {"name": "no_positive_resampling", "threshold": 0.3},
                {"name": "band", "low": 0.02, "high": 0.2},
                {"name": "pools", "easy_from": 0.1, "hard_to": 0.01},
                "adaptive_sources",
            ]
        },
        "checkpoint": {"every": 1, "keep": 2},
        "stage": [stage],
    }
    recipe = write_recipe(tmp_path, table)
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    finish(start(recipe, alone, resume=False))
    random_ = random.Random(2)
    for _ in range(3):
        kill_somewhere(start(recipe, killed, resume=killed.exists()), killed, random_)
    finish(start(recipe, killed, resume=True))
    expected, actual = identity(alone), identity(killed)
    assert actual["ledger"] == expected["ledger"]
    assert actual["records"] == expected["records"]
    assert actual["files"] == expected["files"]
    with RunReader(killed) as reader:
        skipped = [point.value for point in reader.metric("data/skipped_share")]
    assert any(skipped), "or nothing was chosen"
