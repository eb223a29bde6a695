"""A synchronous step takes as long in the simulation as in the planner, whose speeds it has, on one GPU and on many."""

from __future__ import annotations

import dataclasses

import pytest

from temper.config.memory import MemoryChoice
from temper.planning.exchange import LINK_REACH
from temper.planning.gpus import find_gpu
from temper.planning.layout import Layout, with_layout
from temper.planning.seconds import plan_seconds
from temper.planning.workload import AnswerLengths, Workload
from temper.simulate.lengths import fixed
from temper.simulate.outcome import SimulatedRun
from temper.simulate.roofline import roofline_speeds
from temper.simulate.split import Split
from tests.planning.conftest import shape_of_size
from tests.simulate.test_run import outcome

GPU = find_gpu("h200")
WORK = Workload(
    shape=shape_of_size("1.5b"),
    choice=MemoryChoice(tokens_per_microbatch=16384, kv_tokens=0, gradient_checkpointing=False, states="float32"),
    prompt_tokens=5, completion_tokens=400, group_size=2, rows_per_update=4, max_running=64,
)  # fmt: skip


def test_a_simulated_step_takes_as_long_as_a_planned_one() -> None:
    speeds = roofline_speeds(WORK, GPU)
    found = outcome(0, speeds=speeds, lengths=fixed(400), is_shared=True)
    assert found.seconds_per_step == pytest.approx(plan_seconds(WORK, GPU).total, rel=0.01)


SPREAD = dataclasses.replace(WORK, rows_per_update=32, frozen=(WORK.shape,))
"""16 groups of 2, with a reference."""
LAYOUTS = [
    Layout(trainers=4, samplers=4, parts=False),
    Layout(trainers=4, samplers=4, parts=True),
    Layout(trainers=16, samplers=16, parts=True),
    Layout(trainers=2, samplers=8, parts=True, is_apart=True),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_simulator_and_planner_agree_on_many_gpus(layout: Layout) -> None:
    """Every part of a synchronous step is in both: drawing, a reference, training, the update, exchange, publishing."""
    work = with_layout(SPREAD, layout)
    planned = plan_seconds(work, GPU)
    assert {"reference", "exchange", "update", "publishing", "decoding", "prompts"} <= planned.seconds.keys()
    found = simulate_layout(work, layout, staleness=0)
    assert found.seconds_per_step == pytest.approx(planned.total, rel=0.01)
    assert (found.trainers, found.samplers, found.parts) == (layout.trainers, layout.samplers, layout.parts)
    assert found.gpus == layout.gpus


def simulate_layout(work: Workload, layout: Layout, staleness: int) -> SimulatedRun:
    split = Split(
        samplers=work.drawing_gpus, trainers=layout.trainers, is_shared=not layout.is_apart, parts=layout.parts
    )
    speeds = roofline_speeds(work, GPU)
    return outcome(staleness, speeds=speeds, lengths=fixed(400), split=split, groups=16, steps=8)


def test_a_run_that_is_ahead_takes_as_long_as_its_longer_side() -> None:
    """By the plan; the simulation knows that a side waits for the other now and then."""
    layout = Layout(trainers=1, samplers=2, is_apart=True)
    work = dataclasses.replace(with_layout(SPREAD, layout), ahead=4)
    planned, found = plan_seconds(work, GPU), simulate_layout(work, layout, staleness=4)
    assert planned.overlaps
    assert planned.total * 0.99 <= found.seconds_per_step <= planned.total * 1.3


def test_shorter_answers_make_a_token_cheaper_to_train_and_a_split_publishes_over_the_link() -> None:
    long, short = (roofline_speeds(WORK, GPU, lengths=AnswerLengths(mean=tokens, longest=400)) for tokens in (400, 40))
    assert short.train_token < long.train_token, "attention sees less"
    apart = with_layout(WORK, Layout(trainers=1, samplers=1, is_apart=True))
    sent = roofline_speeds(apart, GPU).publish
    assert (long.publish, sent) == (0.0, pytest.approx(WORK.shape.parameters * 2 / (GPU.peer_link * LINK_REACH)))


def test_speeds_are_those_of_one_gpu_however_many_there_are() -> None:
    one, many = (roofline_speeds(with_layout(SPREAD, Layout(trainers=count, samplers=count)), GPU) for count in (1, 8))
    for name in ("decode_row", "decode_kv", "prefill_token", "train_token"):
        assert getattr(many, name) == pytest.approx(getattr(one, name))


def test_a_reference_is_paid_for_in_the_credit() -> None:
    with_reference = dataclasses.replace(WORK, frozen=(WORK.shape,))
    speeds = roofline_speeds(with_reference, GPU)
    assert speeds.credit_token * 4 * 400 == pytest.approx(plan_seconds(with_reference, GPU).seconds["reference"])
