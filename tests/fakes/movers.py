"""Copies between a device and its host, where there is no device."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


class FakeMover:
    """Copies at once, and remembers the order."""

    def __init__(self, spoil: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> None:
        self.events: list[str] = []
        self._numbers: dict[int, int] = {}
        self._spoil = spoil

    def send(self, tensor: Tensor) -> Tensor:
        home = self._spoil(tensor.detach().clone())
        self._numbers[id(home)] = len(self._numbers)
        self.events.append(f"send {self._numbers[id(home)]}")
        return home

    def bring(self, home: Tensor) -> Callable[[], Tensor]:
        number = self._numbers[id(home)]
        self.events.append(f"bring {number}")

        def wait() -> Tensor:
            self.events.append(f"use {number}")
            return home.clone()

        return wait
