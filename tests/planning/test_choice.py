"""What is chosen fits, the dearest sacrifices come last, and what a recipe gives is never changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from temper.errors import UserError
from temper.planning.choice import candidates, choose, fits, least_choice
from temper.planning.gpus import GPUS, Gpu, find_gpu, this_gpu
from temper.planning.memory import plan_memory
from temper.planning.workload import Workload

Make = Callable[..., Workload]


@pytest.mark.parametrize("size", ["135m", "1.5b", "7b"])
@pytest.mark.parametrize("gpu", ["h200", "a100-40", "4090"])
def test_whatever_is_chosen_fits_and_nothing_preferred_does(size: str, gpu: str, make_workload: Make) -> None:
    work, free = make_workload(size), GPUS[gpu].memory_bytes
    choice = choose(work, free, {})
    better = []
    for candidate in candidates(work, {}):
        if candidate == choice:
            break
        better.append(candidate)
    assert not any(fits(replace(work, choice=candidate), free) for candidate in better)
    if choice is not None:
        assert plan_memory(replace(work, choice=choice)).needed_bytes <= free


def test_states_are_as_wide_as_memory_allows(make_workload: Make) -> None:
    work = make_workload("7b")
    found = {}
    for states in ("float32", "bfloat16", "8bit"):
        least = replace(work.choice, states=states, gradient_checkpointing=True, tokens_per_microbatch=8192)
        choice = choose(work, plan_memory(replace(work, choice=least)).needed_bytes, {})
        assert choice is not None
        found[states] = choice.states
    assert found == {"float32": "float32", "bfloat16": "bfloat16", "8bit": "8bit"}


def test_a_small_model_on_a_large_gpu_gives_nothing_up(make_workload: Make) -> None:
    choice = choose(make_workload("135m", 256), GPUS["h200"].memory_bytes, {})
    assert choice is not None
    assert (choice.tokens_per_microbatch, choice.gradient_checkpointing, choice.states) == (65536, False, "float32")
    assert choice.kv_tokens == make_workload("135m", 256).choice.kv_tokens


def test_given_values_stay(make_workload: Make) -> None:
    given = {"tokens_per_microbatch": 1234, "states": "bfloat16", "kv_tokens": 0}
    choice = choose(make_workload("1.5b"), GPUS["h200"].memory_bytes, given)
    assert choice is not None
    assert (choice.tokens_per_microbatch, choice.states) == (1234, "bfloat16")
    assert choice.kv_tokens == make_workload("1.5b").choice.kv_tokens, "0 asks for enough"
    assert choose(make_workload("7b"), GPUS["a100-80"].memory_bytes, {"states": "float32"}) is None


def test_parts_are_never_given_the_states_that_are_refused_with_them(make_workload: Make) -> None:
    whole = make_workload("7b", trainers=2, engine="copied")
    cut = replace(whole, parts=True)
    assert {choice.states for choice in candidates(whole, {})} == {"float32", "bfloat16", "8bit"}
    assert {choice.states for choice in candidates(cut, {})} == {"float32", "bfloat16"}
    assert least_choice(cut, {}).states == "bfloat16"
    tight = replace(cut, choice=replace(least_choice(cut, {}), states="8bit"))
    assert choose(cut, plan_memory(tight).needed_bytes, {}) is None, "only narrower states would fit"


@pytest.mark.parametrize(
    ("device_name", "memory", "like"),
    [
        ("NVIDIA A100-SXM4-40GB", 39.5, "a100-40"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "a100-80"),
        ("NVIDIA L4", 22.0, "l4"),
        ("NVIDIA L40S", 44.4, "l40s"),
        ("NVIDIA L40", 44.4, None),
        ("NVIDIA A10G", 22.0, None),
        ("NVIDIA H200", 139.8, "h200"),
        ("NVIDIA GH200 480GB", 94.5, "gh200"),
        ("NVIDIA GeForce RTX 4090", 23.5, "4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 15.7, None),
    ],
)
def test_the_gpu_of_this_machine_is_known_by_the_words_of_its_name_and_its_memory(
    device_name: str, memory: float, like: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = int(memory * 2**30)
    for name, value in {
        "is_available": True, "mem_get_info": (total, total), "memory_reserved": 0, "memory_allocated": 0,
        "get_device_name": device_name, "host_memory_stats": {},
    }.items():  # fmt: skip
        monkeypatch.setattr(f"torch.cuda.{name}", lambda value=value: value)
    found = this_gpu()
    assert found is not None
    assert (found.device_name, found.memory_bytes) == (device_name, total)
    rates = (found.bandwidth, found.peer_link)
    assert rates == ((1e12, 25e9) if like is None else (GPUS[like].bandwidth, GPUS[like].peer_link))


def test_gpus_are_known_by_name_and_others_refused() -> None:
    assert isinstance(find_gpu("h200"), Gpu)
    with pytest.raises(UserError, match='Did you mean "h200"'):
        find_gpu("h2000")
    assert {"h200", "h100-80", "a100-80", "a100-40", "l40s", "a10-24", "4090", "3090", "t4"} <= GPUS.keys()
    assert GPUS["h200"].flops("bfloat16") == 989e12
    assert GPUS["t4"].flops("bfloat16") == 8.1e12, "it has no hardware for it"
