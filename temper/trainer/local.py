"""The trainer of one process, or of one rank: batches in, weights out.

Owns: the order of a step (log-probabilities at its start, gradients, clipping, update), its version and its state.
Refuses: algorithms (objectives/), and how rows are packed and shared out (`pack` and `shard` are given).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from temper.errors import OutOfMemory, UserError
from temper.models.experts.balance import move_biases
from temper.models.lora.wrapping import has_adapter
from temper.objectives import MetricSums, Objective, PolicyObjective, control
from temper.objectives.advantage.critics import pretraining_steps
from temper.objectives.finish import finished as with_derived
from temper.trainer.critic import Critic, explained
from temper.trainer.loss_scale import LossScale
from temper.trainer.memory import PeakMemory
from temper.trainer.optim import MasterAdamW, OptimizerSettings, learning_rate_at
from temper.trainer.passes.epochs import fill_once, measure_epochs, measure_updates
from temper.trainer.passes.forward import Checkpointing, StepFacts
from temper.trainer.passes.scoring import ScoringPasses, Share, Who
from temper.trainer.passes.states import set_ordered
from temper.trainer.passes.work import FlopCounter
from temper.trainer.policy_step import PolicyStep
from temper.trainer.ranks.parts import is_cut
from temper.trainer.ranks.shares import Shard, share_of
from temper.trainer.ranks.sums import gather_to_first
from temper.trainer.references import MovingReference
from temper.trainer.rehearsal import rehearse_passes, rehearse_update, reserve_states
from temper.trainer.saved import SavedTrainer
from temper.trainer.traces import Key, keys_of, traces_of
from temper.trainer.weights import ModelFiles, Weights
from temper.types import Batch, Column, Microbatch, Publication, Sample, Trace, TrainResult

Pack = Callable[[Sequence[Sample]], list[Microbatch]]
Gather = Callable[[Sequence[str]], Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    optimizer: OptimizerSettings
    temperature: float
    """What the sampler divides logits by; every log-probability here does the same."""
    total_steps: int
    """Steps of the stage; the learning-rate schedule ends there."""
    gradient_checkpointing: Checkpointing = False
    seed: int = 0
    """Seed of the run, for factors that choose tokens at random."""
    traces: bool = True
    """Whether a step also tells what the policy thought of each trained token."""
    is_ordered: bool = False
    """Whether equal steps end with equal bits on a GPU too; for trainers that no sampler runs beside."""
    files: ModelFiles = field(default_factory=ModelFiles)
    """How checkpoints hold the model; one with an adapter is kept as an adapter, whatever this says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuxiliaryModels:
    """Models beside the policy; None when the objective does not need them."""

    reference: nn.Module | None = None
    teachers: Mapping[str, nn.Module] = field(default_factory=dict)
    """By domain; that of "" teaches rows of all other domains."""
    critic: Critic | None = None


Updates = tuple[tuple[Sample, ...], ...]
"""The rows of each optimiser step, as in Batch.updates."""


