"""Models that wait on the CPU between passes: a reference or a teacher takes device memory only while it scores.

Owns: moving their tensors there and back. They do not change on the device, so that nothing is copied back.
Refuses: models that are trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from temper.models.decoder import lay_end_to_end
from temper.models.lora.switch import AdapterOff

_HOME = "temper_home"
"""Attribute of an offloaded module."""


class _Home:
    """Where the tensors of an offloaded model live, and how many passes are using it now."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.device = device
        self.tensors: list[Tensor] = [*module.parameters(), *module.buffers()]
        self.passes = 0


def offload(module: nn.Module, device: torch.device) -> nn.Module:
    """From now on the module lives on the CPU; `on_device` brings it to `device`. It stays the same object."""
    assert not any(p.requires_grad for p in module.parameters()), "a model that is trained is not offloaded"
    module.to("cpu")
    setattr(module, _HOME, _Home(module, device))
    return module


@contextmanager
def on_device(module: nn.Module) -> Iterator[nn.Module]:
    """The module where it computes: for an offloaded one a copy of its tensors, made once for nested passes; for a
    policy without its adapter the policy, while that is off."""
    if isinstance(module, AdapterOff):
        with module.switched() as policy:
            yield policy
        return
    home: _Home | None = getattr(module, _HOME, None)
    if home is None or home.passes:
        yield from _counted(module, home)
        return
    waiting = [tensor.data for tensor in home.tensors]
    try:
        for tensor in home.tensors:
            tensor.data = tensor.data.to(home.device, copy=True)
        _lay_out(module)
        yield from _counted(module, home)
    finally:
        for tensor, data in zip(home.tensors, waiting, strict=True):
            tensor.data = data


def _counted(module: nn.Module, home: _Home | None) -> Iterator[nn.Module]:
    if home is None:
        yield module
        return
    home.passes += 1
    try:
        yield module
    finally:
        home.passes -= 1


def _lay_out(module: Any) -> None:
    """A moved model has lost the neighbourhood of weights that are multiplied together."""
    if hasattr(module, "get_decoder"):
        lay_end_to_end(module)
