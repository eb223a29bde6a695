"""The table of metrics."""

from __future__ import annotations

from temper.runs.metrics import METRICS, describe


def test_every_name_is_defined_once_and_says_what_it_is() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    assert all(metric.reduction and metric.meaning for metric in METRICS)


def test_a_name_finds_its_own_definition_before_a_pattern() -> None:
    for name, expected in (("reward/mean", "reward/mean"), ("reward/exact", "reward/*"), ("loss/kl", "loss/*")):
        found = describe(name)
        assert found is not None
        assert found.name == expected
    assert describe("weather/today") is None
