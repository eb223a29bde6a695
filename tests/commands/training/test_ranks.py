"""Several trainer processes are one run: the same rows, the same weights, and nobody is left behind."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from temper.cluster.ranks import ALONE, Place
from temper.commands.training import ranks as led
from temper.commands.training import train as training
from temper.config import resolve, to_toml
from temper.config.cluster import ClusterConfig
from temper.errors import UserError
from temper.runs.reader import RunReader
from temper.trainer.ranks.channel import Failure, RankFailure

ROOT = Path(__file__).parents[3]
SECONDS = 900.0
SAMPLER = b"temper.cluster.sampler_main"
IN_PROCESS = {"place": "process", "numerics": "exact", "threads": 1}


def make_table(recipe: dict[str, Any], *, steps: tuple[int, int] = (4, 3), **cluster: Any) -> dict[str, Any]:
    stages = [{**stage, "steps": own} for stage, own in zip(recipe["stage"], steps, strict=True)]
    numerics = "fast" if "tensor" in cluster else "exact"  # slices never have the bits of a sampler
    engine = {**(IN_PROCESS if cluster.get("parts") else {}), "numerics": numerics}
    return {**recipe, "checkpoint": {"every": 1}, "cluster": cluster, "engine": engine, "stage": stages}


def run(table: dict[str, Any], folder: Path) -> dict[str, torch.Tensor]:
    """The last weights of a run in this process, which leads its ranks."""
    training.train_stages(resolve(table, (), where="test"), run=folder)
    return weights_of(folder)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    with RunReader(folder) as reader:
        assert reader.is_finished
    last = max((folder / "checkpoints").glob("1-rl/step-*"), key=lambda path: int(path.name.removeprefix("step-")))
    return load_file(next(last.glob("*model.safetensors")))


def digest(weights: dict[str, torch.Tensor]) -> str:
    parts = (weights[name].numpy().tobytes() for name in sorted(weights))
    return hashlib.sha256(b"".join(parts)).hexdigest()


def gap(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max((ours[name] - theirs[name]).abs().max().item() for name in ours)


def test_two_trainers_train_what_one_trains(tiny_recipe: dict[str, Any], tmp_path: Path) -> None:
    """One microbatch in all is made two: a trainer without work would be of no use."""
    alone = run(make_table(tiny_recipe), tmp_path / "alone")
    together = run(make_table(tiny_recipe, trainers=2), tmp_path / "together")
    assert 0 < gap(together, alone) < 1e-5
    assert not torch.distributed.is_initialized()
    for name in ("alone", "together"):
        with RunReader(tmp_path / name) as reader:
            assert len(reader.query("SELECT 1 FROM steps")) == 7


def make_learnable(recipe: dict[str, Any], cluster: dict[str, Any]) -> dict[str, Any]:
    """Spelling of two letters, half learned by imitation, which practice makes better within seconds."""
    recipe["heldout"] |= {"size": 128}
    sft, rl = recipe["stage"]
    stages = [
        {**sft, "steps": 60, "optim": {"learning_rate": 1e-2}, "trainer": {"examples_per_step": 32}},
        {**rl, "steps": 20, "optim": {"learning_rate": 4e-3}, "rollout": {"groups_per_step": 16, "group_size": 8}},
    ]
    stages[1]["evaluation"] = {"samples": 2}
    # In exact mode it is the same run every time: no luck decides.
    return {**recipe, "checkpoint": {"every": 100}, "cluster": cluster, "engine": IN_PROCESS, "stage": stages}


def require_learned(folder: Path) -> None:
    """The interval of the sampled held-out score after practice lies above that before it."""
    with RunReader(folder) as reader:
        assert reader.is_finished
        scores = {each.step: each for each in reader.evaluations() if (each.stage, each.name) == (1, "sampled")}
    before, after = scores[0], scores[20]
    assert after.low > before.high, (before, after)


@pytest.mark.heavy
def test_two_trainers_and_two_samplers_learn(tiny_recipe: dict[str, Any], tmp_path: Path) -> None:
    cluster = {"trainers": 2, "samplers": 2}
    training.train_stages(resolve(make_learnable(tiny_recipe, cluster), (), where="test"), run=tmp_path / "run")
    require_learned(tmp_path / "run")


@pytest.mark.heavy
@pytest.mark.parametrize("parts", [False, True], ids=["copies", "parts"])
def test_three_trainers_with_uneven_shares_train_what_one_trains(
    tiny_recipe: dict[str, Any], tmp_path: Path, parts: bool
) -> None:
    """Several microbatches a step, other numbers of them on every rank; sums in another order."""
    tiny_recipe["stage"][0]["trainer"] |= {"tokens_per_microbatch": 24}
    tiny_recipe["stage"][1]["trainer"] = {"tokens_per_microbatch": 48}
    alone = run(make_table(tiny_recipe), tmp_path / "alone")
    together = run(make_table(tiny_recipe, trainers=3, parts=parts), tmp_path / "together")
    assert 0 < gap(together, alone) < 1e-5
    # Every row is traced, whoever trained it.
    with RunReader(tmp_path / "alone") as ours, RunReader(tmp_path / "together") as theirs:
        assert ours.fingerprint().keys() == theirs.fingerprint().keys()


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("before", "after"),
    [((2, True), (3, True)), ((2, True), (1, False)), ((1, False), (3, True))],
    ids=["two parts, three", "two parts, one", "one, three parts"],
)
def test_a_checkpoint_goes_on_with_another_number_of_trainers(
    tiny_recipe: dict[str, Any], tmp_path: Path, before: tuple[int, bool], after: tuple[int, bool]
) -> None:
    whole = run(make_table(tiny_recipe), tmp_path / "whole")
    half = make_table(tiny_recipe, steps=(4, 1), trainers=before[0], parts=before[1])
    run(half, tmp_path / "run")
    rest = make_table(tiny_recipe, trainers=after[0], parts=after[1])
    (tmp_path / "run" / "config.toml").write_text(to_toml(resolve(rest, (), where="test")))
    training.train_stages(resolve(rest, (), where="test"), run=tmp_path / "run", resume=True)
    resumed = weights_of(tmp_path / "run")
    assert gap(resumed, whole) < 1e-5
    assert drawn(tmp_path / "run") == drawn(tmp_path / "whole"), "the same prompts, once each, and the same draws"


def drawn(folder: Path) -> list[tuple[Any, ...]]:
    """Which groups were taken by which step, and every token that was drawn for them."""
    with RunReader(folder) as reader:
        ledger = reader.query("SELECT * FROM ledger ORDER BY 1, 2, 3")
        tokens = reader.query(
            "SELECT stage, step, group_id, member, row, token_ids FROM token_rows ORDER BY 1, 2, 3, 4, 5"
        )
    assert ledger
    assert tokens
    return [tuple(row.values()) for row in (*ledger, *tokens)]


@pytest.mark.parametrize(
    ("new", "cluster", "message"),
    [
        ({}, {"trainers": 3}, "3 trainers do not divide into such groups"),
        ({}, {"trainers": 1}, "1 trainers do not divide into such groups"),
        pytest.param(
            {"heads": 3, "kv_heads": 3, "width": 48}, {"trainers": 2}, "do not divide over 2", marks=pytest.mark.heavy
        ),
        pytest.param({"experts": 4}, {"trainers": 2}, "is a model with experts. Use", marks=pytest.mark.heavy),
        ({}, {"trainers": 3, "context": 1, "tensor": 2, "parts": True}, "cluster.tensor=2: 3 trainers do not divide"),
    ],
)
def test_rows_that_trainers_cannot_go_over_together_are_refused(
    tiny_recipe: dict[str, Any], tmp_path: Path, new: dict[str, int], cluster: dict[str, int], message: str
) -> None:
    tiny_recipe["model"]["new"] |= new
    with pytest.raises(UserError, match=message):
        run(make_table(tiny_recipe, **{"context": 2, **cluster}), tmp_path / "run")


MUCH = {
    "critic and epochs": {"objective": {"preset": "ppo"}, "trainer": {"epochs": 2, "tokens_per_microbatch": 48}},
    "moving reference and states in bfloat16": {
        "objective": {"preset": "prorl", "reference": {"name": "soft_update", "mix": 0.25, "every": 1}},
        "optim": {"learning_rate": 1e-3, "states": "bfloat16", "offload": True},
    },
    "experts, their routes and their losses": {
        "new": {"experts": 4, "mlp_width": 24},
        "model": {"replay_routes": True, "routers": {"balance": 0.01}},
        "objective": {"preset": "rspo"},
    },
    "experts that stay where they are": {
        "new": {"experts": 6, "mlp_width": 24},
        "cluster": {"experts": True},
        "objective": {"preset": "prorl", "reference": {"name": "soft_update", "mix": 0.25, "every": 1}},
    },
    "rows that two go over together": {"cluster": {"context": 2}, "objective": {"preset": "grpo"}},
    "layers that two compute together": {
        "new": {"kv_heads": 2},
        "cluster": {"tensor": 2},
        "objective": {"preset": "prorl", "reference": {"name": "soft_update", "mix": 0.25, "every": 1}},
    },
    "an adapter": {"model": {"lora": {"rank": 3}}, "objective": {"preset": "grpo"}},
    "an adapter and a moving reference": {
        "model": {"lora": {"rank": 3}},
        "objective": {"preset": "prorl", "reference": {"name": "soft_update", "mix": 0.25, "every": 1}},
    },
}
"""What stands beside a policy and is cut, too. new: of the model; cluster: of its table."""


@pytest.mark.heavy
@pytest.mark.parametrize("much", MUCH)
def test_all_that_stands_beside_a_policy_is_cut_and_goes_on_from_its_checkpoint(
    tiny_recipe: dict[str, Any], tmp_path: Path, much: str
) -> None:
    """Two with parts, half of it, and then three: the weights of one process that did it all."""
    tiny_recipe["model"]["new"] |= MUCH[much].get("new", {})
    tiny_recipe["stage"][1] |= {key: value for key, value in MUCH[much].items() if key not in ("new", "cluster")}
    parts = {"parts": True, **MUCH[much].get("cluster", {})}
    whole = run(make_table(tiny_recipe, steps=(2, 4)), tmp_path / "whole")
    run(make_table(tiny_recipe, steps=(2, 2), trainers=2, **parts), tmp_path / "run")
    more = 4 if {"context", "tensor"} & parts.keys() else 3  # groups of two
    rest = resolve(make_table(tiny_recipe, steps=(2, 4), trainers=more, **parts), (), where="test")
    (tmp_path / "run" / "config.toml").write_text(to_toml(rest))
    training.train_stages(rest, run=tmp_path / "run", resume=True)
    limit = 1e-4 if "states" in much else 1e-5  # rounding at random: other bits on other ranks
    assert gap(weights_of(tmp_path / "run"), whole) < limit


# Runs in processes of their own, which die.


def start(
    table: dict[str, Any], folder: Path, launcher: tuple[str, ...] = (), more: tuple[str, ...] = (), **environment: str
) -> subprocess.Popen[str]:
    recipe = folder.parent / "recipe.toml"
    recipe.write_text(to_toml(resolve(table, (), where="test")))
    command = [sys.executable, *(launcher or ("-m", "temper")), "train", str(recipe), "--run", str(folder), *more]
    return subprocess.Popen(
        command,
        cwd=folder.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def end_of(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        said, _ = process.communicate(timeout=SECONDS)
        return process.returncode, said
    finally:
        process.kill()


def ranks_of(process: subprocess.Popen[str], module: bytes = b"temper.commands.training.ranks") -> list[int]:
    """Processes of trainer ranks, or of others, that this run started."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command, status = (entry / "cmdline").read_bytes(), (entry / "stat").read_text()
        except OSError:
            continue
        parent, state = int(status.rpartition(")")[2].split()[1]), status.rpartition(")")[2].split()[0]
        if module in command and parent == process.pid and state != "Z":
            found.append(int(entry.name))
    return found


