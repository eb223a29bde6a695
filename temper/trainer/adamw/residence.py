"""Where the optimiser's state lives between updates: beside the weights, or in the memory of the host.

Owns: its tensors, and bringing them to the device and back bucket by bucket, while the bucket before is being updated.
Refuses: what the numbers mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from temper.errors import UserError
from temper.trainer.adamw.moments import Held, HeldPart

SLOTS = 3
"""Buckets on the device at once: one arrives, one is updated, one leaves."""

_ALIGNMENT = 512
"""Bytes that the parts of a slot begin at multiples of."""


class Residence:
    """The state of all buckets, zero at first."""

    def __init__(
        self, sizes: Sequence[int], parts: Sequence[Mapping[str, HeldPart]], device: torch.device, offload: bool
    ) -> None:
        """Sizes and parts of each bucket. Offloaded from a CPU, the state is where it was."""
        self._device = device
        self._is_away = offload and device.type == "cuda"
        self._homes = [
            {name: self._zeros(size // part.values_each, part.dtype) for name, part in of.items()}
            for size, of in zip(sizes, parts, strict=True)
        ]

    def _zeros(self, count: int, dtype: torch.dtype) -> Tensor:
        if not self._is_away:
            return torch.zeros(count, dtype=dtype, device=self._device)
        try:
            return torch.zeros(count, dtype=dtype, pin_memory=True)
        except RuntimeError as error:
            raise UserError(
                f"optim.offload: the host gave no pinned memory for the optimiser's state ({error}). Free memory of "
                f'the host, or hold less there: optim.states = "bfloat16" or "8bit"'
            ) from error

    def homes(self) -> Sequence[Held]:
        """The state where it lives, by bucket, to be read and changed in place by the host."""
        if self._is_away:
            torch.cuda.synchronize(self._device)  # copies of the last update may still be on their way
        return self._homes

    def visit(self) -> Iterator[Held]:
        """The state of bucket after bucket on the device. Changes of its tensors in place are kept."""
        return self._stream() if self._is_away else iter(self._homes)

    def _stream(self) -> Iterator[Held]:
        """Three streams: copies in, the caller's own, copies out. Events make each wait for what it needs alone."""
        current = torch.cuda.current_stream(self._device)
        incoming, outgoing = (torch.cuda.Stream(self._device) for _ in range(2))  # type: ignore[no-untyped-call]
        room = max(_slot_bytes(home) for home in self._homes)
        slots = [torch.empty(room, dtype=torch.uint8, device=self._device) for _ in range(min(SLOTS, len(self._homes)))]
        # Also for what had this memory before, and for the copies out of the last visit, which `current` waited for.
        incoming.wait_stream(current)
        has_left: dict[int, torch.cuda.Event] = {}

        def fetch(number: int) -> tuple[dict[str, Tensor], torch.cuda.Event]:
            if (leaver := number - len(slots)) in has_left:
                incoming.wait_event(has_left[leaver])
            held = _views(slots[number % len(slots)], self._homes[number])
            with torch.cuda.stream(incoming):
                _copy(self._homes[number], held)
            return held, incoming.record_event()

        try:
            following = fetch(0)
            for number, home in enumerate(self._homes):
                held, has_arrived = following
                if number + 1 < len(self._homes):
                    following = fetch(number + 1)
                current.wait_event(has_arrived)
                yield held
                outgoing.wait_event(current.record_event())
                with torch.cuda.stream(outgoing):
                    _copy(held, home)
                has_left[number] = outgoing.record_event()
        finally:
            # The slots go back to the allocator of `current`, which must not hand them out while copies are under way.
            current.wait_stream(incoming)
            current.wait_stream(outgoing)


def _copy(source: Held, target: Held) -> None:
    for name, tensor in source.items():
        target[name].copy_(tensor, non_blocking=True)


def _slot_bytes(home: Held) -> int:
    return sum(_aligned(tensor.nbytes) for tensor in home.values())


def _views(slot: Tensor, home: Held) -> dict[str, Tensor]:
    """Room in a slot for each part."""
    views, place = {}, 0
    for name, tensor in home.items():
        views[name] = slot[place : place + tensor.nbytes].view(tensor.dtype)
        place += _aligned(tensor.nbytes)
    return views


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
