"""What is chosen fits, the dearest sacrifices come last, and what a recipe gives is never changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from temper.errors import UserError
from temper.planning.choice import candidates, choose, find_remedy, fits
from temper.planning.gpus import GPUS, Gpu, find_gpu
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


@pytest.mark.parametrize(
    ("free", "said"),
    [
        (70, "trainer.tokens_per_microbatch = 16384"),
        (38, "trainer.tokens_per_microbatch = 2048"),
    ],
)
def test_the_cheapest_change_is_named(free: float, said: str, make_workload: Make) -> None:
    assert str(find_remedy(make_workload("1.5b", microbatch=32768), free * 2**30)) == said


@pytest.mark.parametrize(
    ("free", "said"),
    [
        (130, 'optim.states = "8bit"'),
        (70, "optim.offload = true"),
        (50, "model.lora = {rank = 32}"),
    ],
)
def test_dearer_changes_are_named_where_cheaper_ones_are_not_enough(
    free: float, said: str, make_workload: Make
) -> None:
    """At about one row a microbatch, recomputed already."""
    work = make_workload("7b", microbatch=1024, recomputes=True)
    assert str(find_remedy(work, free * 2**30)) == said


def test_recomputing_comes_before_narrow_states(make_workload: Make) -> None:
    work = make_workload("1.5b", new=8192, microbatch=1024)
    recomputed = replace(work, choice=replace(work.choice, gradient_checkpointing=True))
    free = plan_memory(recomputed).needed_bytes
    assert str(find_remedy(work, free)) == "model.gradient_checkpointing = true"
    narrow = replace(work, choice=replace(work.choice, states="8bit"))
    assert plan_memory(narrow).needed_bytes > free, "else the order would not show"


def test_a_remedy_fits_and_none_of_its_changes_is_needless(make_workload: Make) -> None:
    work = make_workload("1.5b", microbatch=32768)
    remedy = find_remedy(work, 23.5 * 2**30)
    assert remedy is not None
    assert len(remedy.changes) > 1
    assert find_remedy(make_workload("7b"), 10 * 2**30) is None, "weights alone are more"


def test_gpus_are_known_by_name_and_others_refused() -> None:
    assert isinstance(find_gpu("h200"), Gpu)
    with pytest.raises(UserError, match='Did you mean "h200"'):
        find_gpu("h2000")
    assert {"h200", "h100-80", "a100-80", "a100-40", "l40s", "a10-24", "4090", "3090", "t4"} <= GPUS.keys()
    assert GPUS["h200"].flops("bfloat16") == 989e12
    assert GPUS["t4"].flops("bfloat16") == 8.1e12, "it has no hardware for it"