def wait_for(found: Any, what: str) -> Any:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        if value := found():
            return value
        time.sleep(0.02)
    raise AssertionError(f"{what} did not come")


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("number", "parts"), [(signal.SIGKILL, False), (signal.SIGSTOP, True)], ids=["a copy killed", "a part stopped"]
)
def test_when_a_trainer_is_lost_all_begin_anew_by_themselves(
    tiny_recipe: dict[str, Any], tmp_path: Path, number: signal.Signals, parts: bool
) -> None:
    table = make_table(tiny_recipe, steps=(30, 3), trainers=2, parts=parts, rank_seconds=20)
    undisturbed = run(table, tmp_path / "undisturbed")
    process = start(table, tmp_path / "run")
    (rank,) = wait_for(lambda: ranks_of(process), "a second trainer")
    wait_for(lambda: (tmp_path / "run/checkpoints/0-sft/step-3").is_dir(), "a checkpoint")
    os.kill(rank, number)
    code, said = end_of(process)
    assert code == 0, said
    assert "All trainers begin anew from the last checkpoint" in re.sub(r"\s+", " ", said)
    assert digest(weights_of(tmp_path / "run")) == digest(undisturbed)
    assert not is_alive(rank)


LEFT_ALONE: dict[str, str] = {}


def digest_left_alone(table: dict[str, Any], folder: Path) -> str:
    """Computed once for all tests that ask for the same."""
    key = to_toml(resolve(table, (), where="test"))
    if key not in LEFT_ALONE:
        LEFT_ALONE[key] = digest(run(table, folder))
    return LEFT_ALONE[key]


