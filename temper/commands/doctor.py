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

from temper.errors import UserError, command_line, install_line
from temper.sandbox import require_sandbox

CORE = ("torch", "transformers", "pydantic", "typer", "rich", "numpy", "safetensors")


@dataclass(frozen=True, slots=True)
class OptionalPart:
    """An optional part: the module that proves it, what it is for, the extra that installs it."""

    module: str
    purpose: str
    extra: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    what: str
    detail: str
    remedy: str = ""
    """The command that mends it; empty: there is no one command."""
    is_fine: bool = True


OPTIONAL = (
    OptionalPart("math_verify", 'rewards of kind "math"', "math"),
    OptionalPart("reasoning_gym", "generated tasks of reasoning-gym", "gym"),
    OptionalPart("gguf", "temper model fetch", "gguf"),
    OptionalPart("pyarrow", "Parquet files", "parquet"),
    OptionalPart("peft", "model.lora", "lora"),
    OptionalPart("fastapi", "temper watch", "watch"),
    OptionalPart("plotly", "the charts of temper watch", "watch"),
    OptionalPart("uvicorn", "temper serve and temper watch", "serve"),
    OptionalPart("httpx", "engine.kind sglang", "sglang"),
    OptionalPart("matplotlib", "pictures as PNG", "plots"),
    OptionalPart("textarena", "games of TextArena", "textarena"),
    OptionalPart("gymnasium", "environments of Gymnasium", "gymnasium"),
    OptionalPart("mcp", "tools of MCP servers", "mcp"),
    OptionalPart("openenv", "environments of OpenEnv", "openenv"),
    OptionalPart("verifiers", "environments of verifiers", "verifiers"),
)


def examine() -> list[Finding]:
    """In the order a user should read it."""
    return [*_machine(), *_core(), *_optional(), _sandbox()]


def _machine() -> Iterable[Finding]:
    yield Finding("python", platform.python_version())
    yield Finding("processor", f"{os.cpu_count()} cores, torch uses {torch.get_num_threads()}")
    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        name = torch.cuda.get_device_name(0)
        yield Finding("gpu", f"{name}, {total / 2**30:.0f} GiB; CUDA graphs for decoding")
    else:
        yield Finding("gpu", "none: training and sampling run on the CPU")
    free = shutil.disk_usage(".").free
    yield Finding("disk", f"{free / 2**30:.1f} GiB free here", is_fine=free > 2**30)


def _core() -> Iterable[Finding]:
    for name in CORE:
        try:
            yield Finding(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, "missing", remedy=f"{command_line('python')} -m pip install {name}", is_fine=False)


def _sandbox() -> Finding:
    """Built and used once, not only looked for: many machines have bubblewrap and forbid it."""
    try:
        require_sandbox()
    except UserError as problem:
        return Finding("sandbox", str(problem), is_fine=False)
    return Finding("sandbox", "bubblewrap: model-written code runs behind an OS boundary")


def _optional() -> Iterable[Finding]:
    for part in OPTIONAL:
        if importlib.util.find_spec(part.module) is not None:
            yield Finding(part.module, part.purpose)
        else:
            missing = f"missing, needed for {part.purpose}"
            yield Finding(part.module, missing, remedy=install_line(part.extra), is_fine=False)
