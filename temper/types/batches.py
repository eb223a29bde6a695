"""From a group to a training step: rows with credit, packed rows, what the trainer made of them.

Everything is frozen, keyword-only, and checked once, when it is made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from temper.types.checks import hold, require_parallel
from temper.types.columns import array_of, bits, floats, integers, ragged
from temper.types.rollouts import Group, Scalar

if TYPE_CHECKING:  # torch takes seconds to import, and whoever holds a tensor has done so: a recipe is read without it
    import torch
    from torch import Tensor

_FLOATS = ("proximal_logprobs", "reference_logprobs", "teacher_logprobs", "values", "targets")
OPTIONAL_COLUMNS = (*_FLOATS, "top_ids", "top_logprobs", "keep_ids", "routes")
"""Columns of a Sample that only some objectives need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One row to train on. Columns run over all tokens of the row, prompt included, indexed by the scored token; lists
    or arrays may be given.

    A rollout is one row unless its template rewrote history; then it is several rows that share group_id and index.
    """

    group_id: str
    index: int
    token_ids: Sequence[int]
    loss_mask: Sequence[int]
    """1 exactly where the policy drew the token. From lengths, never from ids."""
    behavior_logprobs: Sequence[float]
    """0.0 where loss_mask is 0."""
    versions: Sequence[int]
    """-1 where loss_mask is 0."""
    advantages: Sequence[float]
    weights: Sequence[float]
    """Share of each token in the loss; already holds one over the denominator of the whole batch."""
    proximal_logprobs: Sequence[float] | None = None
    """By the trainer when the batch started; None: the current policy of a single update, detached."""
    reference_logprobs: Sequence[float] | None = None
    """None: no part of the objective needs them; the same below."""
    teacher_logprobs: Sequence[float] | None = None
    values: Sequence[float] | None = None
    """The critic's, when the batch started: expected return before each token."""
    targets: Sequence[float] | None = None
    """What the critic should have said."""
    top_ids: Sequence[Sequence[int]] | None = None
    """The sampler's most likely tokens at each position; empty lists where loss_mask is 0."""
    top_logprobs: Sequence[Sequence[float]] | None = None
    keep_ids: Sequence[Sequence[int]] | None = None
    """Which tokens could be drawn at each position; empty lists where loss_mask is 0. None: all of them. Every
    log-probability and entropy of the row, by whatever model, is that within these; those of top_ids are not."""
    routes: Sequence[Sequence[int]] | None = None
    """Experts by which the sampler computed each token, those of the first layer first; empty lists where there is no
    record, as at the last token of a row. None: none were recorded."""
    reward: float = 0.0
    """Reward of the trajectory, before shaping."""
    weight_slope: float = 0.0
    """Derivative of the logarithm of its weights by what a learned weighting learns; 0 for all others."""
    teacher: str = ""
    """Name of the teacher that reads this row, where there are several: the domain of its task."""

    def __post_init__(self) -> None:
        hold(self, integers, "token_ids", "versions")
        hold(self, bits, "loss_mask")
        hold(self, floats, "behavior_logprobs", "advantages", "weights", *_FLOATS)
        hold(self, lambda rows: ragged(rows, np.int32), "top_ids", "keep_ids")
        hold(self, ragged, "top_logprobs", "routes")
        require_parallel(self, "token_ids", "loss_mask", "behavior_logprobs", "versions", "advantages", "weights")
        for name in OPTIONAL_COLUMNS:
            if getattr(self, name) is not None:
                require_parallel(self, "token_ids", name)
        assert not self.loss_mask or self.loss_mask[0] == 0, "the first token has no position that scores it"

    @property
    def num_actions(self) -> int:
        return int(array_of(self.loss_mask).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """Rows laid end to end. All tensors are [T]; float fields keep the precision they were packed with."""

    token_ids: Tensor
    positions: Tensor
    """Restart at 0 with every row."""
    sequence_ids: Tensor
    """Row number; attention never crosses it."""
    trajectory_ids: Tensor
    """Rollout number inside the microbatch; sequence-level ratios sum over it. Rows of one rollout stay together."""
    loss_mask: Tensor
    behavior_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    versions: Tensor
    lengths: tuple[int, ...]
    """Tokens of each row; they sum to T."""
    rows: tuple[int, ...] = ()
    """Number of each row among the samples that were packed; empty: not packed from samples."""
    rewards: Tensor | None = None
    """Reward of each token's trajectory, before shaping. None: not packed from samples."""
    weight_slopes: Tensor | None = None
    """Sample.weight_slope of each token's trajectory."""
    teachers: tuple[str, ...] = ()
    """Sample.teacher of each row; empty: nobody's."""
    proximal_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None
    teacher_logprobs: Tensor | None = None
    values: Tensor | None = None
    targets: Tensor | None = None
    top_ids: Tensor | None = None
    """[T, K] most likely tokens of the sampler (int32), or of the trainer when the batch started."""
    top_logprobs: Tensor | None = None
    """[T, K] their log-probabilities under the policy that named them."""
    keep_ids: tuple[NDArray[np.int32], ...] | None = None
    """By row: the tokens that could be drawn, those of one position after those of another. They are the largest part
    of a batch by far, so rows lend them and nothing is copied before a pass needs it. None: all tokens, everywhere."""
    keep_counts: Tensor | None = None
    """[T] how many of keep_ids belong to each position; 0 where loss_mask is 0."""
    routes: Tensor | None = None
    """[T, layers * experts] by which the sampler computed each token. None: none were recorded."""
    is_routed: Tensor | None = None
    """[T] which tokens have such a record."""
    router_ids: Tensor | None = None
    """[T, layers, experts] chosen by the router when the batch started."""
    router_logprobs: Tensor | None = None
    """[T, layers, experts] log-probabilities of those experts."""

    def __post_init__(self) -> None:
        require_parallel(
            self, "token_ids", "positions", "sequence_ids", "trajectory_ids", "loss_mask", "behavior_logprobs",
            "advantages", "weights", "versions", *(() if self.keep_counts is None else ("keep_counts",)),
        )  # fmt: skip
        assert sum(self.lengths) == len(self.token_ids), "row lengths must add up to the packed tokens"
        assert len(self.rows) in (0, len(self.lengths)), "either every row has its number or none"
        assert len(self.teachers) in (0, len(self.lengths)), "either every row has its teacher's name or none"

    @property
    def has_credit(self) -> bool:
        return bool(self.advantages.any())

    def to(self, device: torch.device) -> Microbatch:
        import torch

        tensors = {
            name: value.to(device)
            for name in self.__dataclass_fields__
            if isinstance(value := getattr(self, name), torch.Tensor)
        }
        return dataclasses.replace(self, **tensors)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptHistory:
    """What a stage has seen of one prompt, over all draws of it that steps consumed, trained and dropped alike."""

    task_id: str
    source: str = ""
    """Name of its source, where the stage tells its sources apart."""
    draws: int = 0
    """Groups that were drawn of it."""
    attempts: int = 0
    """Answers of the policy that have a score."""
    passed: float = 0.0
    """How many of them passed; where credit is partial, the sum of their shares."""
    rate: float | None = None
    """Running pass rate, in which late groups count more; None: no answer was ever scored."""
    last_step: int = 0
    """Step that consumed its newest group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one training step consumes: rows with credit, and the groups they came from."""

    updates: tuple[tuple[Sample, ...], ...]
    """One tuple per optimiser step; each is its own global batch with its own denominators. A batch of several epochs
    has its rows again in later ones, with weights of their own."""
    groups: tuple[Group, ...] = ()
    """Trained groups in draw order; empty for supervised data."""
    dropped: tuple[tuple[Group, str], ...] = ()
    """Groups that were rolled and not trained, each with the reason."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    system: Mapping[str, float] = field(default_factory=dict)
    """What its source did, in numbers that differ from run to run."""
    histories: tuple[PromptHistory, ...] = ()
    """Of the prompts that the step consumed, after it; empty where no reward judges what is drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """Weights of one version on their way to the samplers."""

    version: int
    tensors: Mapping[str, Tensor]
    """Every parameter by its name in the model. A sampler that shares the storage copies nothing. Some mappings make
    a tensor when it is asked for: ask once."""
    alike: Mapping[str, Tensor] | None = None
    """Tensors of the same names, shapes and types that exist already, for checks. None: look at `tensors`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What the trainer found at every token of one row; 0.0 where nothing was drawn."""

    policy_logprobs: Sequence[float]
    """By the policy that the row first trained."""
    entropies: Sequence[float]

    def __post_init__(self) -> None:
        hold(self, floats, "policy_logprobs", "entropies")


Traces = Mapping[tuple[str, int, int], Trace]
"""By group, member and number of the row among those of the trajectory. Only rows of this rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """What the trainer did with one batch."""

    loss: float
    metrics: Mapping[str, float]
    seconds: Mapping[str, float]
    traces: Traces | None = None
    """None: switched off, or the objective took a step of its own."""
    model_flops: float = 0.0
    """FLOPs that the policy had to compute for it, over all ranks (runs/flops.py)."""
    loads: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """By layer with a router, how many drawn tokens chose each expert. Empty: no routers are seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One line of a run: everything the step was, in numbers."""

    stage: int
    step: int
    """From 1, inside the stage."""
    version: int
    """Version of the weights after the step."""
    loss: float
    metrics: Mapping[str, float]
    """A pure function of data and weights: equal to the bit after a resume."""
    seconds: Mapping[str, float]
    """Wall time by phase; sums to the step. Differs from run to run."""
    system: Mapping[str, float]
    """Throughput, memory and engine counters. Differs from run to run."""
    groups_trained: int
    groups_dropped: int
    max_staleness: int
    traces: Traces | None = None
    """By (group id, index, number of the row); None: the trainer kept none."""
    loads: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Tokens of each expert by layer (TrainResult.loads)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """Held-out score of one weights version, with everything needed to compare it fairly."""

    stage: int
    step: int
    name: str
    """What was measured: "greedy" or "sampled"."""
    score: float
    low: float
    high: float
    """95% interval, clustered by prompt."""
    num_prompts: int
    samples_per_prompt: int
    constant_score: float
    """Score of always giving the commonest answer: a gain up to it proves nothing."""
    budget: Mapping[str, Scalar]
    """Prompts hash, decoding parameters, verifier; results are comparable only when equal."""
    details: Mapping[str, float | Mapping[str, float]] = field(default_factory=dict)
    """More about the same samples: "pass@4" and other estimates as {"score", "low", "high"}, and plain numbers such as
    "proxy_gap", by how much the training reward is above the held-out verifier's score."""


def total_tokens(samples: Sequence[Sample]) -> int:
    return sum(len(sample.token_ids) for sample in samples)
