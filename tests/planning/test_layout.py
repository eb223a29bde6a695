"""GPUs are shared out in the fastest way that fits, and one GPU is a plan like any other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from temper.planning.choice import choose, fits
from temper.planning.gpus import GPUS
from temper.planning.layout import (
    Layout,
    LayoutPlan,
    best_layout,
    enough_gpus,
    explain_choice,
    layouts,
    plan_layout,
    remedy_of,
    with_layout,
)
from temper.planning.memory import plan_memory
from temper.planning.remedy import find_remedy
from temper.planning.seconds import plan_seconds
from temper.planning.workload import AdapterShape, AnswerLengths, Workload, by_gpu

Make = Callable[..., Workload]
H200 = GPUS["h200"]


def plans(work: Workload, gpus: int, gpu: str = "h200") -> list[LayoutPlan]:
    return [plan_layout(work, layout, GPUS[gpu], {}) for layout in layouts(work, gpus)]


def test_one_gpu_is_planned_as_it_always_was(make_workload: Make) -> None:
    for work in (make_workload("1.5b"), make_workload("1.5b", engine="copied", num_samplers=3, ahead=2)):
        (layout,) = layouts(work, 1)
        assert with_layout(work, layout) == work
        (plan,) = plans(work, 1)
        assert plan.work.choice == choose(work, H200.usable_bytes, {})
        assert plan.time == plan_seconds(plan.work, H200)
        assert "exchange" not in plan.time.seconds


def test_synchronous_steps_may_take_turns_and_others_are_apart(make_workload: Make) -> None:
    sync, ahead = (list(layouts(make_workload("1.5b", ahead=ahead), 8)) for ahead in (0, 1))
    assert {layout.is_apart for layout in sync} == {True, False}
    assert {layout.is_apart for layout in ahead} == {True}
    for layout in (*sync, *ahead):
        assert layout.gpus == 8
        assert min(layout.trainers, layout.samplers) >= 1
    assert Layout(trainers=8, samplers=8, parts=True) in sync
    assert sum(layout.is_apart and layout.trainers == 1 for layout in sync) == 1, "one trainer has no parts"


def test_what_is_given_is_kept(make_workload: Make) -> None:
    work = make_workload("1.5b")
    assert {layout.parts for layout in layouts(work, 8, parts=True)} == {True}
    assert {(layout.trainers, layout.samplers) for layout in layouts(work, 8, trainers=3)} == {(3, 5)}
    whole = replace(work, may_be_cut=False)
    assert {layout.parts for layout in layouts(whole, 8)} == {False}
    assert {layout.parts for layout in layouts(whole, 8, parts=True)} == {False}, "a check would refuse it"
    other = replace(work, shape=replace(work.shape, family="gemma3_text"))
    assert {layout.parts for layout in layouts(other, 8)} == {False}, "no trainer cuts this family"
    assert {layout.parts for layout in layouts(other, 8, parts=True)} == {True}, (
        "as the recipe says; the table says why not"
    )
    reading = replace(work, rolls=False)
    assert {(layout.trainers, layout.is_apart) for layout in layouts(reading, 8)} == {(8, False)}
    assert {layout.gpus for layout in layouts(reading, 8, trainers=3)} == {3}
    assert {layout.trainers for layout in layouts(replace(work, has_processes=False), 8)} == {8}


def test_a_sampler_draws_with_the_trainer_s_weights_only_where_they_are_whole(make_workload: Make) -> None:
    work = make_workload("1.5b")
    assert with_layout(work, Layout(trainers=4, parts=False)).engine == "shared"
    assert with_layout(work, Layout(trainers=4, parts=True)).engine == "copied"
    assert with_layout(work, Layout(trainers=4, samplers=4)).engine == "copied"
    assert with_layout(work, Layout(trainers=4, samplers=4, is_apart=True)).engine == "apart"
    assert with_layout(replace(work, engine="elsewhere"), Layout(trainers=4, parts=True)).engine == "elsewhere"


def test_the_fastest_that_fits_is_taken(make_workload: Make) -> None:
    tried = plans(make_workload("7b", ahead=1), 8, "h100-80")
    best = best_layout(tried)
    assert best.fits
    assert all(best.time.total <= plan.time.total for plan in tried if plan.fits)
    assert not all(plan.fits for plan in tried), "else fitting would decide nothing"
    assert any(not plan.fits and plan.time.total < best.time.total for plan in tried) or best.layout.parts
    said = explain_choice(best, tried)
    assert "fastest of" in said
    assert "did not fit" in said


def test_more_gpus_are_faster_and_a_side_that_is_slower_gets_more_of_them(make_workload: Make) -> None:
    work = make_workload("7b", new=4096, ahead=1)
    totals = [best_layout(plans(work, gpus)).time.total for gpus in (4, 8, 16, 32)]
    assert totals == sorted(totals, reverse=True)
    slow_links = replace(H200, bandwidth=H200.bandwidth / 8)
    drawing = best_layout([plan_layout(work, layout, slow_links, {}) for layout in layouts(work, 16)]).layout
    assert drawing.samplers > best_layout(plans(work, 16)).layout.samplers


def test_both_kinds_of_gpus_must_have_room(make_workload: Make) -> None:
    apart = with_layout(make_workload("7b"), Layout(trainers=4, samplers=4, parts=True, is_apart=True))
    cached = replace(apart, choice=replace(apart.choice, kv_tokens=20 * apart.choice.kv_tokens))
    for work, fullest in ((apart, "trainer"), (cached, "sampler")):
        needed = {kind: plan_memory(side).needed_bytes for kind, side in by_gpu(work).items()}
        assert max(needed, key=lambda kind: needed[kind]) == fullest
        assert fits(work, max(needed.values()))
        assert not fits(work, max(needed.values()) - 1)


def test_what_fits_nowhere_names_the_change_that_helps(make_workload: Make) -> None:
    """Copies of 7B with float32 states on 80 GB: parts are enough, and cheaper than narrow states."""
    work = make_workload("7b", microbatch=1024, recomputes=True, trainers=8, engine="copied", num_samplers=8)
    assert str(find_remedy(work, GPUS["h100-80"].usable_bytes)) == "cluster.parts = true"
    given = {"states": "float32", "tokens_per_microbatch": 16384, "gradient_checkpointing": True}
    plain, small = make_workload("7b"), GPUS["a100-40"]
    assert enough_gpus(plain, small, 2, given) == 16
    for gpus, is_enough in ((8, False), (16, True)):
        tried = [plan_layout(plain, layout, small, given) for layout in layouts(plain, gpus)]
        assert any(plan.fits for plan in tried) == is_enough
    assert enough_gpus(plain, replace(H200, memory_bytes=2**30), 2, {}) is None


def test_what_parts_refuse_is_named_where_only_copies_of_it_fit(make_workload: Make) -> None:
    """A base in 4 bits is held whole, and parts of the model in full need least."""
    work, gpu = make_workload("7b", draws_here=True), GPUS["t4"]
    tried = plans(work, 2, "t4")
    best = best_layout(tried)
    assert best.layout.parts
    assert find_remedy(best.work, gpu.usable_bytes) is None
    remedy = remedy_of(best, tried, gpu)
    assert remedy is not None
    assert remedy.changes["model.lora"] == '{rank = 32, base = "4bit"}'
    adapted = replace(work, adapter=AdapterShape(rank=32), has_four_bit_base=True, may_be_cut=False)
    assert best_layout(plans(adapted, 2, "t4")).fits
    assert remedy_of(best, [plan for plan in tried if plan.layout.parts], gpu) is None, "parts were asked for"


def test_seconds_are_those_of_the_mean_and_memory_that_of_the_longest(make_workload: Make) -> None:
    work, layout = make_workload("1.5b", new=512), Layout(trainers=2, samplers=2)
    known = AnswerLengths(mean=128, longest=129)
    whole, short = (plan_layout(work, layout, H200, {}, lengths) for lengths in (None, known))
    assert short.work == whole.work
    assert short.time.total < whole.time.total / 2


def test_a_cache_is_not_starved_for_wide_states_where_that_is_much_slower(make_workload: Make) -> None:
    """In turn on 80 GB: what fits first has float32 states and room for few answers. 2,048 of them wait for that, 256
    hardly do."""
    layout, gpu = Layout(trainers=4, samplers=4, parts=True), GPUS["h100-80"]
    few = make_workload("7b", new=4096)
    many = replace(few, rows_per_update=2048, max_running=1024)
    for work, is_worth_it in ((few, False), (many, True)):
        own = with_layout(work, layout)
        first = choose(own, gpu.usable_bytes, {})
        assert first is not None
        plan = plan_layout(work, layout, gpu, {})
        assert plan.fits
        assert (plan.work.choice.kv_tokens > first.kv_tokens) == is_worth_it
        before = plan_seconds(replace(own, choice=first), gpu).total
        assert plan.time.total < 0.95 * before if is_worth_it else plan.time.total == before
        kept = plan_layout(work, layout, gpu, {"kv_tokens": first.kv_tokens})
        assert kept.work.choice.kv_tokens == first.kv_tokens
