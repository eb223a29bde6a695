"""The benchmark of the update: every setting is measured, and offloading changes no bit."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import ModuleType

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"
CPU = torch.device("cpu")


@pytest.fixture
def optimizer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    import optimizer

    return optimizer


def test_every_setting_is_measured_and_offloading_changes_no_bit(optimizer: ModuleType) -> None:
    checksums = {}
    for states, planned in (("float32", 16), ("bfloat16", 12), ("8bit", 10.03125)):
        here, away = (optimizer.measure("tiny", states, offload, 2, CPU) for offload in (False, True))
        assert here["parameters"] == 1_311_872
        assert here["seconds"] > 0
        assert here["planned_device"] == away["planned_device"] + away["planned_host"] == planned
        assert here["checksum"] == away["checksum"]
        assert here["update_norm_ratio"] == pytest.approx(1e-4 / 0.02 / 2**0.5, rel=0.05)
        checksums[states] = here["checksum"]
        assert len(optimizer.row_of(here)) == 5
    assert len(set(checksums.values())) == 3, "each way to hold moments rounds in its own way"


def test_a_setting_that_fails_is_a_row_with_its_error(optimizer: ModuleType) -> None:
    options = argparse.Namespace(shape="huge", steps=2, device="cpu")
    found = optimizer.measure_apart(options, "8bit", False)
    assert "invalid choice: 'huge'" in found["error"]
    assert optimizer.row_of(found)[-1] == found["error"]
