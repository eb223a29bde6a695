"""The change that is proposed fits, is the cheapest, and no check of a recipe refuses it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from temper.planning.choice import fits
from temper.planning.memory import plan_memory
from temper.planning.remedy import find_remedy
from temper.planning.workload import Workload

Make = Callable[..., Workload]
GIB = 2**30


@pytest.mark.parametrize(
    ("free", "said"),
    [
        (70, "trainer.tokens_per_microbatch = 16384"),
        (38, "trainer.tokens_per_microbatch = 2048"),
    ],
)
def test_the_cheapest_change_is_named(free: float, said: str, make_workload: Make) -> None:
    assert str(find_remedy(make_workload("1.5b", microbatch=32768), free * GIB)) == said


@pytest.mark.parametrize(
    ("free", "said"),
    [
        (130, 'optim.states = "8bit"'),
        (70, "optim.offload = true (with 70.9 GiB of the memory of each host)"),
        (50, "model.lora = {rank = 32}"),
    ],
)
def test_dearer_changes_are_named_where_cheaper_ones_are_not_enough(
    free: float, said: str, make_workload: Make
) -> None:
    """At about one row a microbatch, recomputed already."""
    work = make_workload("7b", microbatch=1024, recomputes=True)
    assert str(find_remedy(work, free * GIB)) == said


def test_recomputing_comes_before_narrow_states(make_workload: Make) -> None:
    work = make_workload("1.5b", new=8192, microbatch=1024)
    recomputed = replace(work, choice=replace(work.choice, gradient_checkpointing=True))
    free = plan_memory(recomputed).needed_bytes
    assert str(find_remedy(work, free)) == "model.gradient_checkpointing = true"
    narrow = replace(work, choice=replace(work.choice, states="8bit"))
    assert plan_memory(narrow).needed_bytes > free, "else the order would not show"


def test_a_remedy_fits_and_none_of_its_changes_is_needless(make_workload: Make) -> None:
    work = make_workload("1.5b", microbatch=32768)
    remedy = find_remedy(work, 23.5 * GIB)
    assert remedy is not None
    assert len(remedy.changes) > 1
    assert find_remedy(make_workload("7b"), 10 * GIB) is None, "weights alone are more"


def test_trainers_that_hold_parts_are_not_told_to_use_8_bit_states(make_workload: Make) -> None:
    """A block of these may lie on two trainers."""
    cut = make_workload("7b", microbatch=1024, recomputes=True, trainers=2, parts=True, engine="copied")
    narrow = replace(cut, choice=replace(cut.choice, states="bfloat16"))
    assert str(find_remedy(cut, plan_memory(narrow).needed_bytes)) == 'optim.states = "bfloat16"'
    assert str(find_remedy(narrow, plan_memory(narrow).needed_bytes - GIB)).startswith("optim.offload = true (with ")
    frozen = replace(narrow, offload=True, frozen=(narrow.shape,))
    remedy = find_remedy(frozen, plan_memory(frozen).needed_bytes - 4 * GIB)
    assert remedy is None or "model.offload" not in remedy.changes, "parts of a reference stay where they are"


def test_parts_are_proposed_only_where_the_recipe_may_have_them(make_workload: Make) -> None:
    work = make_workload("7b", microbatch=1024, recomputes=True, trainers=8, engine="copied", num_samplers=8)
    free = 79.1 * GIB
    assert str(find_remedy(work, free)) == "cluster.parts = true"
    assert str(find_remedy(replace(work, draws_here=True), free)) == 'cluster.parts = true and engine.place = "process"'
    gpt = replace(work, shape=replace(work.shape, family="gpt2"))
    for refused in (replace(work, may_be_cut=False), gpt):
        remedy = find_remedy(refused, free)
        assert remedy is not None
        assert "cluster.parts" not in remedy.changes
    chosen = replace(work, choice=replace(work.choice, states="8bit"))
    narrow = replace(chosen, parts=True, choice=replace(work.choice, states="bfloat16"))
    assert str(find_remedy(chosen, plan_memory(narrow).needed_bytes)) == "cluster.parts = true", "8 bit were chosen"
    assert find_remedy(chosen, plan_memory(narrow).needed_bytes - 1) != find_remedy(chosen, free)


def test_an_adapter_is_proposed_only_where_it_may_be_trained(make_workload: Make) -> None:
    work = make_workload("7b", microbatch=1024, recomputes=True)
    assert str(find_remedy(work, 50 * GIB)) == "model.lora = {rank = 32}"
    assert "lora" not in str(find_remedy(replace(work, may_have_adapter=False), 50 * GIB))


def test_offloading_is_proposed_only_where_the_host_has_room(make_workload: Make) -> None:
    """7B, whose states are 71 GiB. With narrow ones it would do; else only an adapter."""
    work = make_workload("7b", microbatch=1024, recomputes=True)
    needed = plan_memory(replace(work, offload=True)).host_bytes
    assert needed == 10 * work.shape.parameters
    assert str(find_remedy(work, 70 * GIB, needed)) == "optim.offload = true (with 70.9 GiB of the memory of each host)"
    narrow = find_remedy(work, 70 * GIB, 40 * GIB)
    assert narrow is not None
    assert narrow.changes == {"model.lora": "{rank = 32}"}, "one alone is tried first"
    whole = find_remedy(replace(work, may_have_adapter=False), 70 * GIB, 40 * GIB)
    assert whole is not None
    assert whole.changes == {"optim.states": '"8bit"', "optim.offload": "true"}
    assert whole.host_bytes == pytest.approx(4.03 * work.shape.parameters, rel=0.001)
    assert find_remedy(replace(work, may_have_adapter=False), 70 * GIB, GIB) is None


def test_a_host_that_is_too_small_for_what_is_left_there_is_told_so(make_workload: Make) -> None:
    work = make_workload("1.5b", microbatch=1024, recomputes=True, offload=True)
    assert not fits(work, 100 * GIB, GIB)
    assert str(find_remedy(work, 100 * GIB, GIB)) == "optim.offload = false"
    away = replace(work, offload=False, offload_frozen=True, frozen=(work.shape,))
    assert str(find_remedy(away, 100 * GIB, GIB)) == "model.offload = false"
    inputs = replace(work, offload=False, choice=replace(work.choice, gradient_checkpointing="offload"))
    assert str(find_remedy(inputs, 100 * GIB, 0)) == "model.gradient_checkpointing = true"
