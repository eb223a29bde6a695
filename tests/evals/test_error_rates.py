from __future__ import annotations

import pytest

from temper.evals.error_rates import Rate, error_rates
from temper.evals.passk import wilson


def test_false_positives_are_a_share_of_the_wrong_and_false_negatives_of_the_right() -> None:
    positive, negative = error_rates([(False, True), (False, False), (True, True), (True, False), (True, False)])
    assert positive == Rate(1, 2)
    assert negative == Rate(2, 3)


def test_intervals_are_wilsons_and_of_nothing_everything() -> None:
    assert Rate(1, 20).interval == pytest.approx(wilson(1, 20))
    assert Rate(0, 0).interval == (0.0, 1.0)
    assert "none (0 of 0" in str(Rate(0, 0))