def make_split_table(recipe: dict[str, Any]) -> dict[str, Any]:
    """Two trainers and a sampler process."""
    return make_table(recipe, steps=(2, 14), trainers=2) | {"engine": IN_PROCESS}


@pytest.mark.heavy
def test_a_sampler_stays_when_all_trainers_begin_anew(tiny_recipe: dict[str, Any], tmp_path: Path) -> None:
    """It is stale until the new trainers feed it: had it drawn before, the bits would be others."""
    table = make_split_table(tiny_recipe)
    expected = digest_left_alone(table, tmp_path / "alone")
    process = start(table, tmp_path / "run")
    wait_for(lambda: (tmp_path / "run/checkpoints/1-rl/step-2").is_dir(), "a checkpoint")
    (sampler,) = ranks_of(process, SAMPLER)
    (rank,) = ranks_of(process)
    os.kill(rank, signal.SIGKILL)
    wait_for(lambda: [pid for pid in ranks_of(process) if pid != rank], "another trainer")
    wait_for(lambda: (tmp_path / "run/checkpoints/1-rl/step-6").is_dir(), "a checkpoint of its")
    assert ranks_of(process, SAMPLER) == [sampler]
    code, said = end_of(process)
    assert code == 0, said
    assert digest(weights_of(tmp_path / "run")) == expected
    assert not is_alive(sampler)


