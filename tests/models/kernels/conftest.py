"""Kernels run on the GPU where there is one, else in Triton's interpreter: to be chosen before Triton is imported."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
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


def round_as_hardware_does() -> None:
    """Triton 3.6's interpreter cuts float32 off to bfloat16, and carries wrongly when told to round: round to even."""
    from triton import language as tl
    from triton.runtime import interpreter

    original = interpreter._convert_float

    def convert(data: np.ndarray, source: tl.dtype, target: tl.dtype, mode: object) -> np.ndarray:
        if (source, target) != (tl.float32, tl.bfloat16):
            return original(data, source, target, mode)
        rounded = torch.from_numpy(np.array(data, dtype=np.float32)).to(torch.bfloat16)
        return rounded.view(torch.int16).numpy().view(np.uint16)

    interpreter._convert_float = convert


def mend_interpreter() -> None:
    """Triton 3.6's interpreter multiplies bfloat16 as if its bits were integers, takes int() of arrays of one element,
    which numpy refuses from 2.4 on, and patches the language anew for each call of a device function, which is slow."""
    from triton import language as tl
    from triton.runtime import interpreter

    patch_tensor, dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot
    patched: set[int] = set()

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def widen(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        wide = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(wide, tl.float32)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if id(self.fn.__globals__) not in patched:
            patched.add(id(self.fn.__globals__))
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

    interpreter._patch_lang_tensor = patch
    interpreter.InterpretedFunction.__call__ = call
    interpreter.InterpreterBuilder.create_dot = lambda self, a, b, *rest: dot(self, widen(a), widen(b), *rest)


REASON = reason_to_skip()
if REASON is None and not HAS_GPU:
    round_as_hardware_does()
    mend_interpreter()


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if HAS_GPU else "cpu")
