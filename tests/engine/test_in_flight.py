"""The clock of what a sampler had to do: over requests, not per request, and not while it is held."""

from __future__ import annotations

import asyncio

import pytest

from temper.engine.in_flight import InFlight
from temper.engine.local.engine import EngineSettings, LocalEngine
from temper.types import Request, SamplingParams
from tests.fakes.models import make_family_model


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_overlapping_requests_count_once_and_gaps_do_not() -> None:
    clock = Clock()
    flight = InFlight(clock)
    clock.now += 5  # nothing to do
    with flight.request():
        clock.now += 2
        with flight.request():
            clock.now += 3
        clock.now += 1
    clock.now += 4
    assert flight.seconds() == 6
    assert flight.seconds() == 0


def test_a_request_that_goes_on_is_counted_up_to_now() -> None:
    clock = Clock()
    flight = InFlight(clock)
    with flight.request():
        clock.now += 2
        assert flight.seconds() == 2
        clock.now += 3
        with flight.held():
            clock.now += 7  # it waits for the trainer
        clock.now += 1
    assert flight.seconds() == 4


def test_a_request_that_fails_ends_too() -> None:
    clock = Clock()
    flight = InFlight(clock)

    def fail() -> None:
        with flight.request():
            clock.now += 1
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    clock.now += 1
    assert flight.seconds() == 1


def test_an_engine_that_makes_way_for_the_trainer_is_not_drawing() -> None:
    engine = LocalEngine(
        make_family_model(),
        EngineSettings(seed=0, block_size=16, num_blocks=16, max_running=2, tokens_per_step=16, max_length=64),
    )

    async def draw() -> tuple[float, float]:
        with engine.paused():
            asking = asyncio.create_task(
                engine.generate(Request(id="r", prompt_ids=(5,), params=SamplingParams(max_new_tokens=2)))
            )
            await asyncio.sleep(0.05)
            held = engine.stats()["drawing_seconds"]
        await asking
        return held, engine.stats()["drawing_seconds"]

    held, drawn = asyncio.run(draw())
    assert held == 0
    assert drawn > 0
