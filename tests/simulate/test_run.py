"""The real loop on the virtual clock: seconds, idle shares and ages that can be worked out by hand."""

from __future__ import annotations

import pytest

from temper.protocols import BatchSource, Trainer
from temper.rollout.buffer import Buffer
from temper.rollout.episode import EpisodeSetup
from temper.rollout.source import RolloutSettings, RolloutSource
from temper.simulate.lengths import Lengths, fixed, tail
from temper.simulate.outcome import SimulatedRun, StepTrace, ratio_to_draw_order
from temper.simulate.run import Credit, Scenario, simulate
from temper.simulate.sampler import SamplerLimits
from temper.simulate.speeds import Speeds
from temper.simulate.split import Split
from temper.tasks.dataset import FileSource, Stream
from temper.types import Message, Task

TASKS = tuple(Task(id=f"t{i}", messages=(Message(role="user", content=str(i)),)) for i in range(50))
PLAIN = Speeds(decode_step=1.0, decode_row=0.0, train_token=0.0, train_step=6.0)
"""A decode step takes a second whoever is in it, an optimiser step takes 6."""


def outcome(
    staleness: int, *, speeds: Speeds = PLAIN, lengths: Lengths = fixed(10), is_shared: bool = False, steps: int = 6,
    degenerate: float = 0.0, split: Split | None = None, groups: int = 2,
) -> SimulatedRun:  # fmt: skip
    split = split or Split(samplers=1, trainers=1, is_shared=is_shared)

    def make_source(setup: EpisodeSetup, trainer: Trainer, credit: Credit) -> BatchSource:
        buffer = Buffer(groups_per_step=groups, max_staleness=staleness, max_rounds=50, version=trainer.version)
        settings = RolloutSettings(
            group_size=2, min_members=2, drop_degenerate=True, error_limit=0.1, step_seconds=1e5, prefix="stage 0"
        )
        return RolloutSource(setup, Stream([FileSource("tasks", TASKS)], [1.0], seed=0), buffer, settings, credit)

    return simulate(
        Scenario(
            make_source=make_source, speeds=speeds, lengths=lengths, prompt_tokens=lambda task: 5,
            split=split, limits=SamplerLimits(replicas=split.samplers, max_running=64), group_size=2,
            max_staleness=staleness, steps=steps, max_new_tokens=1000, degenerate=degenerate,
        )
    )  # fmt: skip


def test_a_synchronous_step_is_rollout_and_training_one_after_the_other() -> None:
    found = outcome(0, is_shared=True)
    assert found.seconds_per_step == pytest.approx(16.0)
    assert found.trainer_idle == pytest.approx(10 / 16)
    assert found.sampler_idle == pytest.approx(6 / 16)
    assert found.tokens_per_second == pytest.approx(40 / 16)
    assert (found.stale_mean, found.stale_max, found.gpus) == (0.0, 0, 1)


def test_asynchronous_steps_overlap_on_devices_of_their_own() -> None:
    # Worked: a group starts when the weights of two steps before are there, and takes 10 s: 16 s for two steps.
    assert outcome(1).seconds_per_step == pytest.approx(8.0)
    found = outcome(2)
    assert found.seconds_per_step == pytest.approx(6.0), "with three steps under way the trainer never waits"
    assert found.trainer_idle == pytest.approx(0.0, abs=1e-6)
    assert (found.stale_max, found.gpus) == (2, 2)


def test_on_one_device_asynchrony_cannot_be_faster_than_both_sides_added_up() -> None:
    found = outcome(1, is_shared=True)
    assert found.seconds_per_step * (2 - found.sampler_idle - found.trainer_idle) <= found.seconds_per_step + 1e-6
    # It gains only what is drawn together: 4 groups in 10 s in place of 2.
    assert found.seconds_per_step == pytest.approx(6.0 + 5.0)


