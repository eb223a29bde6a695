"""Levels of the ratio: specification 1.4 and bug 7.25."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from temper.objectives.ratios import (
    RATIOS,
    sequence_geometric,
    sequence_geometric_token,
    sequence_product,
    token,
)

FIRST_TOKENS = [0, 3, 5, 6]


def test_token_ratio_on_f1(f1) -> None:
    assert token()(f1()).exp().tolist() == pytest.approx([1.1, 1.5, 0.7, 0.9, 0.2, 1.1, 5.0, 0.89])


def test_geometric_and_product_ratios_on_f1(f1) -> None:
    geometric_T, product_T = sequence_geometric()(f1()).exp(), sequence_product()(f1()).exp()
    assert geometric_T[FIRST_TOKENS].tolist() == pytest.approx([1.049206, 0.424264, 1.1, 2.109502], abs=1e-6)
    assert product_T[FIRST_TOKENS].tolist() == pytest.approx([1.155, 0.18, 1.1, 4.45])


def test_token_form_of_the_geometric_ratio_has_its_value_and_the_tokens_own_gradient(f1) -> None:
    tokens = f1()
    ratio_T = sequence_geometric_token()(tokens).exp()
    assert ratio_T.tolist() == pytest.approx(sequence_geometric()(tokens).exp().tolist())
    ratio_T[1].backward()
    assert tokens.policy_logprobs.grad.nonzero().flatten().tolist() == [1]


def test_geometric_ratio_spreads_its_gradient_evenly_over_the_trajectory(f1) -> None:
    tokens = f1()
    sequence_geometric()(tokens).exp()[0].backward()
    assert tokens.policy_logprobs.grad[:3].tolist() == pytest.approx([1.049206 / 3] * 3, abs=1e-6)


@pytest.mark.parametrize("name", RATIOS)
@pytest.mark.parametrize("gap", [1000.0, -1000.0])
def test_a_log_ratio_of_1000_stays_finite(f1, name, gap) -> None:
    tokens = f1(dtype=torch.float32)
    tokens = dataclasses.replace(tokens, proximal_logprobs=tokens.policy_logprobs.detach() - gap)
    ratio_T = RATIOS[name]()(tokens).exp()
    assert ratio_T.tolist() == pytest.approx([math.exp(math.copysign(20, gap))] * 8, rel=1e-5)
    ratio_T.sum().backward()
    assert tokens.policy_logprobs.grad.isfinite().all()
