"""docs/walk.md counts the files between the command line and backward(); here they are counted while one runs."""

from __future__ import annotations

import asyncio
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from temper.cli.console import app
from temper.config import resolve, to_toml

ROOT = Path(__file__).parent.parent
MAX_HOPS = 6
PLUMBING = {"calls.py", "commands/training/stopping.py", "cli/console.py", "cli/__init__.py", "interpreter.py"}
"""What runs the event loop and waits for signals: nothing of a run is decided there."""


def frames_of(frame: FrameType | None) -> Iterator[FrameType]:
    """Outermost first."""
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return reversed(found)


def coroutines_of(task: asyncio.Task[Any]) -> Iterator[FrameType]:
    """What a task waits for, outermost first; its innermost await is this thread's work."""
    waiting: Any = task.get_coro()
    while waiting is not None and hasattr(waiting, "cr_frame"):
        if waiting.cr_frame is not None:
            yield waiting.cr_frame
        waiting = waiting.cr_await


def files_of(frames: Iterator[FrameType]) -> list[str]:
    package = ROOT / "temper"
    paths = [Path(frame.f_code.co_filename) for frame in frames]
    names = [str(path.relative_to(package)) for path in paths if path.is_relative_to(package)]
    return [name for name in dict.fromkeys(names) if name not in PLUMBING]


def test_from_the_command_to_backward_it_is_six_files_and_the_walk_names_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_recipe: dict[str, Any]
) -> None:
    tiny_recipe["stage"] = [{**tiny_recipe["stage"][1], "steps": 1}]
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(to_toml(resolve(tiny_recipe, [], where="walk")))
    walks: list[list[str]] = []
    plain, main = torch.Tensor.backward, threading.main_thread().ident

    def backward(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        assert main is not None
        outside = list(frames_of(sys._current_frames()[main]))
        loops = [frame.f_locals["self"] for frame in outside if frame.f_code.co_name == "run_forever"]
        chains = [list(coroutines_of(task)) for task in asyncio.all_tasks(loops[0])]
        (waiting,) = [chain for chain in chains if "loop.py" in files_of(iter(chain))]  # others draw
        walks.append(files_of(iter([*outside, *waiting, *frames_of(sys._getframe(1))])))
        plain(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "backward", backward)
    done = CliRunner().invoke(app, ["train", str(recipe), "--run", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    text = (ROOT / "docs" / "walk.md").read_text()
    named = re.findall(r"`([\w/]+\.py)`", text.partition("A test counts")[0])
    assert walks
    assert all(sorted(walk) == sorted(named) for walk in walks), walks[0]
    assert len(named) <= MAX_HOPS
