"""The value model of PPO and VAPO: what return to expect before each drawn token.

Owns: a decoder of its own with a linear head, its optimiser step, its state. Refuses: targets
(objectives/advantage/critics.py), packing, and any denominator but the drawn tokens of the whole update.
Shapes: _T packed tokens, _A drawn tokens, _D width.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from temper.errors import BackendError, UserError
from temper.objectives import MetricSums
from temper.objectives.advantage.critics import explained_variance, value_loss, value_sums
from temper.objectives.metrics import mean_sums
from temper.trainer.adamw.files import read_tensors, write_tensors
from temper.trainer.optim import MasterAdamW, OptimizerSettings, learning_rate_at, require_same_tensors
from temper.trainer.passes.forward import Checkpointing, checkpointing, enable_checkpointing
from temper.trainer.passes.scoring import Share
from temper.trainer.passes.states import drawn_states
from temper.trainer.ranks.parts import cut, within
from temper.trainer.ranks.sums import merge_over_ranks
from temper.trainer.weights import kept_tensors, take_over, whole_weights
from temper.types import Microbatch

CRITIC_FOLDER = "critic"
"""Folder of the critic inside a checkpoint: the files beside the weights are the policy's."""

MOMENTS = ("critic/target_mean", "critic/target_square_mean", "critic/error_mean", "critic/error_square_mean")
"""Steps on the way to critic/explained_var, not worth a chart of their own."""