@pytest.mark.heavy
def test_without_restarts_a_lost_trainer_ends_the_run_and_names_it(tiny_recipe: dict[str, Any], tmp_path: Path) -> None:
    process = start(make_table(tiny_recipe, steps=(30, 3), trainers=2, max_restarts=0), tmp_path / "run")
    (rank,) = wait_for(lambda: ranks_of(process), "a second trainer")
    wait_for(lambda: (tmp_path / "run/checkpoints/0-sft/step-3").is_dir(), "a checkpoint")
    os.kill(rank, signal.SIGKILL)
    code, said = end_of(process)
    assert code == 3, said
    assert "trainer rank 1 of 2 was lost in" in said
    assert "SIGKILL" in said
    assert "--resume" in said


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of a few megabytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False) if shutil.which("mount") else None
    if done is None or done.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {done and done.stderr}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.heavy
def test_a_disk_that_fills_ends_a_run_in_order_and_with_room_it_goes_on(
    tiny_recipe: dict[str, Any], small_disk: Path
) -> None:
    """To the bits of one left alone, as every resumed run: test_resume.py."""
    table = make_split_table(tiny_recipe)
    process = start(table, small_disk / "run")
    wait_for(lambda: (small_disk / "run/checkpoints/1-rl/step-2").is_dir(), "a checkpoint")
    others = [*ranks_of(process), *ranks_of(process, SAMPLER)]
    filler = small_disk / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    code, said = end_of(process)
    assert code == 2, said
    said = re.sub(r"\s+", " ", said)
    assert re.search(r"disk full while (writing|saving) .*/run/(run\.db|checkpoints/1-rl/step-)", said), said
    assert re.search(r"nothing is lost up to the last checkpoint, \S*/run/checkpoints/1-rl/step-\d+\.", said), said
    assert re.search(r"go on with --resume: .*train .*--run .* --resume", said), said
    assert len(others) == 2
    assert not any(map(is_alive, others))
    filler.unlink()
    code, said = end_of(start(table, small_disk / "run", more=("--resume",)))
    assert code == 0, said


