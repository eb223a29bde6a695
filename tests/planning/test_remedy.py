"""The change that is proposed fits, is the cheapest, and no check of a recipe refuses it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from temper.planning.choice import fits
from temper.planning.memory import plan_memory
from temper.planning.remedy import find_remedy
from temper.planning.workload import AdapterShape, Workload

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
    work = make_workload("7b", draws_here=True)
    held = 0.53125 * work.shape.layers + 2 * (work.shape.parameters - work.shape.layers)
    assert find_remedy(work, held) is None, "weights alone are more, in 4 bits and nothing beside them"
    assert find_remedy(work, held + 6 * GIB) is not None


def test_a_base_in_4_bits_is_named_where_an_adapter_is_not_enough(make_workload: Make) -> None:
    """7B on a GPU of 24 GB, at about one row a microbatch, recomputed already and with a small cache."""
    work = make_workload("7b", microbatch=1024, recomputes=True, draws_here=True)
    work = replace(work, choice=replace(work.choice, kv_tokens=20000))
    free = 23.5 * GIB
    assert str(find_remedy(work, free)) == 'model.lora = {rank = 32, base = "4bit"}'
    adapter = AdapterShape(rank=16, targets=("q_proj",))
    adapted = replace(work, adapter=adapter, engine="copied")
    assert str(find_remedy(adapted, free)) == 'model.lora.base = "4bit"', "the rest of its table stays"
    held = replace(work, adapter=adapter, has_four_bit_base=True)
    assert find_remedy(adapted, plan_memory(held).needed_bytes) == find_remedy(adapted, free)
    assert find_remedy(adapted, plan_memory(held).needed_bytes - 1) != find_remedy(adapted, free)


def test_a_base_in_4_bits_is_proposed_only_where_the_recipe_may_have_it(make_workload: Make) -> None:
    work = make_workload("7b", microbatch=1024, recomputes=True, adapter=AdapterShape(rank=32), draws_here=True)
    whole = replace(work, adapter=None, engine="shared")
    for refused in (
        replace(work, may_have_four_bits=False),
        replace(work, shape=replace(work.shape, family="gemma2")),
        replace(work, trainers=2, parts=True),
        replace(work, trains=False),
        replace(whole, may_have_adapter=False),
    ):
        assert "4bit" not in str(find_remedy(refused, 15 * GIB))
    assert "4bit" in str(find_remedy(work, 15 * GIB))


def test_trainers_that_could_hold_parts_are_told_of_4_bits_where_parts_are_not_enough(make_workload: Make) -> None:
    work = make_workload("7b", microbatch=16384, trainers=2, draws_here=True)
    remedy = find_remedy(work, 15 * GIB)
    assert remedy is not None
    assert remedy.changes["model.lora"] == '{rank = 32, base = "4bit"}'
    assert "cluster.parts" not in remedy.changes, "a base in 4 bits is held whole"


def test_a_reference_takes_nothing_below_an_adapter(make_workload: Make) -> None:
    work = make_workload("7b", microbatch=1024, recomputes=True, frozen=(make_workload("7b").shape,))
    adapted = replace(work, adapter=AdapterShape(rank=32), engine="copied", frozen=())
    free = plan_memory(adapted).needed_bytes
    assert str(find_remedy(replace(work, has_own_reference=True), free)) == "model.lora = {rank = 32}"
    assert str(find_remedy(work, free)) != "model.lora = {rank = 32}", "a teacher stays"


def test_inputs_of_long_rows_leave_for_the_host_before_states_are_narrower(make_workload: Make) -> None:
    work = make_workload("7b", new=32000, microbatch=4096, recomputes=True)
    away = replace(work, choice=replace(work.choice, gradient_checkpointing="offload"))
    plan = plan_memory(away)
    said = f'model.gradient_checkpointing = "offload" (with {plan.host_bytes / GIB:.1f} GiB of the memory of each host)'
    assert str(find_remedy(work, plan.needed_bytes)) == said
    narrow = replace(work, choice=replace(work.choice, states="8bit"))
    assert plan_memory(narrow).needed_bytes < plan.needed_bytes, "else the order would not show"
    assert str(find_remedy(work, plan.needed_bytes, plan.host_bytes - 1)) == 'optim.states = "8bit"', "no room there"
    alone = replace(work, engine="elsewhere", may_have_adapter=False)
    wide = replace(alone, choice=replace(work.choice, tokens_per_microbatch=65536))
    least = replace(narrow.choice, tokens_per_microbatch=32768)
    remedy = find_remedy(wide, plan_memory(replace(alone, choice=least)).needed_bytes, 0)
    assert remedy is not None, "without the host several others do"
    assert remedy.changes == {"trainer.tokens_per_microbatch": "32768", "optim.states": '"8bit"'}


def test_fewer_running_sequences_are_the_last_that_is_named(make_workload: Make) -> None:
    """A hundred thousand of them have logits of 57 GiB."""
    work = replace(make_workload("7b", microbatch=1024, states="8bit", recomputes=True), max_running=100_000)
    work = replace(work, choice=replace(work.choice, kv_tokens=20_000))
    free = 120 * GIB
    remedy = find_remedy(replace(work, may_have_adapter=False), free)
    assert remedy is not None
    assert remedy.changes == {"engine.max_running": "25000"}, "the most that fit"
    fewer = replace(work, max_running=25_000)
    assert plan_memory(fewer).needed_bytes <= free < plan_memory(replace(work, max_running=50_000)).needed_bytes
    full = replace(work, choice=replace(work.choice, kv_tokens=1_600_000))
    both = find_remedy(full, free)
    assert both is not None
    assert both.changes == {"engine.max_running": "12500", "engine.kv_tokens": "200000"}, "as much for each"
    smaller = find_remedy(make_workload("7b", new=2048, microbatch=1024, states="8bit", recomputes=True), 90 * GIB)
    assert smaller is not None
    assert "engine.max_running" not in smaller.changes, "a smaller cache is enough"


def test_of_one_key_the_least_that_does_is_written(make_workload: Make) -> None:
    """Not the last of those that were tried before."""
    work = make_workload("1.5b", microbatch=65536, may_have_adapter=False)
    narrow = replace(work.choice, tokens_per_microbatch=16384, states="8bit", gradient_checkpointing=True)
    remedy = find_remedy(work, plan_memory(replace(work, choice=narrow)).needed_bytes)
    assert remedy is not None
    assert remedy.changes == {
        "trainer.tokens_per_microbatch": "16384",
        "model.gradient_checkpointing": "true",
        "optim.states": '"8bit"',
    }


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
