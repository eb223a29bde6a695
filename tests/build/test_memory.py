"""On a CPU "auto" is what the defaults were; on a GPU what fits; a run remembers it; a full GPU is explained."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from temper.build import memory as build_memory
from temper.build.check import check_stage
from temper.build.memory import PlanRequest, explain_misfit, plan_stage, settle, workload_of
from temper.build.models import first_model
from temper.config import RunConfig, load_recipe, resolve, to_toml
from temper.config.memory import CPU_CHOICE, MemoryChoice, given_choice, settled_choice, with_choice, with_stored_choice
from temper.errors import UserError
from temper.planning.gpus import GIB, GPUS, Gpu
from temper.stages.kinds import kind_of
from temper.stages.reading.data import open_data
from tests.build.conftest import with_keys

ROOT = Path(__file__).parents[2]
BOUND = 'objective.regularizers=[{name="kl", coefficient=0.1, estimator="k3"}]'
SMALL = replace(GPUS["t4"], memory_bytes=2 * GIB)


def test_auto_is_the_default_and_on_a_cpu_means_what_the_defaults_always_were(
    config: RunConfig, opened: Callable[..., Any]
) -> None:
    assert given_choice(config) == {}
    settled = settle(config, *opened(config))
    assert settled_choice(settled) == CPU_CHOICE
    assert (settled.trainer.tokens_per_microbatch, settled.engine.kv_tokens) == (8192, 0)
    assert (settled.model.gradient_checkpointing, settled.optim.states) == (False, "float32")


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.toml")), ids=lambda path: path.stem)
def test_recipes_train_on_a_cpu_with_the_values_they_had_before_there_was_auto(recipe: Path) -> None:
    for config, table in zip(load_recipe(recipe), _stages(recipe), strict=True):
        before = MemoryChoice(
            tokens_per_microbatch=table.get("trainer", {}).get("tokens_per_microbatch", 8192),
            kv_tokens=table.get("engine", {}).get("kv_tokens", 0),
            gradient_checkpointing=table.get("model", {}).get("gradient_checkpointing", False),
            states=table.get("optim", {}).get("states", "float32"),
        )
        assert settled_choice(with_choice(config, CPU_CHOICE)) == before


def _stages(recipe: Path) -> Iterator[dict[str, Any]]:
    """As tables are merged, for the four sections of interest."""
    shared = tomllib.loads(recipe.read_text())
    stages = shared.pop("stage", [{}]) if isinstance(shared.get("stage"), list) else [{}]
    names = ("trainer", "engine", "model", "optim")
    for stage in stages:
        yield {name: {**shared.get(name, {}), **stage.get(name, {})} for name in names}


def test_what_a_recipe_says_is_never_changed(config: RunConfig) -> None:
    given = with_keys(config, "trainer.tokens_per_microbatch=100", "optim.states=8bit", "engine.kv_tokens=0")
    other = MemoryChoice(tokens_per_microbatch=1, kv_tokens=7, gradient_checkpointing=True, states="bfloat16")
    chosen = settled_choice(with_choice(given, other))
    assert chosen == MemoryChoice(tokens_per_microbatch=100, kv_tokens=0, gradient_checkpointing=True, states="8bit")


def test_on_a_gpu_the_choice_follows_what_is_free(
    config: RunConfig, opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_memory, "pick_device", lambda name: torch.device("cuda"))
    parts = opened(config)
    monkeypatch.setattr(build_memory, "this_gpu", lambda: GPUS["h200"])
    assert settled_choice(settle(config, *parts)).tokens_per_microbatch == 65536
    needed = plan_stage(config, *parts, GPUS["h200"]).memory.needed_bytes
    monkeypatch.setattr(build_memory, "this_gpu", lambda: replace(SMALL, memory_bytes=0.98 * needed))
    assert settled_choice(settle(config, *parts)) != settled_choice(config_on(GPUS["h200"], config, parts))
    monkeypatch.setattr(build_memory, "this_gpu", lambda: replace(SMALL, free_bytes=0.1 * GIB))
    with pytest.raises(UserError, match=r"needs .* GiB, and 0\.1 are free"):
        settle(config, *parts)


def config_on(gpu: Gpu, config: RunConfig, parts: Any) -> RunConfig:
    return with_choice(config, plan_stage(config, *parts, gpu).work.choice)


def test_a_stage_is_read_as_it_will_be_built(config: RunConfig, opened: Callable[..., Any]) -> None:
    work = workload_of(config, *opened(config))
    assert (work.group_size, work.rows_per_update, work.completion_tokens, work.max_running) == (4, 16, 4, 256)
    assert (work.engine, work.samples, work.rolls, work.trains) == ("shared", True, True, True)
    assert work.frozen == ()
    ahead = with_keys(config, "rollout.max_staleness=1")
    assert workload_of(ahead, *opened(ahead)).engine == "copied"
    adapted = with_keys(config, "model.lora.rank=4")
    assert workload_of(adapted, *opened(adapted)).trained_parameters == work.shape.adapter_parameters(4)
    bound = with_keys(config, BOUND)
    assert workload_of(bound, *opened(bound)).frozen == (work.shape,)
    for name in ("bfloat16", "float16", "float32"):
        same = with_keys(config, f"model.dtype={name}")
        assert workload_of(same, *opened(same)).dtype == getattr(torch, name)
    judged = with_keys(config, "objective.preset=ppo")
    assert workload_of(judged, *opened(judged)).has_critic


@pytest.mark.parametrize(
    ("keys", "may_be_cut", "may_have_adapter"),
    [
        ((), True, True),
        (("optim.states=8bit",), False, True),
        (("model.offload=true",), False, True),
        (("model.lora={rank=4, base='4bit'}",), False, True),
        (("objective.preset=trpo",), False, True),
        (("model.routers={frozen=true}",), True, False),
    ],
    ids=str,
)
def test_what_checks_of_a_recipe_refuse_is_not_proposed(
    keys: tuple[str, ...], may_be_cut: bool, may_have_adapter: bool, config: RunConfig, opened: Callable[..., Any]
) -> None:
    changed = with_keys(config, *keys)
    work = workload_of(changed, *opened(changed))
    assert (work.may_be_cut, work.may_have_adapter) == (may_be_cut, may_have_adapter)
    assert work.draws_here
    if not may_be_cut:
        cut = with_keys(changed, "cluster.parts=true", "cluster.trainers=2", "engine.place=process")
        with pytest.raises(UserError, match=r"cluster\.parts: "):
            check_stage(cut)


@pytest.mark.parametrize(
    ("keys", "is_possible"),
    [
        ((), True),
        (("model.lora={rank=4}",), True),
        (("engine.weights=fp8",), False),
        (("engine.kind=vllm",), False),
        ((BOUND, "objective.reference={name='reset', every=5}"), False),
    ],
    ids=str,
)
def test_a_base_in_4_bits_may_be_proposed_where_checks_of_a_recipe_take_it(
    keys: tuple[str, ...], is_possible: bool, config: RunConfig, opened: Callable[..., Any]
) -> None:
    changed = with_keys(config, *keys)
    assert workload_of(changed, *opened(changed)).may_have_four_bits == is_possible
    held = with_keys(changed, "model.lora={rank=4, base='4bit'}")
    with nullcontext() if is_possible else pytest.raises(UserError, match=r'model\.lora\.base="4bit": '):
        check_stage(held)


def test_the_models_own_reference_takes_nothing_below_an_adapter(config: RunConfig, opened: Callable[..., Any]) -> None:
    bound = with_keys(config, BOUND)
    assert workload_of(bound, *opened(bound)).has_own_reference
    moving = with_keys(bound, "objective.reference={name='reset', every=5}")
    adapted = with_keys(bound, "model.lora.rank=4")
    for other in (config, moving, adapted):
        assert not workload_of(other, *opened(other)).has_own_reference


def test_states_that_are_chosen_for_parts_are_not_refused_with_them(
    config: RunConfig, opened: Callable[..., Any]
) -> None:
    cut = with_keys(config, "cluster.parts=true", "cluster.trainers=2", "engine.place=process")
    parts = opened(cut)
    narrow = with_keys(cut, "optim.states=bfloat16")
    for free in (0.5, 0.7, 0.75, 0.9, 1.0):
        gpu = replace(
            GPUS["h200"], free_bytes=free * plan_stage(narrow, *opened(narrow), GPUS["h200"]).memory.needed_bytes
        )
        settled = with_choice(cut, plan_stage(cut, *parts, gpu).work.choice)
        assert settled.optim.states != "8bit"
        check_stage(settled)


def test_stages_that_read_rows_are_planned_by_their_longest(tiny_recipe: dict[str, Any], tmp_path: Path) -> None:
    config = resolve({**tiny_recipe, "stage": tiny_recipe["stage"][:1]}, [], where="tiny")[0]
    folder, objective = first_model(config, tmp_path), check_stage(config)
    work = workload_of(config, objective, open_data(config, objective, kind_of(config).reading, folder), folder)
    assert not work.rolls
    assert work.rows_per_update == 8
    assert work.packed_tokens == 8 * work.row_tokens


def test_a_misfit_is_told_with_parts_and_the_change(config: RunConfig, opened: Callable[..., Any]) -> None:
    fixed = ("model.gradient_checkpointing=false", "optim.states=float32", "engine.kv_tokens=0")
    given = with_keys(config, "trainer.tokens_per_microbatch=65536", "rollout.groups_per_step=4000", *fixed)
    parts = opened(given)
    enough = plan_stage(given, *parts, GPUS["h200"]).memory.needed_bytes
    plan = plan_stage(given, *parts, replace(GPUS["h200"], free_bytes=0.97 * enough))
    assert not plan.fits
    said = explain_misfit(plan)
    assert "most in forward and backward: " in said
    assert "The cheapest change that makes it fit: trainer.tokens_per_microbatch = 32768" in said
    hopeless = plan_stage(given, *parts, replace(GPUS["h200"], free_bytes=0.1 * enough))
    assert "use a smaller model" in explain_misfit(hopeless)


def test_a_host_without_room_is_told_as_a_gpu_is(
    config: RunConfig, opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    away = with_keys(config, "optim.offload=true")
    parts = opened(away)
    held = plan_stage(away, *parts, GPUS["h200"]).host_bytes
    assert held > 0
    full = replace(GPUS["h200"], host_free_bytes=0.1 * held)
    plan = plan_stage(away, *parts, full)
    assert not plan.fits
    said = explain_misfit(plan)
    assert "in the memory of the host: what optim.offload" in said
    assert "The cheapest change that makes it fit: optim.offload = false" in said
    monkeypatch.setattr(build_memory, "pick_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(build_memory, "this_gpu", lambda: full)
    with pytest.raises(UserError, match="in the memory of the host"):
        settle(away, *parts)
    monkeypatch.setattr(build_memory, "this_gpu", lambda: replace(full, host_free_bytes=held))
    assert settled_choice(settle(away, *parts)).states == "float32"


def test_states_are_narrower_where_the_host_has_no_room_for_wide_ones(
    config: RunConfig, opened: Callable[..., Any]
) -> None:
    away = with_keys(config, "optim.offload=true")
    parts = opened(away)
    narrow = with_keys(away, "optim.states=8bit")
    held = plan_stage(narrow, *opened(narrow), GPUS["h200"]).host_bytes
    assert plan_stage(away, *parts, replace(GPUS["h200"], host_free_bytes=held)).work.choice.states == "8bit"


def test_trainers_that_share_the_gpus_of_this_machine_are_planned_together(
    config: RunConfig, opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = with_keys(config, "cluster.trainers=4", "optim.offload=true")
    parts = opened(copies)
    needed, held = [], []
    for gpus in (4, 2):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        plan = plan_stage(copies, *parts, GPUS["h200"])
        needed.append(plan.memory.needed_bytes)
        held.append(plan.host_bytes)
    assert needed[1] > 1.5 * needed[0]
    assert (
        held[0] == held[1] == 4 * plan_stage(with_keys(copies, "cluster.trainers=1"), *parts, GPUS["h200"]).host_bytes
    )
    elsewhere = plan_stage(copies, *parts, GPUS["h200"], PlanRequest(gpus=4))
    assert elsewhere.work.trainers_per_gpu == 1


def test_a_run_remembers_what_was_chosen(config: RunConfig) -> None:
    chosen = MemoryChoice(tokens_per_microbatch=4096, kv_tokens=640, gradient_checkpointing=True, states="8bit")
    stored = tomllib.loads(to_toml([with_choice(config, chosen)]))["stage"][0]
    assert settled_choice(with_stored_choice(config, stored)) == chosen
    changed = with_keys(config, "trainer.tokens_per_microbatch=512")
    assert settled_choice(with_stored_choice(changed, stored)).tokens_per_microbatch == 512
    assert with_stored_choice(config, {}) == config
