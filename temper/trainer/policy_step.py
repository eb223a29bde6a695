"""One optimiser step of the policy: gradients of all microbatches and ranks, or a constrained step of its own.

Owns: adding gradients up, the scale of the loss in float16, refusing gradients that are not finite and naming their
place. Refuses: applying them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from temper.errors import BackendError
from temper.models.experts.balance import is_balanced
from temper.objectives import DirectLoss, MetricSums, Objective, PolicyObjective
from temper.trainer.loss_scale import LossScale
from temper.trainer.optim import MasterAdamW
from temper.trainer.passes.forward import (
    Checkpointing,
    StepFacts,
    checkpointing,
    enable_checkpointing,
    forward_backward,
    forward_only,
    idle_backward,
    rehearse_backward,
)
from temper.trainer.passes.scoring import Share
from temper.trainer.passes.work import FlopCounter
from temper.trainer.ranks.parts import is_cut
from temper.trainer.ranks.sums import merge_over_ranks
from temper.trainer.trust_region import constrained_step
from temper.types import Microbatch

Part = tuple[Microbatch, Mapping[str, Tensor]]
"""A microbatch, and what was measured on the whole batch for its tokens."""


class PolicyStep:
    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        optimizer: MasterAdamW,
        *,
        temperature: float,
        gradient_checkpointing: Checkpointing,
        counter: FlopCounter,
    ) -> None:
        self._model, self._objective, self._optimizer = model, objective, optimizer
        self._temperature, self._counter = temperature, counter
        self._is_recomputing = bool(gradient_checkpointing)
        self._trains_all = isinstance(objective, DirectLoss) or is_cut(model) or is_balanced(model)
        """Whether rows without credit have a gradient too; found out with the first that has one. Ranks with parts of a
        model all go back through it, or none does."""
        is_float16 = next(model.parameters()).dtype == torch.float16
        self.loss_scale: LossScale | None = LossScale() if is_float16 else None
        """None: the loss needs none."""
        if gradient_checkpointing:
            enable_checkpointing(model, gradient_checkpointing)

    def gradient(
        self,
        share: Share,
        facts: StepFacts,
        measured: Sequence[Mapping[str, Tensor]],
        place: str,
        seen: list[Tensor] | None = None,
    ) -> tuple[MetricSums, Tensor | None]:
        """Leaves the summed gradient in the optimiser; returns metrics and its norm.

        None as norm: there is nothing to apply. The objective took a step of its own, or in float16 the gradient
        overflowed: then this update is left out, and the loss is scaled less from now on. To `seen`, if given, every
        microbatch adds what traces are made of (traces.seen_of); a step of the objective's own adds nothing.
        """
        if isinstance(self._objective, PolicyObjective) and self._objective.step is not None:
            return self._constrained(self._objective, share, facts, measured), None
        parts = list(zip(share.microbatches, measured, strict=True))
        metrics = MetricSums()
        self._optimizer.discard_gradients()  # what an interrupted pass may have left
        for part in parts:
            loss, sums = self._backward(part, facts, seen)
            metrics = metrics.merge(sums).merge(MetricSums(totals={"loss/total": loss.double()}))
        for spare in share.padding:
            self._keep_up(spare, facts)
        norm = self._optimizer.sum_gradients()
        metrics = merge_over_ranks(metrics)
        if self.loss_scale is not None:
            torch._foreach_mul_(list(self._optimizer.gradients().values()), 1 / self.loss_scale.factor)
            norm = norm / self.loss_scale.factor  # a power of two: no bit is lost
        total = metrics.totals.get("loss/total", norm.new_zeros(()))
        if self.loss_scale is not None:
            metrics, is_skipped = self._rescale(self.loss_scale, metrics, norm, total)
            if is_skipped:
                return metrics, None
        if not (torch.isfinite(norm) & torch.isfinite(total).to(norm.device)):
            culprit = self._culprit(parts, facts)
            raise BackendError(
                f"{place}: loss {float(total)}, gradient norm {float(norm)}, from {culprit}. This update was not "
                f"applied. Resume from the last checkpoint with a lower optim.learning_rate, and look at the rewards "
                f"and log-probabilities of this step's groups"
            )
        return metrics, norm

    def reserve(self) -> None:
        """Takes the memory of the optimiser's state; an objective that takes steps of its own never needs it."""
        if not (isinstance(self._objective, PolicyObjective) and self._objective.step is not None):
            self._optimizer.reserve()

    def rehearse(self, part: Part, facts: StepFacts) -> None:
        """A forward and a backward pass as in a step. Its gradient is thrown away, and nothing is counted."""
        microbatch, measured = part
        arguments = (self._model, microbatch, self._objective)
        try:
            with self._recomputing(), self._optimizer.collecting():
                rehearse_backward(*arguments, temperature=self._temperature, facts=facts, measured=measured)
            nn.utils.get_total_norm(list(self._optimizer.gradients().values()))
        finally:
            self._optimizer.discard_gradients()

    def _recomputing(self) -> AbstractContextManager[None]:
        return checkpointing(self._model) if self._is_recomputing else nullcontext()

    def _rescale(self, scale: LossScale, metrics: MetricSums, norm: Tensor, total: Tensor) -> tuple[MetricSums, bool]:
        """Moves the scale of the loss; returns metrics with it, and whether this update is skipped. One that cannot be
        mended by a smaller scale is not skipped, and refused as in any precision."""
        is_overflow = bool(torch.isfinite(total)) and not bool(torch.isfinite(norm))
        is_skipped = is_overflow and not scale.is_at_its_end
        self.loss_scale = scale.after_overflow() if is_skipped else scale.after_update()
        if is_skipped:
            self._optimizer.discard_gradients()
        seen = {"policy/loss_scale": scale.factor, "policy/skipped_updates": float(is_skipped)}
        totals = {name: norm.new_tensor(value, dtype=torch.float64) for name, value in seen.items()}
        return metrics.merge(MetricSums(totals=totals)), is_skipped

    def _constrained(
        self, objective: PolicyObjective, share: Share, facts: StepFacts, measured: Sequence[Mapping[str, Tensor]]
    ) -> MetricSums:
        for microbatch in share.microbatches:
            self._counter.count(microbatch, has_backward=True)
        return constrained_step(
            self._model,
            share.microbatches,
            objective,
            temperature=self._temperature,
            facts=facts,
            measured=measured,
        )

    def _backward(self, part: Part, facts: StepFacts, seen: list[Tensor] | None = None) -> tuple[Tensor, MetricSums]:
        microbatch, measured = part
        if self.loss_scale is not None:
            facts = replace(facts, loss_scale=self.loss_scale.factor)
        arguments = (self._model, microbatch, self._objective)
        options: dict[str, Any] = {"temperature": self._temperature, "facts": facts, "measured": measured, "seen": seen}
        if not self._trains_all and not microbatch.has_credit:
            if (found := forward_only(*arguments, **options)) is not None:
                self._counter.count(microbatch, has_backward=False)
                return found
            self._trains_all = True
        with self._recomputing(), self._optimizer.collecting():
            loss, metrics = forward_backward(*arguments, **options)
        self._counter.count(microbatch, has_backward=True)
        return loss, metrics

    def _keep_up(self, spare: Microbatch, facts: StepFacts) -> None:
        """Passes as other ranks make them, which would wait for ours. Adds nothing to gradients, and is not counted."""
        with self._recomputing(), self._optimizer.collecting():
            idle_backward(self._model, spare, self._objective, temperature=self._temperature, facts=facts)

    def _culprit(self, parts: Sequence[Part], facts: StepFacts) -> str:
        """Runs the microbatches once more, one by one, to name the guilty one; good steps pay nothing for it."""
        if is_cut(self._model):
            return f"one of {len(parts)} microbatches of this rank, or of another's"
        culprit = "no microbatch of this rank"
        for number, part in enumerate(parts):
            self._optimizer.discard_gradients()
            loss, _ = self._backward(part, facts)
            bad = [n for n, g in self._optimizer.gradients().items() if not torch.isfinite(g).all()]
            if bad or not torch.isfinite(loss):
                first = f'its gradient is first non-finite in "{bad[0]}"' if bad else "its gradient is finite"
                culprit = f"microbatch {number + 1} of {len(parts)} (loss {float(loss)}; {first})"
                break
        self._optimizer.discard_gradients()
        return culprit
