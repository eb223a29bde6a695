"""State that passes through a device: every bucket arrives before it is used, is home before it is read, and no slot is
filled while what it held is still leaving."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from temper.errors import UserError
from temper.trainer.adamw import residence
from temper.trainer.adamw.moments import Held, HeldPart
from temper.trainer.adamw.residence import SLOTS, Residence

PARTS = {"codes": HeldPart(torch.int8), "scale": HeldPart(torch.float32, 256)}
SIZES = [512, 512, 512, 512, 512, 256, 768]


class LazyStream:
    """A stream that does nothing before somebody waits for it: the slowest there can be. Work of the test itself is
    done at once, on `current`."""

    running: LazyStream | None = None

    def __init__(self, device: object = None) -> None:
        self.queue: list[Callable[[], None]] = []

    def record_event(self) -> Callable[[], None]:
        reached = len(self.queue)
        queue = self.queue

        def finish() -> None:
            for place in range(reached):
                work, queue[place] = queue[place], lambda: None
                work()

        return finish

    def wait_event(self, finish: Callable[[], None]) -> None:
        self.queue.append(finish)
        if self is CURRENT:
            finish()

    def wait_stream(self, other: LazyStream) -> None:
        self.wait_event(other.record_event())


CURRENT = LazyStream()


@contextmanager
def on(stream: LazyStream) -> Iterator[None]:
    LazyStream.running = stream
    yield
    LazyStream.running = None


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Residence]:
    """Makes a residence that believes in a GPU."""
    copy = residence._copy

    def lazy_copy(source: Held, target: Held) -> None:
        assert LazyStream.running is not None, "a copy outside of the streams for copies"
        LazyStream.running.queue.append(lambda: copy(source, target))

    for name, value in {"Stream": LazyStream, "stream": on, "current_stream": lambda device: CURRENT}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(residence, "_copy", lazy_copy)

    def make() -> Residence:
        made = Residence(SIZES, [PARTS] * len(SIZES), torch.device("cpu"), offload=True)
        made._is_away = True
        return made

    return make


def add(made: Residence, times: int) -> list[dict[str, Any]]:
    """Adds the number of the bucket to everything, several times over; returns what is home then."""
    for _ in range(times):
        for number, held in enumerate(made.visit(), start=1):
            held["codes"] += number
            held["scale"] += number
    return [{name: tensor.tolist() for name, tensor in home.items()} for home in made.homes()]


def expected(times: int) -> list[dict[str, Any]]:
    return [
        {"codes": [times * number] * size, "scale": [float(times * number)] * (size // 256)}
        for number, size in enumerate(SIZES, start=1)
    ]


def test_offloaded_state_is_as_if_it_had_never_left(away: Callable[[], Residence]) -> None:
    assert add(away(), 3) == expected(3)
    assert add(Residence(SIZES, [PARTS] * len(SIZES), torch.device("cpu"), offload=False), 3) == expected(3)


@pytest.mark.parametrize("forgotten", ["arrival", "departure", "end"])
def test_each_of_the_waits_is_needed(
    away: Callable[[], Residence], monkeypatch: pytest.MonkeyPatch, forgotten: str
) -> None:
    """The mutations: a residence that forgets to wait."""
    wait_event, wait_stream = LazyStream.wait_event, LazyStream.wait_stream

    def forgets_event(self: LazyStream, finish: Callable[[], None]) -> None:
        if (self is CURRENT) != (forgotten == "arrival"):
            wait_event(self, finish)

    if forgotten == "end":
        monkeypatch.setattr(LazyStream, "wait_stream", lambda self, other: None)
    else:
        monkeypatch.setattr(LazyStream, "wait_event", forgets_event)
        monkeypatch.setattr(LazyStream, "wait_stream", lambda self, other: wait_event(self, other.record_event()))
    assert wait_stream is not LazyStream.wait_stream
    assert add(away(), 3) != expected(3)


def test_few_buckets_are_on_the_device_at_once(away: Callable[[], Residence]) -> None:
    found = {held["codes"].untyped_storage().data_ptr() for held in away().visit()}
    assert len(found) == SLOTS


def test_a_host_without_memory_to_pin_is_named_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*sizes: int, **options: object) -> torch.Tensor:
        assert options["pin_memory"]
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch, "zeros", refuse)
    with pytest.raises(UserError, match=r'no pinned memory .*out of memory.* optim\.states = "bfloat16" or "8bit"'):
        Residence(SIZES, [PARTS] * len(SIZES), torch.device("cuda"), offload=True)
