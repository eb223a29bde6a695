"""Fork tokens: above a quantile of their own trajectory's entropies (SimKO)."""

from __future__ import annotations

import pytest
import torch

from temper.errors import UserError
from temper.objectives.advantage.forks import fork_tokens, quantile_by_trajectory, require_quantile


def test_forks_lie_above_the_quantile_of_their_own_trajectory(f1) -> None:
    entropy_T = torch.tensor([0.1, 0.9, 0.5, 2.0, 3.0, 7.0, 0.4, 0.4], dtype=torch.float64).requires_grad_()
    # Over the whole batch the quantile would be 2.6 and y1 would have no fork.
    assert fork_tokens(f1(entropy=entropy_T), 0.8).tolist() == [False, True, False, False, True, False, False, False]
    assert fork_tokens(f1(entropy=entropy_T), 0.0).tolist() == [False, True, True, False, True, False, False, False]


@pytest.mark.parametrize("quantile", [0.0, 0.25, 0.5, 0.8, 0.99])
def test_quantiles_of_all_trajectories_at_once_are_those_of_torch(f1, quantile) -> None:
    generator = torch.Generator().manual_seed(3)
    owners_T = torch.randint(0, 9, (200,), generator=generator).sort().values
    values_T = torch.randn(200, generator=generator, dtype=torch.float64)
    tokens = f1(
        **dict.fromkeys(("proximal_logprobs", "behavior_logprobs", "advantages", "weights"), values_T),
        policy_logprobs=values_T, reference_logprobs=None, trajectory_ids=owners_T, versions=owners_T,
        num_trajectories=11,
    )  # fmt: skip
    got_S = quantile_by_trajectory(tokens, values_T, quantile)
    expected = [values_T[owners_T == owner].quantile(quantile).item() for owner in range(9)]
    assert got_S.tolist() == pytest.approx([*expected, 0.0, 0.0], abs=1e-12)


def test_trajectories_of_one_token_or_of_equal_entropies_have_no_fork(f1) -> None:
    single = f1(trajectory_ids=torch.arange(8), num_trajectories=8, entropy=torch.linspace(0, 1, 8))
    assert not fork_tokens(single, 0.0).any()
    assert not fork_tokens(f1(entropy=torch.full((8,), 0.3)), 0.8).any()


def test_forks_do_not_depend_on_the_order_of_tokens_in_a_trajectory(f1) -> None:
    entropy_T = torch.tensor([0.1, 0.9, 0.5, 2.0, 3.0, 7.0, 0.4, 0.6])
    tokens = f1(entropy=entropy_T)
    mixed_T = torch.tensor([2, 0, 1, 4, 3, 5, 7, 6])
    mixed = f1(entropy=entropy_T[mixed_T], trajectory_ids=tokens.trajectory_ids[mixed_T])
    assert torch.equal(fork_tokens(mixed, 0.8), fork_tokens(tokens, 0.8)[mixed_T])


@pytest.mark.parametrize("quantile", [-0.1, 1.0])
def test_a_quantile_must_leave_something_above_it(quantile) -> None:
    with pytest.raises(UserError, match=f"quantile={quantile}"):
        require_quantile("test", quantile)
