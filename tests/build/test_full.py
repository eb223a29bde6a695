"""A full GPU is explained by the phase it was full in, with a key that exists, helps there and is not at its least."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from temper.build import full as build_full
from temper.build import plan as build_plan
from temper.build import trainer as build_trainer
from temper.build.full import LESS, explain_out_of_memory
from temper.build.memory import workload_of
from temper.build.stage import Stage
from temper.build.warm import warm_engine
from temper.commands.training.train import train_stages
from temper.config import RunConfig
from temper.config.memory import CPU_CHOICE, with_choice
from temper.engine.local.runner import Runner
from temper.errors import BackendError, OutOfMemory
from temper.planning.workload import Workload
from temper.trainer.policy_step import PolicyStep
from temper.trainer.ranks.channel import Failure, RankFailure
from tests.build.conftest import with_keys
from tests.planning.conftest import MakeWorkload

GIB = 2**30


@pytest.mark.parametrize("where", ["loading", "recording", "trainer", "engine"])
def test_a_full_gpu_is_explained_and_the_run_goes_on_after(
    where: str, config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = with_keys(config, "steps=4", "checkpoint.every=1")
    gradient, decode, load, count = PolicyStep.gradient, Runner.decode, build_trainer.load_models, [0]

    def full_load(*arguments: Any) -> Any:
        count[0] += 1
        if count[0] == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.00 GiB")
        return load(*arguments)

    def full_gradient(self: PolicyStep, *arguments: Any, **options: Any) -> Any:
        count[0] += 1
        if count[0] == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.00 GiB")
        return gradient(self, *arguments, **options)

    def full_decode(self: Runner, *arguments: Any) -> Any:
        count[0] += 1
        if count[0] == 20:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.00 GiB")
        return decode(self, *arguments)

    def full_recordings(*arguments: Any) -> Any:
        count[0] += 1
        return [full_recording] if count[0] == 1 else []

    def full_recording() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.00 GiB")

    async def warm_as_on_a_gpu(stage: Stage, first_step: int) -> None:
        work = workload_of(stage.config, stage.objective, stage.data, stage.origin)
        await warm_engine(stage, work)

    if where == "loading":
        monkeypatch.setattr(build_trainer, "load_models", full_load)
    elif where == "recording":
        monkeypatch.setattr(build_plan, "warm_up", warm_as_on_a_gpu)
        monkeypatch.setattr(Runner, "recordings", full_recordings)
    elif where == "trainer":
        monkeypatch.setattr(PolicyStep, "gradient", full_gradient)
    else:
        monkeypatch.setattr(Runner, "decode", full_decode)
    with pytest.raises(BackendError) as found:
        train_stages([short], run=tmp_path / "run")
    said = str(found.value)
    phase, key = {
        "loading": ("loading", "Set engine.kv_tokens = "),
        "recording": ("rollout", "Set engine.kv_tokens = "),
        "trainer": ("forward_backward", "Set model.gradient_checkpointing = true; then"),
        "engine": ("rollout", "Set engine.kv_tokens = "),
    }[where]
    assert f"out of memory in {phase}: CUDA out of memory. Tried to allocate 7.00 GiB" in said
    assert "Planned were" in said
    assert key in said
    assert "--resume" in said
    train_stages([short], run=tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "checkpoints" / "0-rl" / "step-4").is_dir()
    stored = tomllib.loads((tmp_path / "run" / "config.toml").read_text())["stage"][0]
    assert stored["trainer"]["tokens_per_microbatch"] == 8192
    assert stored["optim"]["states"] == "float32"


def test_a_full_gpu_of_another_rank_is_explained_too(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_gradient(*arguments: Any, **options: Any) -> Any:
        report = "Traceback (most recent call last):\ntorch.OutOfMemoryError: CUDA out of memory. Tried 7 GiB"
        raise RankFailure(Failure(1, report, full_in="forward_backward"), "step", 2) from RuntimeError("gloo: closed")

    monkeypatch.setattr(PolicyStep, "gradient", full_gradient)
    with pytest.raises(BackendError) as found:
        train_stages([with_keys(config, "steps=1")], run=tmp_path / "run")
    said = str(found.value)
    assert "out of memory in forward_backward: trainer rank 1 of 2: torch.OutOfMemoryError: CUDA out of memory" in said
    assert "Planned were" in said
    assert "Set model.gradient_checkpointing = true; then go on with --resume" in said


def advice(phase: str, work: Workload) -> list[str]:
    return [said for less in LESS[phase] if (said := less(work))]


def test_a_full_engine_is_told_of_its_cache_and_passes_alone(make_workload: MakeWorkload) -> None:
    work = make_workload("1.5b")
    half = work.choice.kv_tokens // 2
    said = [f"Set engine.kv_tokens = {half}", "Set engine.tokens_per_step = 2048", "Set engine.max_running = 128"]
    assert advice("rollout", work) == said
    least = replace(work, choice=replace(work.choice, kv_tokens=work.row_tokens + 1), tokens_per_step=16)
    assert advice("rollout", least) == ["Set engine.max_running = 128"], "a pass has a token of each of them"
    least = replace(least, max_running=16)
    assert advice("rollout", least) == []
    apart = replace(work, engine="apart")
    assert advice("rollout", apart) == advice("rollout", work)
    assert not any("kv_tokens" in said for said in advice("forward_backward", apart)), "another GPU"


def test_a_full_backward_pass_is_told_of_microbatches_then_of_recomputing_then_of_states(
    make_workload: MakeWorkload,
) -> None:
    work = make_workload("1.5b", microbatch=16384)
    said = advice("forward_backward", work)
    assert said[:2] == ["Set trainer.tokens_per_microbatch = 8192", "Set model.gradient_checkpointing = true"]
    assert said[2] == "Set optim.offload = true (with 14.4 GiB of the memory of each host)"
    assert said[3].startswith("Set engine.kv_tokens = ")
    assert advice("critic", work) == said
    few = replace(work, rows_per_update=10, choice=replace(work.choice, tokens_per_microbatch=65536))
    assert advice("forward_backward", few)[0] == f"Set trainer.tokens_per_microbatch = {10 * work.row_tokens // 2}"
    long = replace(work, completion_tokens=20000)
    assert advice("forward_backward", long)[0] == "Set model.gradient_checkpointing = true", "one row is in one"
    least = replace(long, offload=True, choice=replace(long.choice, gradient_checkpointing=True))
    assert advice("forward_backward", least)[0] == 'Set model.gradient_checkpointing = "offload"'
    nothing = replace(least, engine="elsewhere", choice=replace(long.choice, gradient_checkpointing="offload"))
    assert advice("forward_backward", nothing) == []


def test_passes_without_a_gradient_are_not_told_to_recompute(make_workload: MakeWorkload) -> None:
    work = make_workload("1.5b", frozen=(make_workload("1.5b").shape,))
    said = advice("scoring", work)
    assert said[:2] == ["Set trainer.tokens_per_microbatch = 8192", "Set model.offload = true"]
    assert not any("gradient_checkpointing" in each for each in said)
    for phase in LESS:
        assert "Set model.offload = true" not in advice(phase, replace(work, parts=True)), "refused with parts"
        assert "Set model.offload = true" not in advice(phase, replace(work, offload_frozen=True))


def test_a_full_update_is_told_of_states(make_workload: MakeWorkload, monkeypatch: pytest.MonkeyPatch) -> None:
    work = make_workload("1.5b")
    assert advice("optimizer", work)[0].startswith("Set optim.offload = true")
    assert advice("optimizer", replace(work, offload=True))[0].startswith("Set engine.kv_tokens = ")
    monkeypatch.setattr(build_full, "free_host_bytes", lambda: GIB)
    assert "offload" not in " ".join(advice("optimizer", work)), "the host has no room"
    assert advice("optimizer", replace(work, trains=False))[0].startswith("Set engine.kv_tokens = ")


@pytest.mark.parametrize("phase", ["loading", "rollout", "forward_backward", "critic", "optimizer", "reference"])
def test_every_key_that_is_named_can_be_set(
    phase: str,
    config: RunConfig,
    opened: Callable[..., Any],
) -> None:
    """What is named is set until nothing is left to say: it ends, and every value is taken."""
    lines = ('objective.regularizers=[{name="kl", coefficient=0.1, estimator="k3"}]', "rollout.groups_per_step=900")
    changed = with_choice(with_keys(config, *lines), CPU_CHOICE)
    keys = []
    for _ in range(30):  # every one of them is halved
        parts = opened(changed)
        with pytest.raises(BackendError) as found, explain_out_of_memory(changed, *parts):
            raise OutOfMemory(phase, "CUDA out of memory")
        named = re.search(r"Set ([a-z_.]+) = (\S+?)[; ]", str(found.value))
        if named is None:
            assert "Use a smaller model, shorter rows or a larger GPU; then go on with --resume" in str(found.value)
            break
        keys.append(named[1])
        changed = with_keys(changed, f"{named[1]}={named[2]}")
        assert workload_of(changed, *parts) != workload_of(config, *parts)
    else:
        pytest.fail(f"it does not end: {keys}")
    assert keys
