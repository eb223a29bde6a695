"""The trainer of one process, or of one rank: batches in, weights out.

Owns: the order of a step (log-probabilities at its start, gradients, clipping, update), its version and its state.
Refuses: algorithms (objectives/), and how rows are packed and shared out (`pack` and `shard` are given).
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from temper.errors import BackendError, UserError
from temper.models.load import load_model, save_model
from temper.objectives import MetricSums, Objective
from temper.trainer.forward import checkpointing, enable_checkpointing, forward_backward, score_drawn, spread
from temper.trainer.optim import MasterAdamW, OptimizerSettings, learning_rate_at, require_same_tensors
from temper.trainer.ranks import merge_over_ranks, rank_and_world, sum_over_ranks
from temper.trainer.weights import publish
from temper.types import Batch, Microbatch, Publication, Sample, TrainResult

Pack = Callable[[Sequence[Sample]], list[Microbatch]]
Shard = Callable[[Sequence[Microbatch], int, int], list[Microbatch]]
"""(microbatches, rank, world) -> the share of that rank; may be empty."""

STATE_FOLDER = "trainer"
"""Below the checkpoint: other tools take every *.safetensors file beside the weights for weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    optimizer: OptimizerSettings
    temperature: float
    """What the sampler divides logits by; every log-probability here does the same."""
    total_steps: int
    """Of the stage; the learning-rate schedule ends there."""
    gradient_checkpointing: bool = False
    proximal: Literal["trainer", "behavior"] = "trainer"
    """Ratios against the trainer's own log-probabilities at the start of the batch, or against the sampler's."""


