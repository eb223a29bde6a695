"""The benchmark of over-optimisation has a reward that can be had without the task, and a verifier that sees it."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from temper.build import check_stages
from temper.config import resolve


def test_a_long_answer_is_paid_more_than_a_right_one_and_is_worth_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import overoptimization

    right, wrong, long = "dcba", "xyzw", "dcbaabcdabcdab"
    paid = [overoptimization.mentions("abcd", text, None) for text in (wrong, right, long)]
    worth = [overoptimization.agrees("abcd", text, None) for text in (wrong, long, right)]
    assert paid == sorted(set(paid))
    assert worth == sorted(set(worth))
    assert worth[-1] == 1.0
    stages = resolve(tomllib.loads(overoptimization.RECIPE), (), where="benchmark")
    check_stages(stages)
    assert [part.kind.rpartition(":")[2] for part in stages[1].reward] == ["mentions"]
    assert [part.kind.rpartition(":")[2] for part in stages[1].evaluation.reward] == ["agrees"]
