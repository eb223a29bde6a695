"""An adapted policy as it was before its adapter: a reference over a model that cannot be copied.

Owns: switching the adapter off for a pass, and on again. Refuses: training, and passes of both at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from temper.models.experts.routes import replays
from temper.models.lora.low_rank import is_adapted


class AdapterOff(nn.Module):
    """Stands for the policy without its adapter. It has no tensors of its own, and passes go through the policy:
    wrapping.without_adapter copies the tree of modules, which a model that torch has cut does not allow."""

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self._policy = (policy,)  # not a submodule: who freezes this must not freeze the policy

    @property
    def config(self) -> Any:
        return self._policy[0].config

    def get_decoder(self) -> Any:
        return self._policy[0].get_decoder()  # type: ignore[operator]

    @contextmanager
    def switched(self) -> Iterator[nn.Module]:
        """The policy, whose adapter is off until this ends. May be nested."""
        policy: Any = self._policy[0]
        layers: list[Any] = [module for module in policy.modules() if is_adapted(module)]
        # Not by peft's enable_adapters: that freezes the factors.
        before = [layer._disable_adapters for layer in layers], replays(policy)
        try:
            for layer in layers:
                layer._disable_adapters = True
            policy.temper_replays = replays(self)
            yield policy
        finally:
            for layer, was_off in zip(layers, before[0], strict=True):
                layer._disable_adapters = was_off
            policy.temper_replays = before[1]
