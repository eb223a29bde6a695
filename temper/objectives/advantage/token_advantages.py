"""Credit inside a trajectory: one advantage per drawn token. Runs once per batch, on the CPU, in float64.

Owns: returns to go, generalised advantages, values of steps, distillation. Refuses: whitening (normalizers.py), the
critic's targets (critics.py). Observations are not in Credit, so credit passes over them unchanged.
Shapes: _B scored trajectories of the batch, _N their drawn tokens, trajectory after trajectory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from temper.objectives.advantage.advantages import group_sum, returns_of
from temper.objectives.advantage.credit import Credit
from temper.objectives.factor import factor, require
from temper.objectives.objective import Advantage
from temper.objectives.tokens import bounded

AdvantageFn = Callable[[Credit], Tensor]


@factor(along={"gamma": 1})
def returns_to_go(gamma: float = 1.0) -> AdvantageFn:
    """A_t = G_t = R_t + gamma G_{t+1}; R_t is the reward inside the trajectory, plus the outcome at the last token.

    A token is not credited for what came before it. Unbiased at gamma = 1, for groups of any size. REINFORCE++, which
    whitens over the batch afterwards; OpenRLHF, verl.
    """
    require_share("returns_to_go", "gamma", gamma)
    return lambda credit: discounted_sums(rewards_at_tokens(credit), gamma, credit.lengths)


@factor(needs=("greedy",), along={"gamma": 1})
def greedy_baseline(gamma: float = 1.0) -> AdvantageFn:
    """A_t = G_t - R of the greedy answer to the same task. Unbiased at gamma = 1, for groups of any size.

    ReMax, Li et al. 2023; verl.
    """
    require_share("greedy_baseline", "gamma", gamma)

    def advantage(credit: Credit) -> Tensor:
        assert credit.greedy_rewards is not None, "greedy_baseline needs one greedy rollout per task"
        to_go_N = discounted_sums(rewards_at_tokens(credit), gamma, credit.lengths)
        return to_go_N - credit.spread(credit.greedy_rewards)

    return advantage


@factor(needs=("values",), along={"gamma": 1, "lam": 1, "bootstrap_truncated": 0})
def gae(gamma: float = 1.0, lam: float = 0.95, bootstrap_truncated: int = 0) -> AdvantageFn:
    """delta_t = R_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lam A_{t+1}; V = A = 0 after the last token.

    lam = 1 is unbiased whatever the critic says, lower is biased by its errors and less noisy. bootstrap_truncated = 1:
    after an answer cut at a limit, V is that of its last state, for the task went on.
    Schulman et al. 2016; verl, OpenRLHF, TRL.
    """
    require_share("gae", "gamma", gamma)
    require_share("gae", "lam", lam)
    require(bootstrap_truncated in (0, 1), f"gae: bootstrap_truncated={bootstrap_truncated} must be 0 (no) or 1 (yes)")
    return lambda credit: generalized_advantages(credit, gamma, lam, bool(bootstrap_truncated))


@factor(needs=("values",), along={"gamma": 1, "alpha": math.inf})
def gae_by_length(gamma: float = 1.0, alpha: float = 0.05) -> AdvantageFn:
    """gae with lam_i = max(0, 1 - 1/(alpha T_i)): 0.8 for 100 tokens, 0.98 for 1000, so long answers decay less.

    Slightly biased even with a perfect critic: the decay of a token depends on how many are drawn after it. The floor
    at 0, for answers shorter than 1/alpha, is ours. VAPO, arXiv 2504.05118.
    """
    require_share("gae_by_length", "gamma", gamma)
    require(alpha > 0, f"gae_by_length: alpha={alpha} must be positive, e.g. 0.05")

    def advantage(credit: Credit) -> Tensor:
        return generalized_advantages(credit, gamma, credit.spread(lambda_by_length(credit.lengths, alpha)))

    return advantage


@factor(needs=("step_values",))
def step_values(samples: int = 9, separator: str = "\n", tokens: int = 0) -> AdvantageFn:
    """A of step s = R_s + V_{s+1} - V_s, V_s the mean reward of fresh rollouts from its start, 0 after the last step.

    Steps end after `separator`, or after `tokens` tokens when that is above 0; `samples` rollouts from each start. With
    several turns (rollout.max_turns) a step is a turn, and a fresh environment hears the turns before it again. Every
    token has the advantage of its step. R_s is what was paid inside the step; the last one has the outcome.
    VinePPO, Kazemnejad et al. 2024.
    """

    def advantage(credit: Credit) -> Tensor:
        steps_N, values_N = credit.step_ids, credit.step_values
        assert steps_N is not None, "step_values needs the reasoning steps"
        assert values_N is not None, "step_values needs rollouts from inside each completion"
        is_last_N = _tokens_after(credit.lengths) == 0
        is_end_N = is_last_N | (steps_N != _following(steps_N))
        next_N = torch.where(is_end_N & ~is_last_N, _following(values_N), torch.zeros_like(values_N))
        # Steps numbered over the whole batch: as many as have ended before this token.
        number_N = is_end_N.cumsum(0) - is_end_N.long()
        gains = values_N.new_zeros(len(values_N)).index_add(0, number_N, rewards_at_tokens(credit) + next_N)
        return gains[number_N] - values_N

    return advantage


@factor(needs=("turns",), min_group=2)
def turn_returns(gamma: float = 1.0, outcome: float = 0.0, past: float = 0.0) -> AdvantageFn:
    """A of turn k = G_k - mean over the group of G_k, G_k = what turn k and later ones were paid, discounted by turn.

    Credit by turn for environments that pay per turn: a good first call is not blamed for a bad last answer. The mean
    is over the members that reached turn k; one alone there gets 0. Without payment per turn: group_mean.
    gamma = 0: each turn by its own payment alone. The outcome is not added, or `outcome` times (R - mean of R) is, to
    every turn: use 0 when the reward is what the environment pays, or with a process reward by turn, which pays the
    outcome to the last turn. Shaping changes the outcome: it is refused.
    past: G_k also has this share of what turns before k were paid, discounted as far back; 0: a turn is not credited
    for what it could not change, which is noise; 1, with gamma = 1: each turn has the whole return.
    """
    require_share("turn_returns", "gamma", gamma)
    require_share("turn_returns", "past", past)
    require(outcome >= 0, f"turn_returns: outcome={outcome} must be 0 or more, e.g. 0.5")

    def advantage(credit: Credit) -> Tensor:
        assert credit.turn_ids is not None, "turn_returns needs the turns"
        if credit.turn_rewards is None:
            return credit.spread(outcome_advantages(credit))
        turns = turns_of(credit)
        gained = centred(turns.returns(turns.paid(credit), gamma, past), turns.cells(turns.numbers))
        return gained[turns.of_token] + outcome * credit.spread(outcome_advantages(credit))

    return advantage


@factor(needs=("turns",), min_group=2)
def state_returns(gamma: float = 0.95, weight: float = 1.0) -> AdvantageFn:
    """A of turn k = (R - mean of R) + weight (G_k - mean of G over the group's turns that began in the same state).

    G_k = what turn k and later ones were paid, discounted by turn; without payment per turn the outcome is paid to the
    last one. Two turns begin in the same state when the environment names it alike (EnvReply.state), however they came
    there; where it names none, when the model saw the same tokens, that is, until members part. One alone in its state
    is compared with nobody. GiGPO, arXiv 2505.10978, without its division by the deviation.
    """
    require_share("state_returns", "gamma", gamma)
    require(weight > 0, f"state_returns: weight={weight} must be positive, e.g. 1.0. Use group_mean without it")

    def advantage(credit: Credit) -> Tensor:
        assert credit.turn_states is not None, "state_returns needs the state before each turn"
        turns = turns_of(credit)
        gained = centred(turns.returns(turns.paid(credit), gamma), turns.cells(turns.states))
        return credit.spread(outcome_advantages(credit)) + weight * gained[turns.of_token]

    return advantage


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """One entry for each member and turn that drew something, in that order and in time, however many tokens it has."""

    of_token: Tensor
    """[N] which turn each token belongs to."""
    numbers: Tensor
    """From 0 in each trajectory."""
    states: Tensor
    groups: Tensor
    per_member: Tensor
    """[B] turns of each trajectory."""

    def paid(self, credit: Credit) -> Tensor:
        """What each turn was paid; where none was paid for, what its tokens were, and the last one the outcome."""
        paid_N = credit.token_rewards if credit.turn_rewards is None else credit.turn_rewards
        paid = torch.zeros(len(self.numbers), dtype=torch.float64)
        if paid_N is not None:
            paid = paid.index_add(0, self.of_token, paid_N)
        if credit.turn_rewards is None:  # not at the last token: of an agent's turns the newest need not stand last
            paid[self.per_member.cumsum(0) - 1] += credit.rewards
        return paid

    def returns(self, paid: Tensor, gamma: float, past: float = 0.0) -> Tensor:
        to_go = discounted_sums(paid, gamma, self.per_member)
        if not past:
            return to_go
        # The same run backwards, less the turn itself, which it also holds.
        so_far = discounted_sums(paid.flip(0), gamma, self.per_member.flip(0)).flip(0)
        return to_go + past * (so_far - paid)

    def cells(self, keys: Tensor) -> Tensor:
        """Turns of one group with one key get one number, from 0."""
        return torch.unique(torch.stack((self.groups, keys)), dim=1, return_inverse=True)[1]


def turns_of(credit: Credit) -> Turns:
    assert credit.turn_ids is not None, "the number of each token's turn"
    width = int(credit.turn_ids.max()) + 1 if len(credit.turn_ids) else 1
    pairs, of_token = torch.unique(credit.owners * width + credit.turn_ids, return_inverse=True)
    members = pairs // width
    states = torch.zeros(len(pairs), dtype=torch.int64)
    if credit.turn_states is not None:
        states[of_token] = credit.turn_states
    return Turns(
        of_token=of_token,
        numbers=pairs % width,
        states=states,
        groups=credit.group_ids[members],
        per_member=torch.bincount(members, minlength=len(credit.lengths)),
    )


def outcome_advantages(credit: Credit) -> Tensor:
    """[B] R - mean of R over the group."""
    return centred(returns_of(credit), credit.group_ids)


def centred(values: Tensor, cells: Tensor) -> Tensor:
    """Each value less the mean of its cell."""
    return values - group_sum(values, cells) / group_sum(torch.ones_like(values), cells)


@factor(needs=("teacher",), along={"discount": 0})
def distillation(coefficient: float = 1.0, discount: float = 0.0) -> AdvantageFn:
    """A_t = -coefficient * sum_{k>=0} discount^k (log mu - log pi_T) at t+k: reverse KL to a teacher.

    Each difference is bounded by 20: a token the teacher rules out must not be worth minus infinity. To add this to a
    task's advantage use the normalizer add_distillation. On-policy distillation, Thinking Machines 2025;
    tinker-cookbook, slime.
    """
    require(coefficient > 0, f"distillation: coefficient={coefficient} must be positive, e.g. 1.0")
    require_share("distillation", "discount", discount)
    return lambda credit: teacher_advantages(credit, coefficient, discount)


def teacher_advantages(credit: Credit, coefficient: float, discount: float) -> Tensor:
    """[N] see distillation."""
    assert credit.behavior_logprobs is not None, "distillation needs the sampled log-probabilities"
    assert credit.teacher_logprobs is not None, "distillation needs the log-probabilities of a teacher"
    excess_N = bounded(credit.behavior_logprobs - credit.teacher_logprobs)
    return -coefficient * discounted_sums(excess_N, discount, credit.lengths)


def generalized_advantages(credit: Credit, gamma: float, lam: float | Tensor, is_bootstrapped: bool = False) -> Tensor:
    """[N] see gae; `lam` is one number, or one per token that is the same inside a trajectory."""
    values_N = credit.values
    assert values_N is not None, "generalised advantages need a critic"
    count = int((~values_N.isfinite()).sum())
    require(count == 0, f"{count} values of the critic are not finite: it diverged. Try a smaller learning rate.")
    last_N = torch.where(credit.spread(credit.is_truncated & is_bootstrapped), values_N, 0.0)
    next_N = torch.where(_tokens_after(credit.lengths) > 0, _following(values_N), last_N)
    return discounted_sums(rewards_at_tokens(credit) + gamma * next_N - values_N, gamma * lam, credit.lengths)


def lambda_by_length(lengths_B: Tensor, alpha: float) -> Tensor:
    """[B] VAPO's decay: max(0, 1 - 1/(alpha T))."""
    return (1 - 1 / (alpha * lengths_B.double())).clamp(min=0)


def rewards_at_tokens(credit: Credit) -> Tensor:
    """[N] what is paid at each token: rewards inside the trajectory, and its outcome at the last token."""
    returns_of(credit)  # Refuses what is not finite.
    outcome_N = torch.where(_tokens_after(credit.lengths) == 0, credit.spread(credit.rewards), 0.0)
    return outcome_N if credit.token_rewards is None else outcome_N + credit.token_rewards


def discounted_sums(values_N: Tensor, discount: float | Tensor, lengths_B: Tensor) -> Tensor:
    """[N] y_t = x_t + discount * y_{t+1} inside each trajectory; `discount` is the same for all of its tokens.

    By doubling: a sum over 2k tokens is one over k tokens and the discounted one that starts k later, so a trajectory
    of 32768 tokens takes 15 steps of whole columns.
    """
    after_N = _tokens_after(lengths_B)
    power_N = torch.as_tensor(discount, dtype=values_N.dtype).expand(len(values_N))
    sums_N, span = values_N, 1
    while span <= (int(after_N.max()) if len(after_N) else 0):
        later_N = torch.where(after_N >= span, sums_N.roll(-span), 0.0)
        sums_N, power_N, span = sums_N + power_N * later_N, power_N.square(), 2 * span
    return sums_N


def require_share(place: str, name: str, value: float) -> None:
    """Refuses a discount or a decay that is not between 0 and 1."""
    require(0 <= value <= 1, f"{place}: {name}={value} must be between 0 and 1, e.g. 0.95")


def _tokens_after(lengths_B: Tensor) -> Tensor:
    """[N] drawn tokens that follow in the same trajectory."""
    return lengths_B.cumsum(0).repeat_interleave(lengths_B) - 1 - torch.arange(int(lengths_B.sum()))


def _following(values_N: Tensor) -> Tensor:
    """[N] value of the next token; meaningless at the last token of a trajectory."""
    return values_N.roll(-1)


TOKEN_ADVANTAGES: dict[str, Callable[..., Advantage]] = {
    "turn_returns": turn_returns,
    "state_returns": state_returns,
    "returns_to_go": returns_to_go,
    "greedy_baseline": greedy_baseline,
    "gae": gae,
    "gae_by_length": gae_by_length,
    "step_values": step_values,
    "distillation": distillation,
}
