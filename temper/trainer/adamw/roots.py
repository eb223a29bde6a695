"""Square roots with the same bits on every device.

Owns: which library takes them. Refuses: anything but IEEE 754's rounding to the nearest.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def rounded_root(values: Tensor) -> Tensor:
    """A new tensor. On a CPU torch asks MKL, of whose roots 6 in 1000 are a unit off; numpy asks the processor."""
    if values.device.type != "cpu":
        return values.sqrt()
    return torch.from_numpy(np.sqrt(values.numpy()))
