"""What credit is made of: the scored trajectories of one whole batch, on the CPU in float64.

Owns: the columns that rewards, baselines and critics read. Refuses: mathematics (shaping, advantages, normalizers).
Shapes: _B trajectories of the batch, _N their drawn tokens, trajectory after trajectory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from temper.types import require_parallel


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """Unscorable members are not in it: they enter no mean and get no credit.

    Two trajectories of 2 and 1 tokens have lengths [2, 1] and every _N column three entries: those of the first, then
    that of the second. Observations have no place here, so nothing can be credited across them by mistake.
    """

    rewards: Tensor
    """[B] outcome of each trajectory."""
    group_ids: Tensor
    """[B] ints from 0; one group is one draw of one task."""
    lengths: Tensor
    """[B] drawn tokens, at least 1 each."""
    is_truncated: Tensor
    """[B]"""
    max_new_tokens: int
    """Most tokens of one turn."""
    max_episode_tokens: int = 0
    """Most tokens of all turns of a trajectory together; 0: no limit but that of each turn."""
    token_rewards: Tensor | None = None
    """[N] rewards inside the trajectories, such as -beta KL, added to the outcome. None: none."""
    turn_rewards: Tensor | None = None
    """[N] what each turn was paid, on the turn's last token: by the environment, or by a reward that pays turns, the
    outcome then included. None: no turn was paid for."""
    turn_ids: Tensor | None = None
    """[N] number in time of the turn that each token belongs to, from 0 in each trajectory."""
    turn_states: Tensor | None = None
    """[N] equal for tokens of turns that began in the same state: one that the environment named alike, or, where it
    names none, one in which the model saw the same."""
    reward_parts: Mapping[str, Tensor] = field(default_factory=dict)
    """[B] what each part added to the reward, by name: after bounds, weight and gates; NaN where a member lacks it."""
    part_weights: Mapping[str, float] = field(default_factory=dict)
    """Weight of each part; absent: 1."""
    greedy_rewards: Tensor | None = None
    """[B] reward of the greedy rollout of each trajectory's task. None: not rolled."""
    behavior_logprobs: Tensor | None = None
    """[N] as sampled."""
    proximal_logprobs: Tensor | None = None
    """[N] by the trainer when the batch started. None: no factor needs them; the same below."""
    reference_logprobs: Tensor | None = None
    teacher_logprobs: Tensor | None = None
    values: Tensor | None = None
    """[N] of the critic: expected return before each token."""
    step_ids: Tensor | None = None
    """[N] number of the reasoning step that each token belongs to, from 0 in each trajectory."""
    step_values: Tensor | None = None
    """[N] mean reward of fresh rollouts from the start of each token's step."""
    member_keys: Tensor | None = None
    """[B] a stable random number per trajectory and step, for factors that draw."""
    scales: Mapping[str, float] = field(default_factory=dict)
    """By factor name: what its coefficient is multiplied by now (controllers.py). Absent: 1."""

    def __post_init__(self) -> None:
        by_member = ("greedy_rewards", "member_keys")
        given = [name for name in by_member if getattr(self, name) is not None]
        require_parallel(self, "rewards", "group_ids", "lengths", "is_truncated", *given)
        by_token = ("token_rewards", "behavior_logprobs", "proximal_logprobs", "reference_logprobs", "teacher_logprobs")
        total = int(self.lengths.sum())
        for name in (*by_token, "values", "step_ids", "step_values", "turn_rewards", "turn_ids", "turn_states"):
            column = getattr(self, name)
            assert column is None or len(column) == total, f"{name} needs one entry per drawn token"

    @property
    def owners(self) -> Tensor:
        """[N] which trajectory each token belongs to."""
        return torch.arange(len(self.lengths)).repeat_interleave(self.lengths)

    @property
    def returns(self) -> Tensor:
        """[B] everything a trajectory earned: its outcome and the rewards inside it."""
        if self.token_rewards is None:
            return self.rewards
        return self.rewards.index_add(0, self.owners, self.token_rewards)

    @property
    def longest_turns(self) -> Tensor:
        """[B] drawn tokens of each trajectory's longest turn."""
        if self.turn_ids is None or not len(self.turn_ids):
            return self.lengths
        number_N = self.owners * (self.turn_ids.max() + 1) + self.turn_ids
        _, turn_of_N, sizes = torch.unique(number_N, return_inverse=True, return_counts=True)
        return torch.zeros_like(self.lengths).scatter_reduce(0, self.owners, sizes[turn_of_N], "amax")

    def spread(self, values_B: Tensor) -> Tensor:
        """[N] the trajectory's value at each of its tokens."""
        return values_B.repeat_interleave(self.lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantages:
    """What normalizers change."""

    tokens: Tensor
    """[N]"""
    is_kept: Tensor
    """[B] False: the trajectory leaves the batch; it counts in no numerator and no denominator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How large a batch is, for weightings. A trajectory of length 0 counts nowhere."""

    lengths: Tensor
    """[B] drawn tokens."""
    group_ids: Tensor
    """[B] ints from 0."""
    max_new_tokens: int
    """Most tokens of one turn."""
    scales: Mapping[str, float] = field(default_factory=dict)
    """As in Credit."""
