"""`temper sweep`: one recipe trained with many settings, each in a process and a run directory of its own.

Owns: which settings, in which directories, and what runs when. A directory bears a hash of the recipe as it is resolved
for it, so a run is found again only if nothing it was made from has changed. Refuses: training (train.py), the table of
what came out (runs/report/sweep_table.py).
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from temper.config import load_recipe, to_toml
from temper.errors import UserError
from temper.runs.reader import DATABASE, RunReader

MOST_RUNS = 1000
NAME_CHARACTERS = 80
LOOK_SECONDS = 0.2
STOP_SECONDS = 120.0
"""For a run to write its checkpoint after it was told to stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    """One run of a sweep."""

    values: Mapping[str, str]
    """By key, what this run has and others have not."""
    overrides: tuple[str, ...]
    """All its changes of the recipe, those that every run has included."""
    folder: Path

    @property
    def log(self) -> Path:
        """What its process printed."""
        return self.folder.with_name(f"{self.folder.name}.log")


def sweep_points(
    recipe: Path, overrides: Sequence[str], folder: Path, *, num_random: int = 0, seed: int = 0
) -> list[SweepPoint]:
    """Every combination of values, or `num_random` of them; each is resolved and checked before any is trained."""
    choices = [split_values(text) for text in overrides]
    total = 1
    for _, values in choices:
        total *= len(values)
    if total < 2:
        raise UserError("a sweep needs a key with several values, e.g. --set optim.learning_rate=1e-4,3e-4")
    keys = [key for key, _ in choices]
    if repeated := {key for key in keys if keys.count(key) > 1}:
        raise UserError(f"--set {min(repeated)} is given twice. Put all its values behind one, separated by commas")
    if min(num_random or total, total) > MOST_RUNS:
        raise UserError(f"{total:,} runs are more than {MOST_RUNS:,}. Use fewer values, or --random {MOST_RUNS}")
    grid: Sequence[tuple[str, ...]] = []
    if num_random and num_random < total:
        grid = _drawn([values for _, values in choices], num_random, seed)
    else:
        grid = list(itertools.product(*(values for _, values in choices)))
    varied = [key for key, values in choices if len(values) > 1]
    return [_point(recipe, dict(zip(keys, row, strict=True)), varied, folder) for row in grid]


def split_values(text: str) -> tuple[str, list[str]]:
    """'a.b=1,2' as its key and values. Commas inside brackets, braces and quotes separate nothing."""
    key, sign, rest = text.partition("=")
    if not sign or not key.strip():
        raise UserError(f"--set {text!r} is not of the form key=value or key=value,value, e.g. --set steps=50,100")
    parts, depth, quote = [""], 0, ""
    for character in rest:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        else:
            depth += (character in "[{") - (character in "]}")
        if character == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += character
    values = [part.strip() for part in parts]
    if "" in values or len(set(values)) < len(values):
        raise UserError(f"--set {text!r} has an empty or a repeated value. Separate different values by one comma each")
    return key.strip(), values


def _drawn(choices: Sequence[Sequence[str]], count: int, seed: int) -> list[tuple[str, ...]]:
    """Different combinations, each as likely as any other; more of them begin with those of fewer."""
    generator, seen = random.Random(seed), dict[tuple[str, ...], None]()
    while len(seen) < count:
        seen[tuple(generator.choice(values) for values in choices)] = None
    return list(seen)


def _point(recipe: Path, values: Mapping[str, str], varied: Sequence[str], folder: Path) -> SweepPoint:
    overrides = tuple(f"{key}={value}" for key, value in values.items())
    resolved = to_toml(load_recipe(recipe, overrides))
    shown = ",".join(f"{key.rpartition('.')[2]}={values[key]}" for key in varied)
    name = re.sub(r"[^\w.=,+-]+", "_", shown)[:NAME_CHARACTERS].strip("_")
    mark = hashlib.sha256(resolved.encode()).hexdigest()[:8]
    return SweepPoint(
        values={key: values[key] for key in varied}, overrides=overrides, folder=folder / f"{name}-{mark}"
    )


def run_sweep(recipe: Path, points: Sequence[SweepPoint], *, parallel: int = 1, note: Callable[[str], None]) -> None:
    """Trains what is not finished, so many at a time. A run that fails does not stop the others."""
    if parallel < 1:
        raise UserError(f"--parallel {parallel} must be at least 1")
    waiting = [point for point in points if not is_done(point)]
    if len(waiting) < len(points):
        note(f"{len(points) - len(waiting)} of {len(points)} runs are finished already")
    running: dict[subprocess.Popen[bytes], SweepPoint] = {}
    with _ended_at_a_signal(running):
        while waiting or running:
            while waiting and len(running) < parallel:
                point = waiting.pop(0)
                note(f"{point.folder.name}: training")
                running[_start(recipe, point, parallel)] = point
            time.sleep(LOOK_SECONDS)
            for process in [process for process in running if process.poll() is not None]:
                point = running.pop(process)
                how = "finished" if process.returncode == 0 else f"exit code {process.returncode}, see {point.log}"
                note(f"{point.folder.name}: {how}")


def is_done(point: SweepPoint) -> bool:
    if not (point.folder / DATABASE).is_file():
        return False
    with RunReader(point.folder) as reader:
        return reader.is_finished


def _start(recipe: Path, point: SweepPoint, parallel: int) -> subprocess.Popen[bytes]:
    point.folder.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "temper", "train", str(recipe), "--run", str(point.folder)]
    command += [word for override in point.overrides for word in ("--set", override)]
    command += ["--resume"] * (point.folder / DATABASE).is_file()
    environment = dict(os.environ)
    if parallel > 1:  # side by side, or they would fight over the cores
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // parallel)))
    with point.log.open("ab") as log:
        return subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment
        )


@contextmanager
def _ended_at_a_signal(running: Mapping[subprocess.Popen[bytes], Any]) -> Iterator[None]:
    """However this ends, no run goes on alone: each writes its checkpoint and stops, within a deadline."""
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        for process in running:
            process.terminate()
        deadline = time.monotonic() + STOP_SECONDS
        for process in running:
            try:
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except (subprocess.TimeoutExpired, KeyboardInterrupt):  # a second signal: now
                process.kill()


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
