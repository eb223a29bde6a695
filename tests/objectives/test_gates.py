"""Values and gradient weights of every gate on F1: tables F1-L and F1-W of specification 1.5."""

from __future__ import annotations

import pytest
import torch

from temper.errors import UserError
from temper.objectives.advantages import raw
from temper.objectives.corrections import token_tis
from temper.objectives.gates import cispo, clip, importance, none
from temper.objectives.objective import Objective, objective_loss
from temper.objectives.ratios import sequence_geometric, sequence_geometric_token, token
from temper.objectives.weighting import constant_length, sequence_mean, sequence_sum, token_mean, token_sum

WEIGHTINGS = (token_mean(), sequence_mean(), sequence_sum(), constant_length())
S1, S4 = 1.049206, 2.109502

LOSSES = [
    (token(), none(), (0.122928, -0.077235, 0.245855, 0.061464)),
    (token(), importance(), (-0.113125, 0.161875, -0.22625, -0.056563)),
    (token(), clip(), (-0.019375, 0.236875, -0.03875, -0.009688)),
    (token(), clip(high=0.28), (-0.034375, 0.226875, -0.06875, -0.017188)),
    (token(), clip(high=0.28, dual=3.0), (-0.159375, 0.101875, -0.31875, -0.079688)),
    (token(), clip(dual=4.0), (-0.081875, 0.174375, -0.16375, -0.040938)),
    (token(), cispo(cap=1.28), (0.308235, 0.106335, 0.616471, 0.154118)),
    (sequence_geometric(), clip(), (-0.157740, 0.107736, -0.315481, -0.078870)),
    (sequence_geometric_token(), clip(), (-0.157740, 0.107736, -0.315481, -0.078870)),
]

OMEGAS = [
    (token(), none(), [1.0] * 8),
    (token(), clip(), [1.1, 0, 0.7, 0.9, 0, 1.1, 5, 0.89]),
    (token(), clip(high=0.28), [1.1, 0, 0.7, 0.9, 0, 1.1, 5, 0.89]),
    (token(), clip(high=0.28, dual=3.0), [1.1, 0, 0.7, 0.9, 0, 1.1, 0, 0.89]),
    (token(), clip(dual=4.0), [1.1, 0, 0.7, 0.9, 0, 1.1, 0, 0.89]),
    (token(), cispo(cap=1.28), [1.1, 1.28, 0.7, 0.9, 0.2, 1.1, 1.28, 0.89]),
    (sequence_geometric(), clip(), [S1, S1, S1, 0, 0, 1.1, S4, S4]),
    (sequence_geometric_token(), clip(), [S1, S1, S1, 0, 0, 1.1, S4, S4]),
]


def objective(ratio, gate, weighting, corrections=()):
    parts = {"advantage": raw(), "ratio": ratio, "gate": gate, "weighting": weighting}
    return Objective(name="test", corrections=corrections, **parts)


@pytest.mark.parametrize(("ratio", "gate", "expected"), LOSSES, ids=str)
def test_losses_on_f1_under_four_weightings(f1, ratio, gate, expected) -> None:
    got = [objective_loss(objective(ratio, gate, w), f1(weighting=w))[0].item() for w in WEIGHTINGS]
    assert got == pytest.approx(expected, abs=1.1e-6)


def test_clip_times_token_tis_on_f1(f1) -> None:
    got = [objective_loss(objective(token(), clip(), w, (token_tis(),)), f1(weighting=w))[0].item() for w in WEIGHTINGS]
    assert got == pytest.approx((-0.063916, 0.218521, -0.127833, -0.031958), abs=1.1e-6)


@pytest.mark.parametrize(("ratio", "gate", "expected"), OMEGAS, ids=str)
def test_gradient_weights_on_f1(f1, ratio, gate, expected) -> None:
    tokens = f1()
    objective_loss(objective(ratio, gate, token_sum()), tokens)[0].backward()
    omega_T = -tokens.policy_logprobs.grad / tokens.advantages
    assert omega_T.tolist() == pytest.approx(expected, abs=1.1e-6)


def test_loss_matrix_of_clip_on_f1(f1) -> None:
    tokens = f1()
    matrix = -clip()(tokens, token()(tokens)).value
    assert matrix.tolist() == pytest.approx([-1.65, -1.8, -1.05, 0.45, 0.4, 0.55, 2.5, 0.445])


def test_clip_stops_gradient_only_where_the_update_already_went_too_far(f1) -> None:
    # Ratios 1.5 and 0.5, band [0.8, 1.2]: for A = +1 the first went too far, for A = -1 the second.
    # The other two moved the wrong way and must keep their gradient.
    for advantage, frozen in ((1.0, [True, False]), (-1.0, [False, True])):
        log_ratio_T = torch.tensor([1.5, 0.5] * 4, dtype=torch.float64).log().requires_grad_()
        tokens = f1(advantages=torch.full((8,), advantage, dtype=torch.float64))
        gain = clip()(tokens, log_ratio_T)
        gain.value.sum().backward()
        assert (log_ratio_T.grad == 0).tolist() == frozen * 4
        assert gain.clipped.tolist() == frozen * 4


def test_cispo_without_stop_gradient_would_miss_the_table(f1) -> None:
    # The mutation of 7.11: a weight that is differentiated adds the term A log pi dr.
    tokens = f1()
    ratio_T = token()(tokens).exp().clamp(max=1.28)
    (ratio_T * tokens.advantages * tokens.policy_logprobs).sum().backward()
    omega_T = tokens.policy_logprobs.grad / tokens.advantages
    assert omega_T.tolist() != pytest.approx([1.1, 1.28, 0.7, 0.9, 0.2, 1.1, 1.28, 0.89], abs=1e-3)


@pytest.mark.parametrize("arguments", [{"low": -0.1}, {"high": -1.0}, {"dual": 1.1}])
def test_clip_refuses_bounds_that_mean_nothing(arguments) -> None:
    with pytest.raises(UserError, match="clip"):
        clip(**arguments)


def test_cispo_refuses_a_cap_that_stops_everything() -> None:
    with pytest.raises(UserError, match="cap=0"):
        cispo(cap=0.0)