@pytest.mark.heavy
def test_no_trainer_outlives_the_first(tiny_recipe: dict[str, Any], tmp_path: Path) -> None:
    process = start(make_table(tiny_recipe, steps=(60, 3), trainers=3), tmp_path / "run")
    found = wait_for(lambda: ranks if len(ranks := ranks_of(process)) == 2 else None, "two more trainers")
    wait_for(lambda: (tmp_path / "run/checkpoints/0-sft/step-3").is_dir(), "a checkpoint")
    process.kill()
    process.wait(timeout=30)
    wait_for(lambda: not any(map(is_alive, found)), "the end of the other trainers")


@pytest.mark.heavy
def test_torchrun_makes_one_run(tiny_recipe: dict[str, Any], tmp_path: Path) -> None:
    alone = run(make_table(tiny_recipe), tmp_path / "alone")
    # "--": else torchrun takes --run for an option of its own.
    launcher = ("-m", "torch.distributed.run", "--nproc_per_node=2", "-m", "--", "temper")
    code, said = end_of(start(make_table(tiny_recipe), tmp_path / "run", launcher))
    assert code == 0, said
    assert gap(weights_of(tmp_path / "run"), alone) < 1e-5
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("run")] == ["run"]
    assert said.count("final weights") == 1, "one process reports"


@pytest.mark.heavy
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["interrupted", "a rank killed"])
def test_under_torchrun_no_rank_waits_for_one_that_has_gone(
    tiny_recipe: dict[str, Any], tmp_path: Path, number: signal.Signals
) -> None:
    """torchrun would kill a rank that waits for half a minute after all others have ended."""
    launcher = ("-m", "torch.distributed.run", "--nproc_per_node=2", "-m", "--", "temper")
    process = start(make_table(tiny_recipe, steps=(200, 3)), tmp_path / "run", launcher)
    wait_for(lambda: (tmp_path / "run/checkpoints/0-sft/step-3").is_dir(), "a checkpoint")
    led = ranks_of(process, b"temper")
    assert len(led) == 2
    if number is signal.SIGINT:
        os.kill(process.pid, number)
        begin = time.monotonic()
        end_of(process)
        assert time.monotonic() - begin < 25
    else:
        os.kill(led[1], number)
        code, said = end_of(process)
        assert code != 0
        with RunReader(tmp_path / "run") as reader:
            events = " ".join(row["text"] for row in reader.query("SELECT text FROM events"))
        assert "trainer rank 1 of 2 was lost" in events, said
    wait_for(lambda: not any(map(is_alive, led)), "the end of all ranks")