class LocalTrainer:
    """Implements protocols.Trainer. Has no randomness: equal state and batch give equal bits, on a GPU where settings
    ask for an order of its sums."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        objective: Objective,
        settings: TrainerSettings,
        *,
        pack: Pack,
        shard: Shard | None = None,
        others: AuxiliaryModels | None = None,
    ) -> None:
        """`shard` is needed when there are several ranks."""
        self._model, self._tokenizer = model, tokenizer
        self._objective, self._settings = objective, settings
        self._pack, self._shard = pack, shard
        others = others or AuxiliaryModels()
        models = {"policy": model}
        if others.reference is not None:
            models["reference"] = others.reference.requires_grad_(False)
        self._teachers = {domain: teacher.requires_grad_(False) for domain, teacher in others.teachers.items()}
        self._counter = counter = FlopCounter(model, objective.needs)
        self._passes = ScoringPasses(models, objective, settings.temperature, teachers=self._teachers, counter=counter)
        self._critic = others.critic
        self._reference: MovingReference | None = None
        if objective.reference is not None and others.reference is not None:
            _require_own_weights(others.reference, model)
            self._reference = MovingReference(others.reference, objective.reference)
        if settings.is_ordered:
            set_ordered(model)
            if others.critic is not None:
                set_ordered(others.critic.module)
        self._optimizer = MasterAdamW(model, settings.optimizer)
        self._policy_step = PolicyStep(
            model,
            objective,
            self._optimizer,
            temperature=settings.temperature,
            gradient_checkpointing=settings.gradient_checkpointing,
            counter=counter,
        )
        self._weights = Weights(model)
        beside = tuple(part for part in (self._critic, self._reference) if part is not None)
        self._saved = SavedTrainer(model, self._optimizer, settings.files, beside)
        self._one_pass = threading.Lock()
        """Held during a pass: credit and a canary are scored by two threads, and models that wait on the CPU or record
        routers have state."""
        self._ready: tuple[Updates, list[Share]] | None = None
        self._scales = control(objective, {}, {})
        self._version = 0
        self._peak_memory = PeakMemory(next(model.parameters()).device)

    @property
    def version(self) -> int:
        return self._version

    @property
    def is_cut(self) -> bool:
        """Whether this rank holds a part of each layer; what needs whole tensors then needs all ranks."""
        return is_cut(self._model)

    @property
    def scales(self) -> Mapping[str, float]:
        """What the objective's controllers have set."""
        return self._scales

    def score(
        self, samples: Sequence[Sample], who: Literal["policy", "reference", "teacher", "critic", "routers"]
    ) -> list[Sequence[float]]:
        """Of several ranks the first has all rows, others those that they scored."""
        found: dict[int, Sequence[float]] = {}
        share = self._share(samples)
        for spare in share.padding:
            self._scored(spare, who)
        for microbatch in share.microbatches:
            values = self._scored(microbatch, who)
            for number, part in zip(microbatch.rows, torch.split(values, list(microbatch.lengths)), strict=True):
                found[number] = Column(part.double().cpu().numpy())
        found = gather_to_first(found)
        return [found.get(number, []) for number in range(len(samples))]

    def _scored(self, microbatch: Microbatch, who: Who | Literal["critic"]) -> Tensor:
        with self._one_pass:
            return self._values(microbatch) if who == "critic" else self._passes.score(microbatch, who)

    def observe(self, score: float) -> None:
        """A held-out score, for references that are reset when it stalls."""
        if self._reference is not None:
            self._reference.observe(score)

    def prepack(self, updates: Updates) -> None:
        """Packs the updates of the next step ahead of it: that is work for the host alone, and a sampler on the same
        device draws meanwhile."""
        self._ready = (updates, self._shares(updates))

    def warm_up(self, rows: Sequence[Sample]) -> None:
        """The peak of memory counts these passes: such a microbatch may come."""
        with self._one_pass:
            reserve_states(self._policy_step, self._critic)
            rehearse_passes(self._passes, self._policy_step, self._share(rows), self._facts(rows, 0))
            rehearse_update(self._model, self._settings.optimizer)
        self._counter.take()

    def step(self, batch: Batch) -> TrainResult:
        seconds: dict[str, float] = {}
        rate = policy_rate(self._settings, self._version + 1, pretraining_steps(self._objective))
        shares = self._prepared(batch, seconds)
        metrics, applied = MetricSums(), _Applied()
        for number, (update, share) in enumerate(zip(batch.updates, shares, strict=True)):
            facts = self._facts(update, number)
            if self._critic is not None:
                with _timed(seconds, "critic"):
                    metrics = metrics.merge(self._train_critic(self._critic, share, facts))
            if self._is_pretraining_critic:
                continue
            with _timed(seconds, "measure"):
                measured = self._passes.measure(share, facts)
            place = f"step {self._version + 1}, update {number + 1}"
            seen: list[Tensor] | None = [] if self._settings.traces and applied.lacks_traces(update) else None
            with _timed(seconds, "forward_backward"):
                sums, norm = self._policy_step.gradient(share, facts, measured, place, seen)
            metrics = metrics.merge(sums)
            applied.sums.append(sums)
            if norm is not None:
                with _timed(seconds, "optimizer"):
                    applied.norms.append((norm, *self._optimizer.step(rate, norm)))
                    move_biases(self._model, sums.loads)
            if seen:
                with _timed(seconds, "trace"):
                    applied.trace(update, share, seen)
        self._version += 1
        return self._finished(batch, metrics, rate, applied, seconds)

    def publish(self) -> Publication:
        return self.publish_gathered(self.gather) if self.is_cut else self._weights.publication(self._version)

    def publish_gathered(self, gather: Gather) -> Publication:
        """Weights of a cut model. gather: `gather` on all ranks."""
        return self._weights.gathered(self._version, gather)

    def gather(self, names: Sequence[str]) -> Mapping[str, Tensor]:
        """Some whole tensors of a cut model: what every rank gives its part of."""
        return self._weights.whole(names)

    def peak_memory_bytes(self) -> int:
        """Most memory held at once since this trainer was made: of the device on a GPU, of the process on a CPU."""
        return self._peak_memory.bytes()

    @property
    def peak_is_since_start(self) -> bool:
        """Whether the system could not start its count anew, so that the peak is that of all stages so far."""
        return self._peak_memory.is_since_start

    def save(self, folder: Path) -> None:
        """An ordinary Hugging Face directory, or peft's, and trainer/ with moments, master weights and counters. The
        same for every number of ranks; of several the first writes it."""
        scale = self._policy_step.loss_scale
        counters = {
            "version": self._version,
            "scales": self._scales,
            "loss_scale": None if scale is None else asdict(scale),
        }
        self._saved.write(folder, self._tokenizer, counters)

    def load(self, folder: Path) -> None:
        """Raises UserError, before anything changes, when the checkpoint is of another model or precision."""
        state = self._saved.read(folder)
        self._version, self._scales = state["version"], state["scales"]
        if (loss_scale := state.get("loss_scale")) is not None:
            self._policy_step.loss_scale = LossScale(**loss_scale)

    @property
    def _is_pretraining_critic(self) -> bool:
        """Whether the policy still waits for its critic."""
        return self._version < pretraining_steps(self._objective)

    def _prepared(self, batch: Batch, seconds: dict[str, float]) -> list[Share]:
        """This rank's microbatches of every update, with all columns that do not depend on the updates before it."""
        with _timed(seconds, "pack"):
            ready, self._ready = self._ready, None
            shares = ready[1] if ready and ready[0] is batch.updates else self._shares(batch.updates)
        with _timed(seconds, "reference"):
            shares = fill_once(batch.updates, shares, self._passes.with_frozen)
        with _timed(seconds, "proximal"):
            # For all updates before the first: refreshed in between, the proximal policy would follow the policy and
            # there would be no trust region.
            is_only = len(shares) == 1
            return fill_once(
                batch.updates, shares, lambda own: [self._passes.with_proximal(m, is_only=is_only) for m in own]
            )

    def _shares(self, updates: Updates) -> list[Share]:
        return [self._share(update) for update in updates]

    def _share(self, update: Sequence[Sample]) -> Share:
        """This rank's part of one optimiser step."""
        return share_of(self._pack(update), self._shard, is_even=self.is_cut)

    def _facts(self, update: Sequence[Sample], number: int) -> StepFacts:
        return StepFacts(
            num_batch_tokens=sum(sample.num_actions for sample in update),
            version=self._version,
            seed=(self._settings.seed << 32) + (self._version << 8) + number,
            scales=self._scales,
            teachers=self._teachers,
        )

    def _values(self, microbatch: Microbatch) -> Tensor:
        if self._critic is None:
            raise UserError(f"objective {self._objective.name} needs a critic and the trainer was given none")
        return self._critic.score(microbatch)

    def _train_critic(self, critic: Critic, share: Share, facts: StepFacts) -> MetricSums:
        assert isinstance(self._objective, PolicyObjective), "a direct loss has no critic"
        assert self._objective.critic is not None, "a critic needs a rule"
        return critic.step(
            share,
            clip=self._objective.critic.argument("clip"),
            num_batch_tokens=facts.num_batch_tokens,
            step=self._version + 1,
        )

    def _finished(
        self, batch: Batch, metrics: MetricSums, rate: float, applied: _Applied, seconds: dict[str, float]
    ) -> TrainResult:
        """Metrics of the whole step, and what follows from them: controllers, and a reference that may move."""
        num_updates = max(1, len(batch.updates))
        metrics = replace(metrics, totals={name: total / num_updates for name, total in metrics.totals.items()})
        finished = with_derived(explained(metrics.finish())) | {"policy/learning_rate": rate}
        loss = finished.pop("loss/total", 0.0)
        finished |= applied.metrics() | measure_epochs(batch.updates, applied.sums) | measure_updates(applied.sums)
        samples = [sample for update in batch.updates for sample in update]
        finished["data/trained_trajectories"] = float(len({(sample.group_id, sample.index) for sample in samples}))
        finished["data/tokens"] = float(sum(sample.num_actions for sample in samples))
        self._scales = control(self._objective, self._scales, finished)
        finished |= {f"control/{name}": scale for name, scale in self._scales.items()}
        if self._reference is not None:
            has_moved, resets_optimizer = self._reference.after_step(self._model, self._version)
            finished["policy/reference_moved"] = float(has_moved)
            if resets_optimizer:
                self._optimizer.reset()
        traces, flops = gather_to_first(applied.traces) or None, self._counter.take()
        loads = {int(layer): [round(count) for count in load.tolist()] for layer, load in metrics.loads.items()}
        return TrainResult(loss=loss, metrics=finished, seconds=seconds, traces=traces, model_flops=flops, loads=loads)