class LocalTrainer:
    """Implements protocols.Trainer. Has no randomness: equal state and batch give equal bits."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        objective: Objective,
        settings: TrainerSettings,
        *,
        pack: Pack,
        shard: Shard | None = None,
        reference: nn.Module | None = None,
    ) -> None:
        """`reference` is needed when the objective compares with one; `shard` when there are several ranks."""
        self._model, self._tokenizer = model, tokenizer
        self._objective, self._settings = objective, settings
        self._pack, self._shard = pack, shard
        self._reference = reference.requires_grad_(False) if reference is not None else None
        self._optimizer = MasterAdamW(model, settings.optimizer)
        self._version = 0
        if settings.gradient_checkpointing:
            enable_checkpointing(model)

    @property
    def version(self) -> int:
        return self._version

    def logprobs(self, samples: Sequence[Sample], policy: Literal["policy", "reference"]) -> list[list[float]]:
        # The packer may reorder rows; the versions column, which scoring does not read, carries each row's number.
        numbered = [replace(s, versions=[number] * len(s.token_ids)) for number, s in enumerate(samples)]
        rows: list[list[float]] = [[] for _ in samples]
        for microbatch in self._pack(numbered):
            values = self._score(microbatch, policy).tolist()
            start = 0
            for length in microbatch.lengths:
                rows[int(microbatch.versions[start])] = values[start : start + length]
                start += length
        return rows

    def step(self, batch: Batch) -> TrainResult:
        seconds: dict[str, float] = {}
        rate = learning_rate_at(self._settings.optimizer, self._version + 1, self._settings.total_steps)
        with _timed(seconds, "pack"):
            shares = [self._share(update) for update in batch.updates]
        with _timed(seconds, "reference"):
            shares = [self._with_reference(share) for share in shares]
        with _timed(seconds, "proximal"):
            # For all updates before the first: refreshed in between, the proximal policy would follow the policy and
            # there would be no trust region.
            shares = [self._with_proximal(share, is_only=len(shares) == 1) for share in shares]
        metrics, norms = MetricSums(), []
        for number, (update, share) in enumerate(zip(batch.updates, shares, strict=True)):
            with _timed(seconds, "forward_backward"):
                sums, norm = self._accumulate(share, sum(s.num_actions for s in update), number)
            with _timed(seconds, "optimizer"):
                self._optimizer.step(rate, norm)
            metrics = metrics.merge(sums)
            norms.append(float(norm))
        self._version += 1
        num_updates = max(1, len(norms))
        metrics = replace(metrics, totals={name: total / num_updates for name, total in metrics.totals.items()})
        finished = metrics.finish()
        loss = finished.pop("loss/total", 0.0)
        own = {"policy/grad_norm": sum(norms) / num_updates, "policy/learning_rate": rate}
        return TrainResult(loss=loss, metrics=finished | own, seconds=seconds)

    def publish(self) -> Publication:
        return publish(self._model, self._version)

    def peak_memory_bytes(self) -> int:
        """Most memory held at once since the start: of the device on a GPU, of the process on a CPU."""
        device = next(self._model.parameters()).device
        if device.type == "cuda":
            return torch.cuda.max_memory_allocated(device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

    def save(self, folder: Path) -> None:
        """An ordinary Hugging Face directory, and trainer/ with moments, master weights and counters."""
        save_model(self._model, self._tokenizer, folder)
        own = folder / STATE_FOLDER
        own.mkdir()
        tensors = {name: tensor.contiguous() for name, tensor in self._optimizer.tensors().items()}
        save_file(tensors, own / "optimizer.safetensors")
        state = {"version": self._version, "optimizer_steps": self._optimizer.num_steps, "dtype": str(self._dtype)}
        (own / "state.json").write_text(json.dumps(state, sort_keys=True))

    def load(self, folder: Path) -> None:
        """Raises UserError, before anything changes, when the checkpoint is of another model or precision."""
        own = folder / STATE_FOLDER
        if not (own / "state.json").is_file():
            raise UserError(f"{folder} has no {STATE_FOLDER}/state.json: it holds a model but no training to continue")
        state = json.loads((own / "state.json").read_text())
        if state["dtype"] != str(self._dtype):
            raise UserError(
                f"{folder} was trained in {state['dtype']} and this run is in {self._dtype}: its moments and master "
                f"weights do not fit. Set model.dtype to what it was"
            )
        # Through transformers, which may store tensors under other names than the model's own.
        stored = publish(load_model(folder, self._dtype, torch.device("cpu")), 0).tensors
        current = self.publish().tensors
        require_same_tensors(current, stored, f"checkpoint {folder}")
        self._optimizer.load_tensors(load_file(own / "optimizer.safetensors"), state["optimizer_steps"])
        for name, tensor in current.items():
            tensor.copy_(stored[name])  # in place: samplers may share the storage
        self._version = state["version"]

    @property
    def _dtype(self) -> torch.dtype:
        return next(self._model.parameters()).dtype

    def _share(self, update: Sequence[Sample]) -> list[Microbatch]:
        """This rank's part of one optimiser step."""
        microbatches = self._pack(update)
        rank, world = rank_and_world()
        if world == 1:
            return microbatches
        if self._shard is None:
            raise BackendError(f"{world} trainer ranks but no `shard`: each would train the whole batch")
        return self._shard(microbatches, rank, world)

    def _with_reference(self, share: list[Microbatch]) -> list[Microbatch]:
        if "reference" not in self._objective.needs:
            return share
        return [
            replace(m, reference_logprobs=self._score(m, "reference")) if m.reference_logprobs is None else m
            for m in share
        ]

    def _with_proximal(self, share: list[Microbatch], is_only: bool) -> list[Microbatch]:
        if self._settings.proximal == "behavior":
            return [replace(m, proximal_logprobs=m.behavior_logprobs) for m in share]
        if is_only:  # the policy of the same pass, detached: the ratio is exactly 1, to the bit
            return [replace(m, proximal_logprobs=None) for m in share]
        return [
            replace(m, proximal_logprobs=self._score(m, "policy")) if m.proximal_logprobs is None else m for m in share
        ]

    def _score(self, microbatch: Microbatch, policy: Literal["policy", "reference"]) -> Tensor:
        """Log-probabilities [T] without gradient, by the same pass as training."""
        model = self._model if policy == "policy" else self._reference
        if model is None:
            raise UserError(f"objective {self._objective.name} needs a reference model and the trainer was given none")
        with torch.no_grad():
            logprobs_A, _ = score_drawn(model, microbatch, self._settings.temperature)
        return spread(logprobs_A, microbatch)

    def _accumulate(self, share: list[Microbatch], num_batch_tokens: int, update: int) -> tuple[MetricSums, Tensor]:
        """Gradients of one optimiser step, summed over microbatches and ranks; metrics and global norm of them."""
        metrics = MetricSums()
        self._optimizer.discard_gradients()  # what an interrupted pass may have left
        for microbatch in share:
            loss, sums = self._backward(microbatch, num_batch_tokens)
            metrics = metrics.merge(sums).merge(MetricSums(totals={"loss/total": loss.double()}))
        gradients = self._optimizer.gradients()
        sum_over_ranks(gradients.values())
        metrics = merge_over_ranks(metrics)
        norm = nn.utils.get_total_norm(list(gradients.values()))
        total = metrics.totals.get("loss/total", norm.new_zeros(()))
        if not (torch.isfinite(norm) & torch.isfinite(total).to(norm.device)):
            place = f"step {self._version + 1}, update {update + 1}"
            raise BackendError(self._describe_non_finite(place, share, num_batch_tokens, total, norm))
        return metrics, norm

    def _backward(self, microbatch: Microbatch, num_batch_tokens: int) -> tuple[Tensor, MetricSums]:
        is_recomputing = self._settings.gradient_checkpointing
        with checkpointing(self._model) if is_recomputing else nullcontext():
            loss, metrics = forward_backward(
                self._model,
                microbatch,
                self._objective,
                temperature=self._settings.temperature,
                num_batch_tokens=num_batch_tokens,
            )
        self._optimizer.collect()
        return loss, metrics

    def _describe_non_finite(
        self, place: str, share: list[Microbatch], num_batch_tokens: int, total: Tensor, norm: Tensor
    ) -> str:
        """Runs the microbatches once more, one by one, to name the guilty one; good steps pay nothing for it."""
        culprit = "no microbatch of this rank"
        for number, microbatch in enumerate(share):
            self._optimizer.discard_gradients()
            loss, _ = self._backward(microbatch, num_batch_tokens)
            bad = [n for n, g in self._optimizer.gradients().items() if not torch.isfinite(g).all()]
            if bad or not torch.isfinite(loss):
                first = f'its gradient is first non-finite in "{bad[0]}"' if bad else "its gradient is finite"
                culprit = f"microbatch {number + 1} of {len(share)} (loss {float(loss)}; {first})"
                break
        self._optimizer.discard_gradients()
        return (
            f"{place}: loss {float(total)}, gradient norm {float(norm)}, from {culprit}. This update was not "
            f"applied. Resume from the last checkpoint with a lower optim.learning_rate, and look at the rewards and "
            f"log-probabilities of this step's groups"
        )


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - start