def test_the_long_tail_holds_up_a_synchronous_step_and_a_bound_above_0_hides_it() -> None:
    heavy = tail(10, share=0.1, times=8, seed=1)
    sync, ahead = outcome(0, lengths=heavy, steps=30), outcome(4, lengths=heavy, steps=30)
    assert sync.seconds_per_step > 2 * ahead.seconds_per_step
    assert ahead.stale_max <= 4


def test_groups_without_a_difference_are_drawn_again_and_cost_time() -> None:
    found = outcome(0, degenerate=0.5, steps=20)
    assert found.groups_dropped > 0.5
    assert found.seconds_per_step > 20.0, "most steps take a second round"


def test_tokens_of_dropped_groups_are_drawn_and_not_trained() -> None:
    assert outcome(0).drawn_per_trained == pytest.approx(1.0)
    found = outcome(0, degenerate=0.5, steps=20)
    assert found.drawn_per_trained == pytest.approx(1 + found.groups_dropped / 2), "two groups a step are trained"


def test_in_draw_order_nobody_is_favoured_and_steps_are_as_long_as_their_answers() -> None:
    heavy = tail(10, share=0.3, times=8, seed=1)
    found = outcome(2, lengths=heavy, steps=20)
    assert found.length_ratio == pytest.approx(1.0)
    assert found.shortest_step < 0.7
    assert found.longest_step > 1.5


def trace(lengths: dict[int, float], dropped: tuple[int, ...] = ()) -> StepTrace:
    return StepTrace(
        time=0.0, sampler_busy=0.0, trainer_busy=0.0, decoded=0.0, tokens_drawn=0, lengths=lengths, tokens_trained=0,
        dropped=dropped, ages=(),
    )  # fmt: skip


def test_lengths_are_compared_with_what_draw_order_would_have_trained() -> None:
    """Worked: draws 0 to 5 are 10, 80, 10, 10, 30 and 10 long, 2 is dropped. The second step would have had 3 and 4."""
    offered = {0: 10.0, 1: 80.0, 2: 10.0, 3: 10.0, 4: 30.0, 5: 10.0}
    short_first = [trace({0: 10.0, 3: 10.0}, dropped=(2,)), trace({4: 30.0, 5: 10.0})]
    assert ratio_to_draw_order(short_first, offered, skip=1) == pytest.approx(1.0)
    assert ratio_to_draw_order(short_first, offered, skip=0) == pytest.approx(60 / 130), "1 is still to come"


@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        ("publish", 3.0),
        ("after_step", 3.0),
        ("episode", 3.0),
        ("request", 4 * 3.0),
        ("prefill_token", 2 * 5 * 3.0),
        ("credit_token", 40 * 3.0),
        ("train_token", 60 * 3.0),
    ],
)
def test_every_speed_is_in_the_step(name: str, seconds: float) -> None:
    """In a synchronous step all of them follow each other: 40 tokens are drawn, 60 are trained."""
    speeds = Speeds(**{"decode_step": 1.0, "decode_row": 0.0, "train_token": 0.0, "train_step": 6.0, name: 3.0})
    assert outcome(0, speeds=speeds, is_shared=True).seconds_per_step == pytest.approx(16.0 + seconds)


@pytest.mark.parametrize("name", ["credit_token", "after_step"])
def test_on_one_device_checks_and_credit_take_the_sampler_s_time_too(name: str) -> None:
    """Two seconds a step: in turn both sides stand still for them, apart the sampler draws on."""
    seconds = {"credit_token": 2.0 / 40, "after_step": 2.0}[name]
    speeds = Speeds(**{"decode_step": 1.0, "decode_row": 0.0, "train_token": 0.0, "train_step": 6.0, name: seconds})
    assert outcome(1, speeds=speeds, is_shared=True).seconds_per_step == pytest.approx(6.0 + 2.0 + 5.0, rel=0.05)
    assert outcome(2, speeds=speeds).sampler_idle == pytest.approx(outcome(2).sampler_idle, abs=0.2)


def test_the_same_scenario_has_the_same_outcome() -> None:
    lengths = tail(10, share=0.3, times=3, seed=1)
    assert outcome(2, lengths=lengths) == outcome(2, lengths=lengths)
