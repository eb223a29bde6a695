"""Kernels run on the GPU where there is one, else in Triton's interpreter: to be chosen before Triton is imported."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
WAS_IMPORTED = "triton.language" in sys.modules
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = os.environ.get("TRITON_INTERPRET", "1")


def reason_to_skip() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install triton"
    if HAS_GPU:
        return None
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction

    if WAS_IMPORTED and not isinstance(tl.sum, InterpretedFunction):
        return "triton was imported before TRITON_INTERPRET=1 was set: run pytest tests/models/kernels by itself"
    return None


class SkippedModule(pytest.Module):
    def collect(self) -> list[pytest.Item]:
        pytest.skip(REASON, allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Skips whole files before their imports of kernels fail."""
    return SkippedModule.from_parent(parent, path=module_path) if REASON else None


REASON = reason_to_skip()


@pytest.fixture(autouse=True)
def on_a_cpu_too(triton_interpreter: None) -> None:
    """Every test here runs kernels."""


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if HAS_GPU else "cpu")
