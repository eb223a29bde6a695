"""Shared by all tests: where the optional data files are, a recipe small enough to train in seconds, and Triton's
interpreter made to compute what a GPU would."""

from __future__ import annotations

import os
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from temper.interpreter import seldom_collected
from tests.fakes.selection import marks_of, read_selection

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton, which transformers does

if find_spec("hypothesis"):  # absent where only engines or adapters are tested
    from hypothesis import settings

    # Other tests share the cores, so the time of a single case says nothing about it.
    settings.register_profile("temper", deadline=None)
    settings.load_profile("temper")

ROOT = Path(__file__).parent.parent


WAITERS = {
    "asyncio",
    "multiprocessing",
    "signal",
    "subprocess",
    "threading",
    "time",
    "wait_until",
    "eventually",
    "wait",
}
"""A test that asks for one of these, or whose module imports one, waits for other threads or processes."""

_STACK = ExitStack()


@pytest.hookimpl(tryfirst=True)  # before -m looks at marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks of tests/selection.toml. What waits for others gets a second try, since a busy machine may let them wait
    too long; the summary counts those. What computes gets none: there a failure now and then is a race in the
    product."""
    selection = read_selection()
    for item in items:
        for mark in marks_of(item.nodeid.removeprefix("tests/"), selection):
            item.add_marker(mark)
    if find_spec("pytest_rerunfailures"):  # absent where only engines or adapters are tested
        for item in items:
            assert isinstance(item, pytest.Function)
            is_browser = item.get_closest_marker("browser") is not None
            if is_browser or WAITERS & {*vars(item.module), *item.fixturenames}:
                item.add_marker(pytest.mark.flaky(reruns=1))


def pytest_collection_finish() -> None:
    """Every training would go through all that was imported for the tests, looking for cycles; so once for all."""
    _STACK.enter_context(seldom_collected())


def pytest_sessionfinish() -> None:
    _STACK.close()


@pytest.fixture
def tiny_recipe() -> dict[str, Any]:
    """Supervised and RL on a model of 30 thousand parameters: everything a run does, a second or two of work."""
    return {
        "name": "tiny",
        "model": {"new": {"layers": 2, "width": 32, "heads": 2, "kv_heads": 1, "mlp_width": 64, "context": 32,
                          "alphabet": "abcdefghijklmnopqrstuvwxyz"}},
        "train": [{"generator": "spell_backward", "seed": 1, "options": {"min_letters": 1, "max_letters": 2}}],
        "heldout": {"generator": "spell_backward", "seed": 2, "size": 8,
                    "options": {"min_letters": 2, "max_letters": 2}},
        "reward": [{"kind": "edit"}],
        "sampling": {"max_new_tokens": 4},
        "checkpoint": {"every": 2},
        "alarms": {"readiness": "off"},
        "stage": [
            {"kind": "sft", "steps": 6, "optim": {"learning_rate": 3e-3}, "trainer": {"examples_per_step": 8}},
            {"kind": "rl", "steps": 8, "optim": {"learning_rate": 1e-3},
             "rollout": {"groups_per_step": 4, "group_size": 4}, "evaluation": {"every": 3}},
        ],
    }  # fmt: skip


@pytest.fixture(scope="session")
def triton_interpreter() -> None:
    """Makes kernels run on a CPU as they would on a GPU, where there is none."""
    if not torch.cuda.is_available():
        _round_as_hardware_does()
        _mend_interpreter()


def _round_as_hardware_does() -> None:
    """Triton 3.6's interpreter cuts float32 off to bfloat16, and carries wrongly when told to round: round to even. To
    float8 it rounds ties up, and loses the carry (127 becomes 64)."""
    from triton import language as tl
    from triton.runtime import interpreter

    original = interpreter._convert_float

    def convert(data: np.ndarray, source: tl.dtype, target: tl.dtype, mode: object) -> np.ndarray:
        if source != tl.float32 or target not in (tl.bfloat16, tl.float8e4nv):
            return original(data, source, target, mode)
        wide = torch.from_numpy(np.array(data, dtype=np.float32))
        if target == tl.float8e4nv:
            return wide.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        return wide.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)

    interpreter._convert_float = convert


def _mend_interpreter() -> None:
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
