"""The benchmark of the update: every setting is measured, and offloading changes no bit."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from temper.trainer.optim import OptimizerSettings

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
        settings = OptimizerSettings(learning_rate=optimizer.RATE, states=states)  # type: ignore[arg-type]
        here, away = (
            optimizer.measure("tiny", replace(settings, offload=offload), 2, CPU) for offload in (False, True)
        )
        assert here["parameters"] == 1_311_872
        assert here["seconds"] > 0
        assert here["planned_device"] == away["planned_device"] + away["planned_host"] == planned
        assert here["checksum"] == away["checksum"]
        assert here["update_norm_ratio"] == pytest.approx(1e-4 / 0.02 / 2**0.5, rel=0.05)
        checksums[states] = here["checksum"]
        assert len(optimizer.row_of(here)) == 6
        assert "spelled_seconds" not in here, "a CPU has no kernel to compare with"
    assert len(set(checksums.values())) == 3, "each way to hold moments rounds in its own way"


def test_where_there_is_a_kernel_torch_is_measured_beside_it(
    optimizer: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[bool] = []

    def once(shape: str, settings: OptimizerSettings, steps: int, device: torch.device) -> dict[str, int]:
        runs.append(settings.kernels)
        return {"seconds": len(runs), "checksum": 7}

    monkeypatch.setattr(optimizer, "measure_once", once)
    monkeypatch.setattr(optimizer, "has_kernels", lambda device_type: True)
    settings = OptimizerSettings(learning_rate=optimizer.RATE, states="8bit")
    found = optimizer.measure("tiny", settings, 2, CPU)
    assert found == {"seconds": 1, "checksum": 7, "spelled_seconds": 2, "spelled_checksum": 7}
    assert "spelled_seconds" not in optimizer.measure("tiny", replace(settings, states="float32"), 2, CPU)
    assert runs == [True, False, True], "wide moments have no kernel"


@pytest.mark.heavy
def test_a_setting_that_fails_is_a_row_with_its_error(optimizer: ModuleType) -> None:
    options = argparse.Namespace(shape="huge", steps=2, device="cpu")
    found = optimizer.measure_apart(options, "8bit", False)
    assert "invalid choice: 'huge'" in found["error"]
    assert optimizer.row_of(found)[-1] == found["error"]
