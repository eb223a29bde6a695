"""`temper doctor`: what is installed, what would run, and the exact line that installs what is missing.

Owns: the list of parts and what each is for.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from temper.errors import UserError
from temper.sandbox import require_sandbox

CORE = ("torch", "transformers", "pydantic", "typer", "rich", "numpy", "safetensors")


@dataclass(frozen=True, slots=True)
class Part:
    """An optional part: the module that proves it, what it is for, how it is installed."""

    module: str
    purpose: str
    install: str


OPTIONAL = (
    Part("math_verify", 'rewards of kind "math"', 'pip install "temper-rl[math]"'),
    Part("reasoning_gym", "generated tasks of reasoning-gym", 'pip install "temper-rl[gym]"'),
    Part("gguf", "temper model fetch", 'pip install "temper-rl[gguf]"'),
    Part("pyarrow", "Parquet files", 'pip install "temper-rl[parquet]"'),
    Part("textarena", "games of TextArena", 'pip install "temper-rl[textarena]"'),
    Part("gymnasium", "environments of Gymnasium", 'pip install "temper-rl[gymnasium]"'),
    Part("mcp", "tools of MCP servers", 'pip install "temper-rl[mcp]"'),
    Part("openenv", "environments of OpenEnv", 'pip install "temper-rl[openenv]"'),
    Part("verifiers", "environments of verifiers", 'pip install "temper-rl[verifiers]"'),
)


def examine() -> list[tuple[str, bool, str]]:
    """(what, is it fine, detail or remedy), in the order a user should read it."""
    return [*_machine(), *_core(), *_optional(), _sandbox()]


def _machine() -> Iterable[tuple[str, bool, str]]:
    yield "python", True, platform.python_version()
    yield "processor", True, f"{os.cpu_count()} cores, torch uses {torch.get_num_threads()}"
    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        yield "gpu", True, f"{torch.cuda.get_device_name(0)}, {total / 2**30:.0f} GiB; CUDA graphs for decoding"
    else:
        yield "gpu", True, "none: training and sampling run on the CPU"
    free = shutil.disk_usage(".").free
    yield "disk", free > 2**30, f"{free / 2**30:.1f} GiB free here"


def _core() -> Iterable[tuple[str, bool, str]]:
    for name in CORE:
        try:
            yield name, True, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield name, False, f"missing: pip install {name}"


def _sandbox() -> tuple[str, bool, str]:
    """Built and used once, not only looked for: many machines have bubblewrap and forbid it."""
    try:
        require_sandbox()
    except UserError as problem:
        return "sandbox", False, str(problem)
    return "sandbox", True, "bubblewrap: model-written code runs behind an OS boundary"


def _optional() -> Iterable[tuple[str, bool, str]]:
    for part in OPTIONAL:
        is_there = importlib.util.find_spec(part.module) is not None
        yield part.module, is_there, part.purpose if is_there else f"missing, needed for {part.purpose}: {part.install}"
