"""Inputs of recomputed layers that wait in the host's memory for the backward pass.

Owns: sending them there while the next layer is computed, and bringing them back while the layer behind is
differentiated. Refuses: a CPU, where they are in the host's memory already; small tensors, which are not worth a copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

LEAST_BYTES = 1 << 20
AHEAD = 2
"""Tensors that are on their way back while one is used: both inputs of the layer before."""


class Mover(Protocol):
    """Copies between the device and the host that do not wait for each other."""

    def send(self, tensor: Tensor) -> Tensor:
        """A copy on the host, begun."""
        ...

    def bring(self, home: Tensor) -> Callable[[], Tensor]:
        """Begins the copy back. Called, the result waits for its end and gives the tensor."""
        ...


class CudaMover:
    """One stream of its own: what is sent and what comes back keep their order, and the computation does not wait."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def send(self, tensor: Tensor) -> Tensor:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        # Pinned memory is kept by torch's allocator and handed out again when the copies from it are done.
        home = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        with torch.cuda.stream(self._stream):
            home.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)
        return home

    def bring(self, home: Tensor) -> Callable[[], Tensor]:
        with torch.cuda.stream(self._stream):
            tensor = home.to(self._device, non_blocking=True)
        has_arrived = self._stream.record_event()

        def wait() -> Tensor:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(has_arrived)
            tensor.record_stream(current)
            return tensor

        return wait


class _Away:
    """One tensor on the host, and which was sent before it."""

    def __init__(self, mover: Mover, tensor: Tensor, before: _Away | None) -> None:
        self._mover, self._home = mover, mover.send(tensor)
        # Weak: a pass that is given up lets go of its tensors, whatever came behind them.
        self._before = None if before is None else weakref.ref(before)
        self._coming: Callable[[], Tensor] | None = None

    def call(self) -> None:
        """Begins to bring it back."""
        self._coming = self._coming or self._mover.bring(self._home)

    def take(self) -> Tensor:
        self.call()
        assert self._coming is not None, "it was called"
        place: _Away | None = self
        for _ in range(AHEAD):
            place = None if place is None or place._before is None else place._before()
            if place is not None:
                place.call()
        return self._coming()


class HostInputs:
    """Recomputes functions in the backward pass from inputs that wait on the host."""

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self._last: weakref.ref[_Away] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> HostInputs:
        """A copy of a model is not trained: it keeps a way that it does not go."""
        return self

    def recompute(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """As torch's checkpoint; arguments that are tensors are kept on the host."""
        with saved_tensors_hooks(self._pack, _unpack):
            return checkpoint(function, *arguments, **{**options, "use_reentrant": False})

    def _pack(self, tensor: Tensor) -> Tensor | _Away:
        if tensor.nbytes < LEAST_BYTES or isinstance(tensor, nn.Parameter):
            return tensor
        away = _Away(self._mover, tensor, None if self._last is None else self._last())
        self._last = weakref.ref(away)
        return away


def _unpack(kept: Tensor | _Away) -> Tensor:
    return kept.take() if isinstance(kept, _Away) else kept
