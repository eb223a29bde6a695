"""What a verb is doing while it takes long: a bar that moves in a terminal, a line now and then in a log.

Owns: how that looks, and when a line is due. Refuses: training, which has a display of its own (runs/display.py).
Imports nothing heavy: it is shown while that is imported.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from temper.terminal import SafeConsole

if TYPE_CHECKING:
    from temper.protocols import Sampler

FIRST_SECONDS = 3.0
"""Before the first line of a log: what is quicker needs none."""
LONGEST_SECONDS = 60.0
"""Between two lines."""
LOOK_SECONDS = 0.25


class WorkDisplay(Protocol):
    """What is shown. Its methods may be called from any thread."""

    def advance(self, count: int) -> None:
        """So many more answers are finished."""
        ...

    def rename(self, what: str) -> None:
        """Something else is being done now."""
        ...


class _Work:
    def __init__(self, what: str, total: int, sampler: Sampler | None) -> None:
        self._what, self._total, self._sampler = what, total, sampler
        self._done, self._tokens = 0, 0
        self._started = time.monotonic()

    def advance(self, count: int) -> None:
        self._done += count

    def rename(self, what: str) -> None:
        self._what = what

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    @property
    def share(self) -> float | None:
        """Of the answers that are finished; None: nobody knows how many there will be."""
        return self._done / self._total if self._total else None

    def describe(self) -> str:
        """ "gsm8k: 12 of 200 answers, 3,400 tokens": answers that are being drawn show in the tokens."""
        if self._sampler is not None:
            self._tokens += int(self._sampler.stats().get("decode_tokens", 0))
        parts = [f"{self._done:,} of {self._total:,} answers"] if self._total else []
        parts += [f"{self._tokens:,} tokens drawn"] if self._sampler is not None else []
        return f"{self._what}: {', '.join(parts)}" if parts else self._what


@contextmanager
def show_work(
    what: str, *, total: int = 0, sampler: Sampler | None = None, is_live: bool = True, console: Console | None = None
) -> Iterator[WorkDisplay]:
    """Shows on standard error what is done inside, once that takes long.

    total: answers that will be finished; 0: not known. sampler: who draws them; its counts are read, and so must not be
    wanted by anybody else. is_live: off, nothing is shown.
    """
    work = _Work(what, total, sampler)
    if not is_live:
        yield work
        return
    console = console or SafeConsole(stderr=True, soft_wrap=True)
    is_over = threading.Event()
    show = _show_bar if console.is_terminal else _write_lines
    thread = threading.Thread(target=show, args=(work, console, is_over), name="progress", daemon=True)
    thread.start()
    try:
        yield work
    finally:
        is_over.set()
        thread.join(timeout=5.0)


def _show_bar(work: _Work, console: Console, is_over: threading.Event) -> None:
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    if is_over.wait(timeout=LOOK_SECONDS):
        return  # too quick to be seen
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(work.describe(), total=None if work.share is None else 1.0)
        while not is_over.wait(timeout=LOOK_SECONDS):
            bar.update(task, description=work.describe(), completed=work.share or 0.0)


def _write_lines(work: _Work, console: Console, is_over: threading.Event) -> None:
    """At 3, 6, 12, 24, 48 seconds, then every minute: early enough to be seen, rare enough for a log of hours."""
    due = FIRST_SECONDS
    while not is_over.wait(timeout=max(0.0, due - work.seconds)):
        minutes, seconds = divmod(int(work.seconds), 60)
        console.print(f"{work.describe()} ({minutes}:{seconds:02})", highlight=False)
        due += min(due, LONGEST_SECONDS)