@pytest.mark.heavy
def test_the_rank_that_fails_is_named_with_its_traceback_first(tiny_recipe: dict[str, Any], tmp_path: Path) -> None:
    """A reward is the driver's; what breaks on a rank alone here is its memory: a planted error in its own passes."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if os.environ.get('RANK') == '1':\n"
        "    import temper.trainer.policy_step as step\n"
        "    def broken(*_, **__):\n"
        "        raise ValueError('planted in rank 1')\n"
        "    step.PolicyStep.gradient = broken\n"
    )
    table = make_table(tiny_recipe, trainers=2)
    process = start(table, tmp_path / "run", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    code, said = end_of(process)
    assert code == 3, said
    assert "trainer rank 1 of 2 failed in step" in said
    first = said.index("planted in rank 1")
    assert "gloo" not in said[:first], "the cause comes first, not what it led to"


# What is refused, and who a process is.


@pytest.mark.parametrize(
    ("place", "wanted", "world"), [(Place(0, 1, 0), 3, 3), (Place(0, 2, 0), 1, 2), (Place(1, 4, 1), 4, 4)]
)
def test_how_many_there_are(place: Place, wanted: int, world: int) -> None:
    assert led._require_number(place, wanted) == world


def test_a_launcher_that_started_others_than_the_recipe_asks_for_is_refused() -> None:
    with pytest.raises(UserError, match=r"cluster.trainers=3, and 2 processes were started"):
        led._require_number(Place(0, 2, 0), 3)


@pytest.mark.parametrize(
    ("cluster", "place", "message"),
    [
        ({"place": "torchrun"}, ALONE, r'"torchrun", and no launcher started this process: torchrun --nproc_per_node'),
        ({"place": "processes"}, Place(0, 2, 0), r'"processes", and a launcher started 2 processes'),
        ({"place": "ray"}, Place(0, 2, 0), r'"ray", and a launcher started 2 processes'),
        ({"address": "auto"}, Place(0, 2, 0), r'"auto" with an address of Ray, and a launcher started 2 processes'),
    ],
)
def test_a_recipe_that_says_where_it_runs_is_refused_elsewhere(
    cluster: dict[str, str], place: Place, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        led._require_place(place, ClusterConfig.model_validate(cluster))


def test_a_recipe_runs_where_it_says_and_by_itself_wherever_it_is_started() -> None:
    for place in ("auto", "processes", "ray"):
        led._require_place(ALONE, ClusterConfig(place=place))
    for place in ("auto", "torchrun"):
        led._require_place(Place(0, 2, 0), ClusterConfig(place=place))
    led._require_place(Place(0, 1, 0), ClusterConfig(place="torchrun"))  # torchrun --nproc_per_node 1
    led._require_place(Place(0, 1, 0), ClusterConfig(place="processes"))
    assert ClusterConfig(address="auto").is_on_ray
    assert not ClusterConfig().is_on_ray


def test_one_of_several_processes_that_does_not_know_which_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"2 processes were started"):
        led.follow_if_started_so()


def test_tasks_of_a_job_step_that_do_not_say_where_rank_0_is_are_no_run_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    with pytest.raises(UserError, match=r"SLURM_STEP_NUM_TASKS=4: 4 processes .* srun with MASTER_ADDR"):
        led.follow_if_started_so()
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    led.follow_if_started_so()


@pytest.mark.parametrize(("is_launched", "runs"), [(True, 1), (False, 3)])
def test_ranks_that_a_launcher_started_are_left_to_it_when_one_is_lost(
    is_launched: bool, runs: int, tiny_recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried, place = [], Place(0, 2, 0, is_launched=is_launched)

    def lose(*_: Any) -> None:
        tried.append(1)
        raise RankFailure(Failure(1, "it was killed", True), "a step", 2)

    monkeypatch.setattr(training, "find_place", lambda environment: place)
    monkeypatch.setattr(training, "_run_with_trainers", lose)
    table = make_table(tiny_recipe, trainers=2)
    stages = resolve(table | {"cluster": table["cluster"] | {"max_restarts": 2}}, (), where="test")
    with pytest.raises(RankFailure):
        training.train_stages(stages, run=tmp_path / "run")
    assert len(tried) == runs


def test_parts_of_one_trainer_are_refused(tiny_recipe: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cluster.parts shares weights out over trainers, and there is one"):
        run(make_table(tiny_recipe, parts=True), tmp_path / "run")