class Critic:
    """Has no randomness: equal state and microbatches give equal bits."""

    def __init__(
        self,
        model: nn.Module,
        settings: OptimizerSettings,
        *,
        total_steps: int,
        gradient_checkpointing: Checkpointing = False,
        parts_on: torch.device | None = None,
    ) -> None:
        """Takes the decoder of `model` for itself: give it a copy of the policy. total_steps are those of the stage.
        parts_on: this rank keeps its part of each layer, there."""
        self._module = ValueModel(model)
        if parts_on is not None:
            cut(self._module, device=parts_on, apart=[self._module.head])
        self._settings, self._total_steps = settings, total_steps
        self._is_recomputing = bool(gradient_checkpointing)
        self._optimizer = MasterAdamW(self._module, settings)
        if gradient_checkpointing:
            enable_checkpointing(self._module.decoder, gradient_checkpointing)

    @property
    def module(self) -> nn.Module:
        return self._module

    def score(self, microbatch: Microbatch) -> Tensor:
        """Value [T] before each drawn token, 0 elsewhere; on the CPU, without gradient."""
        with torch.no_grad():
            values_A = self._module.values(microbatch).cpu()
        values_T = values_A.new_zeros(len(microbatch.token_ids))
        values_T[microbatch.loss_mask.cpu().bool()] = values_A
        return values_T

    def step(self, share: Share, *, clip: float, num_batch_tokens: int, step: int) -> MetricSums:
        """One update on this rank's microbatches, which hold `values` (when the batch started) and `targets`.

        num_batch_tokens counts the drawn tokens of the whole update, over all ranks; the loss is the mean over them.
        `step` is that of the stage, from 1: all updates of a step have its learning rate, as the policy's have. Metrics
        are of all ranks; `explained` completes them.
        """
        metrics = MetricSums()
        self._optimizer.discard_gradients()  # what an interrupted pass may have left
        for microbatch in share.microbatches:
            metrics = metrics.merge(self._backward(microbatch, clip, num_batch_tokens))
        for spare in share.padding:
            self._backward(spare, clip, num_batch_tokens, scale=0.0)
        norm = self._optimizer.sum_gradients()
        if not torch.isfinite(norm):
            self._optimizer.discard_gradients()
            raise BackendError(
                f"critic update of step {step}: gradient norm {float(norm)}. This update was not applied. Resume from "
                f"the last checkpoint with a lower learning rate of the critic, and look at the rewards of this step"
            )
        self._optimizer.step(learning_rate_at(self._settings, step, self._total_steps), norm)
        # All ranks have the same norm, and their mean is that norm.
        return merge_over_ranks(metrics.merge(mean_sums({"critic/grad_norm": norm.reshape(1)})))

    def reserve(self) -> None:
        """Takes the memory of its optimiser's state."""
        self._optimizer.reserve()

    def save(self, folder: Path) -> None:
        """critic/ with the weights of decoder and head, moments, master weights and counters."""
        own = folder / CRITIC_FOLDER
        own.mkdir()
        weights, moments = self.wholes()
        save_file({key: tensor.contiguous() for key, tensor in weights.items()}, own / "model.safetensors")
        write_tensors(moments, own, "optimizer")
        state = {"optimizer_steps": self._optimizer.num_steps, "dtype": str(self._module.dtype)}
        (own / "state.json").write_text(json.dumps(state, sort_keys=True))

    def load(self, folder: Path) -> None:
        """Raises UserError, before anything changes, when the checkpoint has no critic or one of another model."""
        own = folder / CRITIC_FOLDER
        if not (own / "state.json").is_file():
            raise UserError(
                f"{folder} has no {CRITIC_FOLDER}/state.json: it was saved by an objective without critic. Resume "
                f"with the objective it was trained with, or start a new run from its weights with model.path"
            )
        state = json.loads((own / "state.json").read_text())
        if state["dtype"] != str(self._module.dtype):
            raise UserError(
                f"the critic in {folder} was trained in {state['dtype']} and this run is in {self._module.dtype}. "
                f"Set model.dtype to what it was"
            )
        stored, current = load_file(own / "model.safetensors"), kept_tensors(self._module)
        require_same_tensors(current, stored, f"the critic in {folder}")
        self._optimizer.load_tensors(read_tensors(own, "optimizer"), state["optimizer_steps"])
        take_over(current, stored)

    def wholes(self) -> list[Mapping[str, Tensor]]:
        """What save() writes."""
        return [whole_weights(self._module), self._optimizer.tensors()]

    def _backward(
        self, microbatch: Microbatch, clip: float, num_batch_tokens: int, *, scale: float = 1.0
    ) -> MetricSums:
        """scale: of the gradient; 0 to make the passes that others make."""
        assert microbatch.values is not None, "the critic has not scored this microbatch"
        assert microbatch.targets is not None, "the objective has set the critic no targets"
        with checkpointing(self._module) if self._is_recomputing else nullcontext():
            values_A = self._module.values(microbatch)
            drawn_A = microbatch.loss_mask.nonzero()[:, 0]
            old_A, targets_A = (column[drawn_A].to(values_A) for column in (microbatch.values, microbatch.targets))
            weights_A = torch.full_like(values_A, 1 / num_batch_tokens)
            loss = value_loss(values_A, old_A, targets_A, weights_A, clip)
            with self._optimizer.collecting():
                (loss * scale).backward()  # type: ignore[no-untyped-call]
        values_A = values_A.detach()
        clipped_A = old_A + (values_A - old_A).clamp(-clip, clip)
        # Where the bounded value's error is the one that counts. The first condition is not implied: rounding alone
        # would make old + (value - old) differ from value.
        is_clipped_A = (values_A - old_A).abs() > clip
        is_clipped_A &= (clipped_A - targets_A).abs() > (values_A - targets_A).abs()
        means = mean_sums({"critic/value_mean": values_A, "critic/clip_frac": is_clipped_A})
        totals = MetricSums(totals={"loss/value": loss.detach().double()})
        return totals.merge(means).merge(value_sums(values_A, targets_A))


class ValueModel(nn.Module):
    """The decoder of a language model under a linear head. Values start at 0, so the first advantages are returns."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.decoder = model.get_decoder()
        parameter = next(self.decoder.parameters())
        # float32 as the language-model head: a value moves by less than the spacing of bfloat16 numbers.
        head_dtype = torch.promote_types(parameter.dtype, torch.float32)
        width = model.config.get_text_config().hidden_size
        self.head = nn.Linear(width, 1, device=parameter.device, dtype=head_dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the decoder."""
        return next(self.decoder.parameters()).dtype

    def get_decoder(self) -> Any:
        return self.decoder

    def values(self, microbatch: Microbatch) -> Tensor:
        """[A] before each drawn token: from the state that scores it, which has not seen it."""

        def compute() -> Tensor:
            hidden_AD = drawn_states(self, microbatch).hidden_AD
            return self.head(hidden_AD.to(self.head.weight.dtype))[:, 0]  # type: ignore[no-any-return]

        return within(self, compute)


def explained(finished: Mapping[str, float]) -> dict[str, float]:
    """Finished metrics with critic/explained_var in place of the four moments that it is made of.

    Not a mean, so it can only be formed once microbatches and ranks have been added up.
    """
    others = {name: value for name, value in finished.items() if name not in MOMENTS}
    variance = explained_variance(finished)
    return others if variance is None else others | {"critic/explained_var": variance}
