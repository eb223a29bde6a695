"""Estimates are within a third of what an H200 took, and change with what they depend on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from temper.planning.gpus import GPUS
from temper.planning.seconds import EXPERTS_REACH, TimePlan, decode_cost, plan_seconds
from temper.planning.shape import decoder_shape
from temper.planning.workload import AdapterShape, AnswerLengths, Workload, with_lengths
from tests.planning.conftest import EXPERTS

Make = Callable[..., Workload]


@pytest.fixture
def plan(make_workload: Make) -> Callable[..., TimePlan]:
    return lambda *arguments, **options: plan_seconds(make_workload(*arguments, **options), GPUS["h200"])


@pytest.mark.parametrize(
    ("arguments", "options", "part", "seen"),
    [
        (("1.5b",), {}, "decoding", 1.96),
        (("1.5b",), {}, "forward and backward", 2.81),
        (("7b", 512, 16384, "8bit"), {"recomputes": True}, "decoding", 4.7),
        (("7b", 512, 16384, "8bit"), {"recomputes": True}, "forward and backward", 11.9),
        (("1.5b", 512, 16384, "8bit"), {}, "update", 0.042),
        (
            ("7b",),
            {"recomputes": True, "adapter": AdapterShape(rank=32), "engine": "copied"},
            "forward and backward",
            11.0,
        ),
        (("7b",), {"offload": True}, "update", 1.61),
    ],
)
def test_parts_are_near_what_was_measured(
    arguments: Any, options: Any, part: str, seen: float, plan: Callable[..., TimePlan]
) -> None:
    assert plan(*arguments, **options).seconds[part] == pytest.approx(seen, rel=0.33)


def test_a_base_in_4_bits_is_drawn_with_as_slowly_as_was_measured(make_workload: Make) -> None:
    """7B, 16 rows of 2,000 tokens: a decode step of 13.5 ms. By hand: what a step moves, at what kernels reach."""
    adapter = AdapterShape(rank=32)
    work = make_workload("7b", 1950, adapter=adapter, has_four_bit_base=True)
    work = replace(work, rows_per_update=16, max_running=16)
    gpu, shape = GPUS["h200"], work.shape
    assert plan_seconds(work, gpu).seconds["decoding"] == pytest.approx(26.4, rel=0.33)
    moved = shape.layers * (0.53125 + 2 + 2) + shape.embedding * 2
    assert decode_cost(work, gpu).weights == pytest.approx(moved / (4.8e12 * 0.85))
    full = replace(work, has_four_bit_base=False)
    assert plan_seconds(work, gpu).seconds["decoding"] > 2 * plan_seconds(full, gpu).seconds["decoding"]


@pytest.mark.parametrize(("rows", "is_float8", "seen"), [
    (64, False, 11_409), (64, True, 15_873), (256, False, 23_586), (256, True, 33_100),
])  # fmt: skip
def test_tokens_per_second_are_near_what_was_measured_of_the_same_matrices(
    rows: int, is_float8: bool, seen: int, make_workload: Make
) -> None:
    work = replace(make_workload("7b", 128), rows_per_update=rows, max_running=rows, has_float8_sampler=is_float8)
    assert rows * 128 / plan_seconds(work, GPUS["h200"]).seconds["decoding"] == pytest.approx(seen, rel=0.15)


def test_states_that_come_and_go_are_those_of_the_dtype(make_workload: Make) -> None:
    """Masters of float16 take two bytes more, those of an adapter's factors none."""
    for dtype, adapter, each in (
        (torch.bfloat16, None, 10), (torch.float16, None, 12), (torch.float32, None, 8),
        (torch.bfloat16, AdapterShape(rank=32), 8),
    ):  # fmt: skip
        work = make_workload("7b", offload=True, dtype=dtype, adapter=adapter)
        seconds = plan_seconds(work, GPUS["h200"]).seconds["update"]
        assert seconds == pytest.approx(each * work.trained_parameters / GPUS["h200"].link)


