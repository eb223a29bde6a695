"""What the loss is made of: the tokens the policy drew, with every log-probability and all credit.

Owns: the columns, and that nothing but the policy carries a gradient. Refuses: mathematics.
Shapes: _T drawn tokens of one microbatch (or of a whole batch), _S its trajectories, K most likely tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from temper.types import Microbatch, require_parallel

MAX_LOG_RATIO = 20.0
"""exp(20) is far beyond any trust region and still finite in float32, also when squared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopTokens:
    """The K most likely tokens of an earlier policy at each position, and what both policies think of them."""

    ids: Tensor
    """[T, K]; most likely first."""
    anchor_logprobs: Tensor
    """[T, K] by the policy that chose them: the sampler, or the trainer when the batch started."""
    policy_logprobs: Tensor
    """[T, K] by the current policy, with gradient."""

    def __post_init__(self) -> None:
        require_parallel(self, "ids", "anchor_logprobs", "policy_logprobs")
        assert not self.anchor_logprobs.requires_grad, "anchor_logprobs must not carry a gradient"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """What one forward pass says about the drawn tokens of a microbatch, all [T] and in its order."""

    logprobs: Tensor
    """Log-probabilities under the distribution each token was drawn from: the whole vocabulary, or its keep-set."""
    entropy: Tensor
    """Over the whole vocabulary."""
    whole_logprobs: Tensor | None = None
    """Log-probabilities over the whole vocabulary. None: there are no keep-sets, and logprobs are the same."""
    top_logprobs: Tensor | None = None
    """[T, K] of the microbatch's top_ids. None: it has none."""
    router_shift: Tensor | None = None
    """Mean over layers and old experts of |log q - log q_old| of the router. None: not asked for."""
    uniform: Tensor | None = None
    """-mean over the vocabulary of log p, with gradient. None: not asked for; the same below."""
    divergence: Tensor | None = None
    """Distance from the teacher's distribution, as the loss measures it, with gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The tokens one microbatch drew, and nothing else: there is no mask to forget.

    All rows of a trajectory are here, so sequence-level sums are complete.
    """

    policy_logprobs: Tensor
    """With gradient. For losses that need "scores": the output of a scalar head instead."""
    proximal_logprobs: Tensor
    """By the trainer when the batch started. With one update per batch: the detached policy."""
    behavior_logprobs: Tensor
    """As sampled."""
    advantages: Tensor
    weights: Tensor
    """Share of each token in the loss of the whole batch."""
    trajectory_ids: Tensor
    """From 0 to num_trajectories - 1, ascending: the tokens of a trajectory lie side by side."""
    num_trajectories: int
    """May exceed the number of trajectories that have tokens here."""
    num_batch_tokens: int
    """Drawn tokens of the whole optimiser step, over all microbatches and ranks."""
    versions: Tensor
    """Version of the weights that drew each token."""
    version: int = 0
    """Version of the weights being trained. A token's staleness is this minus its entry in versions."""
    seed: int = 0
    """For factors that choose tokens at random: one number per optimiser step of a run."""
    token_ids: Tensor | None = None
    rewards: Tensor | None = None
    """Reward of each token's trajectory, before shaping. None: the factors at hand do not read it."""
    weight_slopes: Tensor | None = None
    """Derivative of log(weights) by what a learned weighting learns."""
    reference_logprobs: Tensor | None = None
    """None: the objective does not need them."""
    teacher_logprobs: Tensor | None = None
    entropy: Tensor | None = None
    """Entropy of the policy over the whole vocabulary. None: not computed."""
    whole_logprobs: Tensor | None = None
    """As over_vocabulary, where tokens were drawn within keep-sets; None where they were not."""
    top: TopTokens | None = None
    router_shift: Tensor | None = None
    """How far the router moved from the experts it chose when the batch started (Scored.router_shift)."""
    uniform: Tensor | None = None
    """Cross-entropy of the policy against all tokens alike, with gradient (Scored.uniform)."""
    divergence: Tensor | None = None
    """Distance of the policy's distribution from the teacher's, with gradient (Scored.divergence)."""
    measured: Mapping[str, Tensor] = field(default_factory=dict)
    """By factor name: one number per token, taken from the whole batch beforehand (objective.Measured)."""
    scales: Mapping[str, float] = field(default_factory=dict)
    """By factor name: what its coefficient is multiplied by now (controllers.py). Absent: 1."""

    def __post_init__(self) -> None:
        constants = ["proximal_logprobs", "behavior_logprobs", "advantages", "weights", "trajectory_ids", "versions"]
        optional = ("token_ids", "rewards", "weight_slopes", "reference_logprobs", "teacher_logprobs", "router_shift")
        constants += [name for name in optional if getattr(self, name) is not None]
        require_parallel(self, "policy_logprobs", *constants, *(["entropy"] if self.entropy is not None else []))
        for name in constants:
            # A proximal policy that was not detached gives ratio 1 with gradient 0: training runs and learns nothing.
            assert not getattr(self, name).requires_grad, f"{name} must not carry a gradient"
        assert all(len(column) == len(self) for column in self.measured.values()), "measured columns must be parallel"

    def __len__(self) -> int:
        return len(self.policy_logprobs)

    @property
    def over_vocabulary(self) -> Tensor:
        """The policy's log-probabilities over the whole vocabulary, with gradient: what a reference is compared with.
        Ratios take policy_logprobs, which are within the keep-sets of a sampler that truncates, as its own are."""
        return self.policy_logprobs if self.whole_logprobs is None else self.whole_logprobs

    @staticmethod
    def of(
        microbatch: Microbatch,
        scored: Scored,
        *,
        num_batch_tokens: int,
        version: int = 0,
        seed: int = 0,
        measured: Mapping[str, Tensor] | None = None,
        scales: Mapping[str, float] | None = None,
    ) -> Tokens:
        """The drawn tokens of a microbatch; `scored` and `measured` hold those tokens only, in its order."""
        device = scored.logprobs.device
        # Once, on the host: selecting by a mask on a GPU would wait for it at every column.
        drawn = microbatch.loss_mask.nonzero()[:, 0]

        def take(column_T: Tensor | None) -> Tensor | None:
            return None if column_T is None else column_T[drawn.to(column_T.device)].to(device)

        def need(column_T: Tensor) -> Tensor:
            return column_T[drawn.to(column_T.device)].to(device)

        proximal, top = take(microbatch.proximal_logprobs), None
        if scored.top_logprobs is not None:
            assert microbatch.top_ids is not None, "scored tokens that the microbatch does not name"
            assert microbatch.top_logprobs is not None, "top tokens without the log-probabilities that chose them"
            top = TopTokens(
                ids=need(microbatch.top_ids),
                anchor_logprobs=need(microbatch.top_logprobs),
                policy_logprobs=scored.top_logprobs,
            )
        return Tokens(
            policy_logprobs=scored.logprobs,
            proximal_logprobs=scored.logprobs.detach() if proximal is None else proximal,
            behavior_logprobs=need(microbatch.behavior_logprobs),
            advantages=need(microbatch.advantages),
            weights=need(microbatch.weights),
            trajectory_ids=need(microbatch.trajectory_ids),
            num_trajectories=len(microbatch.lengths),
            num_batch_tokens=num_batch_tokens,
            versions=need(microbatch.versions),
            version=version,
            seed=seed,
            token_ids=need(microbatch.token_ids),
            rewards=take(microbatch.rewards),
            weight_slopes=take(microbatch.weight_slopes),
            reference_logprobs=take(microbatch.reference_logprobs),
            teacher_logprobs=take(microbatch.teacher_logprobs),
            entropy=scored.entropy,
            whole_logprobs=scored.whole_logprobs,
            top=top,
            router_shift=scored.router_shift,
            uniform=scored.uniform,
            divergence=scored.divergence,
            measured={name: column.to(device) for name, column in (measured or {}).items()},
            scales=scales or {},
        )

    def cpu(self) -> Tokens:
        """All columns detached and on the CPU, to be sent to other ranks. Top tokens stay behind."""
        columns = {
            name: value.detach().cpu()
            for name in self.__dataclass_fields__
            if isinstance(value := getattr(self, name), Tensor)
        }
        return dataclasses.replace(self, top=None, measured={}, **columns)  # type: ignore[arg-type]

    def sum_by_trajectory(self, values_T: Tensor) -> Tensor:
        return ordered_sums(values_T, self.trajectory_ids, self.num_trajectories)

    def mean_by_trajectory(self, values_T: Tensor) -> Tensor:
        counts_S = self.sum_by_trajectory(torch.ones_like(values_T))
        return self.sum_by_trajectory(values_T) / counts_S.clamp(min=1)

    def max_by_trajectory(self, values_T: Tensor) -> Tensor:
        """Minus infinity for trajectories without tokens here."""
        lowest_S = values_T.new_full((self.num_trajectories,), -float("inf"))
        return lowest_S.scatter_reduce(0, self.trajectory_ids, values_T, "amax")


