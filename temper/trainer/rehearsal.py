"""A step that nobody keeps: kernels compile, libraries and the allocator get ready, before the first real one.

Owns: which passes that takes. Refuses: changing weights, moments or counts.
"""

from __future__ import annotations

import torch
from torch import nn

from temper.errors import OutOfMemory
from temper.trainer.critic import Critic
from temper.trainer.optim import MasterAdamW, OptimizerSettings
from temper.trainer.passes.forward import StepFacts
from temper.trainer.passes.scoring import ScoringPasses, Share
from temper.trainer.policy_step import PolicyStep

SCRATCH_ROWS = 256
"""Of a matrix that is updated in place of one of the model's: enough to be held and computed as that one."""


def reserve_states(policy: PolicyStep, critic: Critic | None) -> None:
    """Takes the memory of moments and masters before any pass is tried: in every step they are there beside it, and a
    microbatch would seem to fit that does not. Where they have no room themselves, no smaller microbatch helps."""
    try:
        policy.reserve()
        if critic is not None:
            critic.reserve()
    except torch.OutOfMemoryError as error:
        raise OutOfMemory("optimizer", error) from error


def rehearse_passes(passes: ScoringPasses, policy_step: PolicyStep, share: Share, facts: StepFacts) -> None:
    """The first microbatch of a share through all passes of a step with one update."""
    microbatches = passes.with_frozen(share.microbatches[:1])
    share = Share([passes.with_proximal(microbatch, is_only=True) for microbatch in microbatches], share.numbers[:1])
    for part in zip(share.microbatches, passes.measure(share, facts), strict=True):
        policy_step.rehearse(part, facts)


def rehearse_update(model: nn.Module, settings: OptimizerSettings) -> None:
    """An update of small tensors with the types and widths of the model's. The model is not touched."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    kinds = {(p.dtype, p.device, (min(SCRATCH_ROWS, p.shape[0]), *p.shape[1:])) for p in trained if p.dim()}
    scratch = nn.ParameterList(
        torch.zeros(shape, dtype=dtype, device=device) for dtype, device, shape in sorted(kinds, key=str)
    )
    if len(scratch):
        norm = torch.zeros((), device=trained[0].device)
        MasterAdamW(scratch, settings).step(settings.learning_rate, norm)
