"""A synchronous step on one GPU takes as long in the simulation as in the planner, whose speeds it has."""

from __future__ import annotations

import dataclasses

import pytest

from temper.config.memory import MemoryChoice
from temper.planning.gpus import find_gpu
from temper.planning.seconds import plan_seconds
from temper.planning.workload import Workload
from temper.simulate.lengths import fixed
from temper.simulate.roofline import roofline_speeds
from tests.planning.conftest import shape_of_size
from tests.simulate.test_run import outcome

GPU = find_gpu("h200")
WORK = Workload(
    shape=shape_of_size("1.5b"),
    choice=MemoryChoice(tokens_per_microbatch=16384, kv_tokens=0, gradient_checkpointing=False, states="float32"),
    prompt_tokens=5, completion_tokens=400, group_size=2, rows_per_update=4, max_running=64,
)  # fmt: skip


def test_a_simulated_step_takes_as_long_as_a_planned_one() -> None:
    speeds = roofline_speeds(WORK, GPU, mean_tokens=400, is_shared=True)
    found = outcome(0, speeds=speeds, lengths=fixed(400), is_shared=True)
    assert found.seconds_per_step == pytest.approx(plan_seconds(WORK, GPU).total, rel=0.01)


def test_shorter_answers_make_a_token_cheaper_to_train_and_a_split_publishes_over_the_link() -> None:
    long, short = (roofline_speeds(WORK, GPU, mean_tokens=tokens, is_shared=True) for tokens in (400, 40))
    assert short.train_token < long.train_token, "attention sees less"
    apart = roofline_speeds(WORK, GPU, mean_tokens=400, is_shared=False)
    assert (long.publish, apart.publish) == (0.0, pytest.approx(WORK.shape.parameters * 2 / GPU.link))


def test_a_reference_is_paid_for_in_the_credit() -> None:
    with_reference = dataclasses.replace(WORK, frozen=(WORK.shape,))
    speeds = roofline_speeds(with_reference, GPU, mean_tokens=400, is_shared=True)
    assert speeds.credit_token * 4 * 400 == pytest.approx(plan_seconds(with_reference, GPU).seconds["reference"])