def ordered_sums(values_T: Tensor, ids_T: Tensor, count: int) -> Tensor:
    """[count] sums over the tokens of each id, which ascend. From first to last: adding at places runs in no fixed
    order on a GPU, and two equal runs would differ in their last bits."""
    assert ids_T.is_cuda or bool((ids_T[1:] >= ids_T[:-1]).all()), "tokens of one trajectory must lie side by side"
    ends = torch.searchsorted(ids_T, torch.arange(count, device=ids_T.device), right=True)
    lengths = ends.diff(prepend=ends.new_zeros(1))
    return torch.segment_reduce(values_T, "sum", lengths=lengths, unsafe=True)


def bounded(log_ratio: Tensor) -> Tensor:
    """Log ratio that is safe to exponentiate. Sums over long sequences reach 1000, and exp of that is infinite."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def join(parts: list[Tokens]) -> Tokens:
    """The tokens of several microbatches as one, without gradient. Order of the parts is the order of the tokens."""
    assert parts, "a batch has at least one microbatch"
    first, offsets = parts[0], [0]
    for part in parts:
        offsets.append(offsets[-1] + part.num_trajectories)
    owners = [part.trajectory_ids + offset for part, offset in zip(parts, offsets, strict=False)]

    def together(name: str) -> Tensor | None:
        columns = [getattr(part, name) for part in parts]
        return None if columns[0] is None else torch.cat([column.detach() for column in columns])

    names = (
        "policy_logprobs", "proximal_logprobs", "behavior_logprobs", "advantages", "weights", "versions", "token_ids",
        "rewards", "weight_slopes", "reference_logprobs", "teacher_logprobs", "entropy", "whole_logprobs",
        "router_shift",
    )  # fmt: skip
    return Tokens(
        **{name: together(name) for name in names},  # type: ignore[arg-type]
        trajectory_ids=torch.cat(owners),
        num_trajectories=offsets[-1],
        num_batch_tokens=first.num_batch_tokens,
        version=first.version,
        seed=first.seed,
        scales=first.scales,
    )