def policy_rate(settings: TrainerSettings, step: int, waiting_steps: int) -> float:
    """Learning rate of a step. The policy's schedule begins with its own first step, not with its critic's; before that
    it is 0."""
    if step <= waiting_steps:
        return 0.0
    return learning_rate_at(settings.optimizer, step - waiting_steps, settings.total_steps - waiting_steps)


def _require_own_weights(reference: nn.Module, model: nn.Module) -> None:
    """A reference that is the policy without its adapter shares its weights: moved, it would move the policy. Of a cut
    policy it has its own, read from files."""
    if has_adapter(model) and not is_cut(model):
        policy = {parameter.data_ptr() for name, parameter in model.named_parameters() if ".base_layer." in name}
        assert not any(p.data_ptr() in policy for p in reference.parameters()), "a moving reference needs own weights"


@dataclass(slots=True)
class _Applied:
    """What the updates of one step did, as they are done."""

    norms: list[tuple[Tensor, ...]] = field(default_factory=list)
    """Norms of each update: gradient before and after clipping, update over weights."""
    traces: dict[Key, Trace] = field(default_factory=dict)
    sums: list[MetricSums] = field(default_factory=list)
    """Metrics of each update."""

    def lacks_traces(self, update: Sequence[Sample]) -> bool:
        return any(key not in self.traces for key in keys_of(update))

    def trace(self, update: Sequence[Sample], share: Share, seen: Sequence[Tensor]) -> None:
        """A row that was trained before in this step keeps the trace of its first time."""
        keys = keys_of(update)
        for microbatch, values in zip(share.microbatches, seen, strict=True):
            self.traces = traces_of(microbatch, values, keys) | self.traces

    def metrics(self) -> dict[str, float]:
        if not self.norms:
            return {}
        names = ("policy/grad_norm", "policy/grad_norm_clipped", "policy/update_norm_ratio")
        means = torch.stack([torch.stack(norms).double() for norms in self.norms]).mean(0).tolist()
        return dict(zip(names, means, strict=True))


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(phase, error) from error
    finally:
        seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - start
