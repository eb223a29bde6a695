"""What the trainer hands to the samplers.

Owns: which tensors are weights. Refuses: copying; a sampler on the same device shares the storage.
"""

from __future__ import annotations

from torch import Tensor, nn

from temper.types import Publication


def publish(model: nn.Module, version: int) -> Publication:
    """Every parameter, and every buffer that belongs to the checkpoint, by name. Tied ones appear once."""
    tensors: dict[str, Tensor] = {name: parameter.detach() for name, parameter in model.named_parameters()}
    saved = model.state_dict()
    tensors |= {name: buffer for name, buffer in model.named_buffers() if name in saved}
    return Publication(version=version, tensors=tensors)