def test_what_costs_more_takes_longer(plan: Callable[..., TimePlan], make_workload: Make) -> None:
    plain, recomputed = plan("7b"), plan("7b", recomputes=True)
    ratio = recomputed.seconds["forward and backward"] / plain.seconds["forward and backward"]
    assert ratio == pytest.approx(4 / 3, rel=0.05)
    assert plan("7b", new=1024).seconds["decoding"] > 2 * plain.seconds["decoding"]
    work = make_workload("7b")
    slow = plan_seconds(work, GPUS["a100-80"])
    assert slow.seconds["forward and backward"] == pytest.approx(989 / 312 * plain.seconds["forward and backward"])
    few = replace(work, choice=replace(work.choice, kv_tokens=work.choice.kv_tokens // 8))
    assert plan_seconds(few, GPUS["h200"]).seconds["decoding"] > 2 * plain.seconds["decoding"]


def test_a_stage_that_only_reads_draws_nothing(make_workload: Make) -> None:
    plan = plan_seconds(replace(make_workload("1.5b"), rolls=False), GPUS["h200"])
    assert plan.seconds.keys() == {"forward and backward", "update"}
    assert plan.slowest == "forward and backward"
    assert plan.total == pytest.approx(sum(plan.seconds.values()))


def test_trainers_share_out_rows_and_only_parts_share_the_update(make_workload: Make) -> None:
    one, copies, parts = (
        plan_seconds(make_workload("7b", engine="elsewhere", **more), GPUS["h200"])
        for more in ({}, {"trainers": 8}, {"trainers": 8, "parts": True})
    )
    for plan in (copies, parts):
        assert plan.seconds["forward and backward"] == pytest.approx(one.seconds["forward and backward"] / 8)
        assert plan.seconds["exchange"] > 0
    assert copies.seconds["update"] == one.seconds["update"]
    assert parts.seconds["update"] == pytest.approx(one.seconds["update"] / 8)
    uneven = plan_seconds(make_workload("7b", engine="elsewhere", trainers=100), GPUS["h200"])
    assert uneven.seconds["forward and backward"] == pytest.approx(one.seconds["forward and backward"] * 3 / 256)


def test_a_reference_is_scored_by_all_trainers(make_workload: Make) -> None:
    work = make_workload("7b", frozen=(make_workload("7b").shape,), engine="elsewhere")
    one, four = (plan_seconds(replace(work, trainers=n), GPUS["h200"]).seconds["reference"] for n in (1, 4))
    assert four == pytest.approx(one / 4)


def test_every_update_is_exchanged(make_workload: Make) -> None:
    work = make_workload("7b", trainers=8, engine="elsewhere")
    twice = replace(work, updates=2, rows_per_update=128)
    one, two, four = (
        plan_seconds(own, GPUS["h200"]).seconds["exchange"] for own in (work, twice, replace(twice, epochs=2))
    )
    assert (two, four) == (pytest.approx(2 * one), pytest.approx(4 * one))


def test_samplers_share_out_answers_and_run_ahead_with_fuller_steps(make_workload: Make) -> None:
    """256 answers at most 64 at once: four rounds on one GPU, one on four; and with those of the next step under way
    half as many decode steps for each, which are fuller."""
    work = make_workload("7b", engine="apart", num_samplers=1)
    work = replace(work, max_running=64)
    one, four = (plan_seconds(replace(work, num_samplers=n), GPUS["h200"]) for n in (1, 4))
    assert four.seconds["decoding"] == pytest.approx(one.seconds["decoding"] / 4)
    assert four.seconds["prompts"] == pytest.approx(one.seconds["prompts"] / 4)
    sixteen, ahead = (
        plan_seconds(replace(work, num_samplers=16, ahead=ahead), GPUS["h200"]).seconds["decoding"] for ahead in (0, 1)
    )
    assert sixteen / 2 < ahead < sixteen


def test_sides_with_gpus_of_their_own_overlap_only_when_they_may_run_ahead(make_workload: Make) -> None:
    sync, ahead = (
        plan_seconds(make_workload("7b", engine="apart", num_samplers=2, ahead=n), GPUS["h200"]) for n in (0, 1)
    )
    published = sync.seconds["publishing"]
    assert published > 0
    assert sync.total == pytest.approx(sum(sync.seconds.values()))
    assert ahead.total == pytest.approx(max(ahead.drawing, ahead.training) + published)
    assert ahead.drawing + ahead.training + published == pytest.approx(sum(ahead.seconds.values()))
    assert ahead.slowest == "forward and backward"
    one_gpu = plan_seconds(make_workload("7b", engine="copied", ahead=1), GPUS["h200"])
    assert one_gpu.total == pytest.approx(sum(one_gpu.seconds.values())), "they compete for it"


def test_experts_that_a_token_does_not_use_cost_no_products(make_workload: Make) -> None:
    work = replace(make_workload("1.5b"), shape=decoder_shape(EXPERTS))
    more = replace(work, shape=replace(work.shape, num_experts=256))
    one, two = (plan_seconds(own, GPUS["h200"]) for own in (work, more))
    for part in ("prompts", "forward and backward"):
        assert one.seconds[part] < two.seconds[part] < 1.01 * one.seconds[part], "the router alone"
    assert two.seconds["decoding"] > 1.4 * one.seconds["decoding"], "but weights that 256 sequences need are read"
    # Worked: 6 FLOPs for an active parameter and token; head and attention on top; at the reach that experts have.
    active, tokens = work.shape.active_layers, 32 * (50 + 8 * 512)
    least = 6 * active * tokens / (989e12 * EXPERTS_REACH)
    assert least < one.seconds["forward and backward"] < 1.3 * least


def test_an_engine_over_four_gpus_reads_a_quarter_on_each_and_adds_up_what_they_computed(make_workload: Make) -> None:
    work, gpu = make_workload("7b", engine="copied"), GPUS["h200"]
    four = replace(work, engine_gpus=4)
    alone, shared = decode_cost(work, gpu), decode_cost(four, gpu)
    assert alone.sums == 0.0
    for part in ("weights", "row", "cached_token"):
        assert getattr(shared, part) == pytest.approx(getattr(alone, part) / 4)
    # Worked: two sums in each of 28 layers, each a ring there and one back over 256 states of 3,584 numbers.
    ring = 256 * 3584 * 2 * (3 / 4) / gpu.peer_link / 0.75 + 8.4e-6 + 3 * 3.4e-6
    assert shared.sums == pytest.approx(28 * 2 * 2 * ring)
    one, some = plan_seconds(work, gpu).seconds, plan_seconds(four, gpu).seconds
    assert 0.25 < some["decoding"] / one["decoding"] < 1
    assert some["prompts"] / one["prompts"] > 0.25


def test_few_sequences_read_few_experts(make_workload: Make) -> None:
    work = replace(make_workload("1.5b"), shape=decoder_shape(EXPERTS), max_running=1)
    shape = work.shape
    read = 48 * (shape.attention + 128 * 2048 + shape.experts * 8 / 128) + shape.embedding
    assert decode_cost(work, GPUS["h200"]).weights == pytest.approx(2 * read / (4.8e12 * 0.85))


def test_no_step_is_shorter_than_its_longest_answer_and_steps_under_way_together_share_it(make_workload: Make) -> None:
    """A thousand decode steps that read the weights and launch their kernels, for one of 100 tokens in the mean."""
    work = make_workload("7b", new=100, engine="apart", num_samplers=64)
    known = with_lengths(work, AnswerLengths(mean=100, longest=1000))
    cost = decode_cost(work, GPUS["h200"])
    alone = 1000 * (cost.weights + cost.kernels + cost.row)
    for ahead, seconds in ((0, alone), (3, alone / 4)):
        plan = plan_seconds(replace(known, ahead=ahead), GPUS["h200"])
        assert plan.seconds["decoding"] == pytest.approx(seconds)
        assert plan.reasons["decoding"] == "the longest answer"
    few = plan_seconds(replace(known, num_samplers=1, max_running=8), GPUS["h200"])
    assert few.seconds["decoding"] > alone, "32 rounds of 100 tokens"
