"""Seconds of training over many GPUs, speeds by name, and who gets which GPU."""

from __future__ import annotations

import pytest

from temper.errors import UserError
from temper.simulate.speeds import Speeds, TrainingWork, in_parts, training_seconds, with_given
from temper.simulate.split import Split, StepSize, split_gpus

SPEEDS = Speeds(decode_step=0.01, decode_row=0.001, train_token=0.001, train_step=2.0, exchange=0.5)
WORK = TrainingWork(tokens=8000, rows=8, updates=2)


def test_training_is_shared_out_by_whole_rows() -> None:
    # Worked: 8 s of tokens and two updates of 2 s; on several GPUs each update has an exchange of half a second.
    assert training_seconds(SPEEDS, WORK, 1) == pytest.approx(8.0 + 4.0)
    assert training_seconds(SPEEDS, WORK, 2) == pytest.approx(4.0 + 2 * (2.0 + 0.5))
    assert training_seconds(SPEEDS, WORK, 3) == pytest.approx(4.0 + 2 * (2.0 + 0.5)), "two of four rows for one of them"
    assert training_seconds(SPEEDS, WORK, 100) == pytest.approx(2.0 + 2 * (2.0 + 0.5)), "a row is never cut"


def test_an_update_is_shared_out_by_trainers_that_hold_parts() -> None:
    assert training_seconds(in_parts(SPEEDS, 4), WORK, 4) == pytest.approx(2.0 + 2 * (0.5 + 0.5))


def test_speeds_are_given_by_name() -> None:
    assert with_given(SPEEDS, {"publish": 3.0}).publish == 3.0
    assert with_given(None, {"decode_step": 1, "decode_row": 0, "train_token": 0}).decode_seconds(7, 0) == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"decode_stpe": 1.0}, 'Did you mean "decode_step"'),
        ({"decode_step": 1.0}, "--speed decode_row=... --speed train_token=..."),
        ({"decode_step": -1.0, "decode_row": 0.0, "train_token": 0.0}, "no number of seconds"),
        ({"decode_step": float("nan"), "decode_row": 0.0, "train_token": 0.0}, "no number of seconds"),
        ({"decode_step": 0.0, "decode_row": 0.0, "train_token": 0.0}, "takes no time"),
    ],
)
def test_speeds_that_cannot_be_are_refused(given: dict[str, float], said: str) -> None:
    with pytest.raises(UserError) as found:
        with_given(None, given)
    assert said in str(found.value)


SIZE = StepSize(rows=64, prompt_tokens=100, answer_tokens=400, max_running=64)


def test_one_gpu_and_synchronous_steps_are_shared() -> None:
    assert split_gpus(SPEEDS, SIZE, gpus=1, max_staleness=4) == Split(samplers=1, trainers=1, is_shared=True)
    assert split_gpus(SPEEDS, SIZE, gpus=8, max_staleness=0) == Split(samplers=8, trainers=8, is_shared=True)


def test_the_slower_side_gets_more_gpus() -> None:
    slow_training = with_given(SPEEDS, {"train_token": 0.01})
    few, many = (split_gpus(own, SIZE, gpus=16, max_staleness=2).trainers for own in (SPEEDS, slow_training))
    assert 1 <= few < many <= 15


def test_a_given_split_is_kept_and_an_impossible_one_refused() -> None:
    assert split_gpus(SPEEDS, SIZE, gpus=8, max_staleness=1, trainers=3).samplers == 5
    with pytest.raises(UserError, match="at least one must be left to draw"):
        split_gpus(SPEEDS, SIZE, gpus=8, max_staleness=1, trainers=8)
