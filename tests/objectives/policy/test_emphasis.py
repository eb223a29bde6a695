"""Advantages changed by what the policy is now: entropy-shaped, and SimKO's penalty."""

from __future__ import annotations

import pytest
import torch

from temper.errors import UserError
from temper.objectives import TopTokens
from temper.objectives.advantage.advantages import raw
from temper.objectives.objective import PolicyObjective, objective_loss
from temper.objectives.policy.emphasis import EMPHASES, entropy_shaped, top_choice_penalty
from temper.objectives.policy.gates import clip
from temper.objectives.policy.proximals import trainer
from temper.objectives.policy.ratios import top_k_spread
from temper.objectives.policy.weighting import token_mean

WORKED = {"advantages": [1.5, -0.5, 1.5, 0.0], "entropy": [2.0, 2.0, 0.5, 3.0], "expected": [2.25, -0.25, 1.7, 0.0]}
ENTROPY = [0.1, 0.9, 0.5, 2.0, 3.0, 7.0, 0.4, 0.6]
"""On F1 the forks are the tokens 1, 4 and 7."""
TOKEN_IDS = [5, 5, 5, 4, 5, 5, 5, 4]


def likely_tokens() -> TopTokens:
    """Token 5 is the favourite everywhere, then 4, then 3."""
    logprobs_TK = torch.tensor([0.5, 0.3, 0.1], dtype=torch.float64).log().expand(8, -1)
    return TopTokens(
        ids=torch.tensor([5, 4, 3]).expand(8, -1), anchor_logprobs=logprobs_TK, policy_logprobs=logprobs_TK
    )


def simko_columns() -> dict[str, object]:
    entropy_T = torch.tensor(ENTROPY, dtype=torch.float64)
    return {"entropy": entropy_T, "token_ids": torch.tensor(TOKEN_IDS), "top": likely_tokens()}


def test_entropy_shaped_advantages_on_the_worked_example(f1) -> None:
    columns = {name: torch.tensor(WORKED[name] * 2, dtype=torch.float64) for name in ("advantages", "entropy")}
    assert entropy_shaped()(f1(**columns)).tolist() == pytest.approx(WORKED["expected"] * 2)


def test_the_worked_example_rejects_an_entropy_bonus_without_bound() -> None:
    advantages, entropy = (torch.tensor(WORKED[name]) for name in ("advantages", "entropy"))
    assert (advantages + 0.4 * entropy).tolist() != pytest.approx(WORKED["expected"], abs=1e-3)


def test_entropy_shaping_never_flips_a_sign_and_carries_no_gradient(f1) -> None:
    entropy_T = torch.tensor([1e6] * 8, dtype=torch.float64).requires_grad_()
    tokens = f1(entropy=entropy_T)
    shaped_T = entropy_shaped(bound=1.0001)(tokens)
    assert torch.equal(shaped_T.sign(), tokens.advantages.sign())
    assert not shaped_T.requires_grad


def test_top_choice_penalty_strikes_wrong_forks_that_followed_the_favourite(f1) -> None:
    # Forks are 1 (right answer), 4 (wrong, drew the favourite) and 7 (wrong, drew the second choice).
    tokens = f1(**simko_columns())
    expected = tokens.advantages.tolist()
    expected[4] *= 1.1
    assert top_choice_penalty()(tokens).tolist() == pytest.approx(expected, abs=1e-12)
    assert top_choice_penalty(quantile=0.0)(tokens).tolist() == pytest.approx(expected, abs=1e-12)


def test_simko_as_a_whole_runs_in_the_loss(f1) -> None:
    objective = PolicyObjective(
        name="test",
        advantage=raw(),
        ratio=top_k_spread(),
        gate=clip(),
        proximal=trainer(),
        weighting=token_mean(),
        emphasis=(top_choice_penalty(),),
    )
    loss, _ = objective_loss(objective, f1(weighting=token_mean(), **simko_columns()))
    # The loss of clip on F1 and a tenth more of token 4's, which is 0.4 of 8 tokens.
    assert loss.item() == pytest.approx(-0.019375 + 0.1 * 0.4 / 8, abs=1e-6)


@pytest.mark.parametrize("name", EMPHASES)
def test_emphasis_of_nothing_is_nothing(f1, name) -> None:
    none_T = torch.zeros(0, dtype=torch.float64)
    columns = ("policy_logprobs", "proximal_logprobs", "behavior_logprobs", "advantages", "weights", "entropy")
    ids = dict.fromkeys(("trajectory_ids", "versions", "token_ids"), none_T.long())
    none_TK = torch.zeros(0, 3, dtype=torch.float64)
    top = TopTokens(ids=none_TK.long(), anchor_logprobs=none_TK, policy_logprobs=none_TK)
    empty = f1(**dict.fromkeys(columns, none_T), **ids, reference_logprobs=None, top=top)
    assert EMPHASES[name]()(empty).shape == (0,)


@pytest.mark.parametrize("name", EMPHASES)
def test_emphasis_leaves_the_given_advantages_as_they_are(f1, name) -> None:
    tokens = f1(**simko_columns())
    before = tokens.advantages.clone()
    EMPHASES[name]()(tokens)
    assert torch.equal(tokens.advantages, before)


def test_top_choice_penalty_asks_for_the_drawn_tokens(f1) -> None:
    columns = simko_columns() | {"token_ids": None}
    with pytest.raises(AssertionError, match="drawn tokens"):
        top_choice_penalty()(f1(**columns))


@pytest.mark.parametrize(
    ("build", "arguments"),
    [
        (entropy_shaped, {"scale": -0.1}),
        (entropy_shaped, {"bound": 1.0}),
        (top_choice_penalty, {"factor": -1.0}),
        (top_choice_penalty, {"quantile": 1.0}),
    ],
)
def test_emphasis_refuses_settings_that_mean_nothing(build, arguments) -> None:
    with pytest.raises(UserError, match=build.__name__):
        build(**arguments)


def test_emphases_say_what_they_need_and_what_is_not_established() -> None:
    assert all(build().name == name for name, build in EMPHASES.items())
    assert EMPHASES["entropy_shaped"]().experimental
    assert EMPHASES["top_choice_penalty"]().needs == {"policy_top_k"}
