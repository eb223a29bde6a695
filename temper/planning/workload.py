"""What one stage computes and holds, in plain numbers: what every sum of this package is about.

Owns: the record, and what follows from it by counting. Refuses: recipes and data (build/memory.py reads them).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from temper.config.memory import MemoryChoice
from temper.planning.shape import DecoderShape

LEAST_SHARED = 1 / 16
"""Share of packed tokens below which a common prompt is computed for every row (trainer/passes/sharing.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterShape:
    """Of low rank, in place of training the weights."""

    rank: int
    targets: tuple[str, ...] = ()
    """Names of linear layers; empty: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    shape: DecoderShape
    choice: MemoryChoice
    """kv_tokens is a number of tokens here, never 0."""
    dtype: torch.dtype = torch.bfloat16
    """Of a weight."""
    adapter: AdapterShape | None = None
    """None: all weights are trained."""
    has_four_bit_base: bool = False
    """Whether the matrices below the adapter are held in 4 bits, for trainer and sampler."""
    has_float8_sampler: bool = False
    """Whether the sampler has the matrices of layers in float8, beside the trainer's."""
    offload: bool = False
    """Whether moments and masters live in the memory of the host."""
    frozen: tuple[DecoderShape, ...] = ()
    """References and teachers with weights of their own."""
    has_own_reference: bool = False
    """Whether the first of them is the model that the policy began as: below an adapter it takes nothing."""
    offload_frozen: bool = False
    has_critic: bool = False
    has_own_head: bool = False
    """Whether a scalar head takes the place of logits."""
    trains: bool = True
    trainers: int = 1
    """GPUs that share out each batch."""
    trainers_per_gpu: int = 1
    """More where a machine has fewer GPUs than trainers, which then share them: processes with a copy each."""
    machine_trainers: int = 8
    """The most trainers of one machine, who share the memory of its host."""
    parts: bool = False
    """Whether each of them holds a part of weights, gradients and states, in place of all."""
    may_be_cut: bool = True
    """Whether the rest of the recipe lets trainers hold parts."""
    may_have_adapter: bool = True
    """Whether the rest of the recipe lets an adapter be trained."""
    may_have_four_bits: bool = True
    """Whether it lets what is below an adapter be held in 4 bits."""
    draws_here: bool = False
    """Whether the engine is in the trainer's process, where with parts there is no whole model to draw with."""
    experts: bool = False
    """Whether, with parts, each of them computes its own experts for all, in place of gathering them."""
    context: int = 1
    """Trainers that go over each row together."""
    tensor: int = 1
    """Those of them that compute layers together, with slices that stay: all or, with 1, none."""
    engine: Literal["shared", "copied", "apart", "elsewhere"] = "shared"
    """Whose weights the sampler draws with: the trainer's, a copy on the same GPU, a copy on a GPU of its own, or those
    of a server that is not planned here."""
    num_samplers: int = 1
    """Engines in all, each with a copy of the weights and a cache."""
    samplers_per_gpu: int = 1
    """Of those with GPUs of their own: more where there are fewer such GPUs than samplers."""
    engine_gpus: int = 1
    """GPUs that one engine's matrices and cache are shared out over, the trainers' among them (tensor parallelism)."""
    ahead: int = 0
    """Steps whose rollouts may be under way beside those of the step that is trained (rollout.max_staleness)."""
    has_processes: bool = True
    """Whether samplers, each on one GPU, can be processes of their own, and many."""
    samples: bool = True
    """Whether there is a sampler with a cache."""
    rolls: bool = True
    """Whether it trains on what it draws, in place of drawing for evaluations alone."""
    prompt_tokens: int
    """Of a usual prompt."""
    completion_tokens: int
    """Of the longest completion; of given rows, what is trained of the longest."""
    longest_tokens: int = 0
    """Of the longest completion where completion_tokens is the mean (with_lengths); 0: they are the same."""
    group_size: int
    """Rows that share a prompt."""
    rows_per_update: int
    updates: int = 1
    """Optimiser steps of one pass over a batch."""
    epochs: int = 1
    """Passes over a batch."""
    max_running: int
    tokens_per_step: int = 4096
    """Of the engine, as the recipe has it."""
    has_graphs: bool = True

    @property
    def itemsize(self) -> int:
        """Bytes of a weight."""
        return self.dtype.itemsize

    @property
    def row_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    @property
    def share(self) -> int:
        """Trainers that one copy of weights, gradients and states is shared out over."""
        return self.trainers if self.parts else 1

    @property
    def staying_parameters(self) -> int:
        """Of all layers, those that no trainer gathers: experts that are computed where they are, slices of others."""
        if self.share == 1:
            return 0
        if self.tensor > 1:  # ranks with the same slice gather it
            return self.shape.layers - (self.shape.layers // self.tensor if self.trainers > self.tensor else 0)
        return self.shape.expert_layers * self.shape.experts if self.experts else 0

    @property
    def sends_to_experts(self) -> bool:
        return self.experts and self.share > 1

    @property
    def trainer_rows(self) -> int:
        """Of an update, on the GPU that has most of them, or on those that go over them together."""
        return -(-self.rows_per_update * self.context // self.trainers)

    @property
    def microbatches(self) -> int:
        """Of an update, on each GPU."""
        return -(-self.trainer_rows * self.row_tokens // self.microbatch_tokens)

    @property
    def pass_tokens(self) -> int:
        """Of the engine's largest pass, in which every running sequence has a token at least (build/policy.py)."""
        return max(self.tokens_per_step, self.max_running + 1)

    @property
    def engines_here(self) -> int:
        """Samplers on one trainer's GPU."""
        if self.engine not in ("shared", "copied"):
            return 0
        return -(-self.num_samplers * self.trainers_per_gpu // self.trainers)

    @property
    def sampler_processes_here(self) -> int:
        """Those of them that are processes of their own."""
        return self.engines_here if self.engine == "copied" and not self.draws_here else 0

    @property
    def trainers_per_host(self) -> int:
        return min(self.trainers, self.machine_trainers)

    @property
    def drawing_gpus(self) -> int:
        return self.num_samplers if self.engine == "apart" else min(self.num_samplers, self.trainers)

    @property
    def overlaps(self) -> bool:
        """Whether one step is trained while the next is drawn, on GPUs of their own."""
        return self.engine == "apart" and self.ahead > 0

    @property
    def microbatch_tokens(self) -> int:
        """Of the largest microbatch: a row is in one, and there are no more rows than an update has on a GPU."""
        most = min(self.choice.tokens_per_microbatch, self.trainer_rows * self.row_tokens)
        return max(self.row_tokens, most)

    @property
    def packed_tokens(self) -> int:
        """Of that microbatch, on one GPU."""
        return -(-self.microbatch_tokens // self.context)

    @property
    def num_rows(self) -> int:
        """Of that microbatch."""
        return max(1, self.microbatch_tokens // self.row_tokens)

    @property
    def computed_tokens(self) -> int:
        """Those of the packed tokens that pass through the layers: a common prompt does so once."""
        return round(self.packed_tokens * (1 - self.shared_part(self.num_rows)))

    @property
    def scored_tokens(self) -> int:
        return round(self.packed_tokens * self.completion_tokens / self.row_tokens)

    def shared_part(self, num_rows: int) -> float:
        """Share of the tokens of so many rows that is not computed because a row of the group has them already."""
        alike = min(self.group_size, num_rows) if self.context == 1 else 1
        saved = (1 - 1 / alike) * self.prompt_tokens / self.row_tokens
        return saved if saved >= LEAST_SHARED else 0.0

    @property
    def trained_parameters(self) -> int:
        if not self.trains:
            return 0
        if self.adapter is None:
            return self.shape.parameters
        return self.shape.adapter_parameters(self.adapter.rank, self.adapter.targets)


def by_gpu(work: Workload) -> dict[str, Workload]:
    """What is held on each kind of GPU: a trainer's, and a sampler's where it has one of its own."""
    if work.engine != "apart":
        return {"trainer": work}
    adapter = work.adapter if work.has_four_bit_base else None  # others are merged into what is published
    several = work.samplers_per_gpu
    sampler = replace(
        work, trainers=several, trainers_per_gpu=several, parts=False, context=1, tensor=1, engine="shared",
        num_samplers=several, adapter=adapter, frozen=(), has_critic=False, trains=False, offload=False,
    )  # fmt: skip
    return {"trainer": work, "sampler": sampler}


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerLengths:
    """Tokens of completions, where more is known than their limit."""

    mean: int
    longest: int


def with_lengths(work: Workload, lengths: AnswerLengths | None) -> Workload:
    """For seconds, which are those of the mean answer; memory is planned for the longest."""
    if lengths is None:
        return work
    return replace(work, completion_tokens=lengths.mean, longest_tokens=lengths.longest)


def spread(work: Workload, trainers_here: int, gpus: int) -> Workload:
    """The same, with what processes share where so many of its trainers are on a machine with so many GPUs (0: nobody
    looks, for a CPU is not planned)."""
    if gpus == 0:
        return work
    free = (gpus - trainers_here) // work.engine_gpus
    return replace(
        work,
        machine_trainers=trainers_here,
        trainers_per_gpu=-(-trainers_here // gpus),
        samplers_per_gpu=-(-work.num_samplers // free) if work.engine == "apart" and free > 0 else 1,
    )
