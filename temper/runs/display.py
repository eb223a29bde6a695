"""What you see while a run trains: a live panel in a terminal, plain lines in a log.

Owns: the look. Refuses: breaking training; whatever goes wrong here ends the display, not the run.
"""

from __future__ import annotations

import functools
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Concatenate, ParamSpec

from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from temper.runs.report.report import duration, score
from temper.runs.report.sparkline import sparkline
from temper.terminal import SafeConsole
from temper.types import Batch, EvaluationResult, StepReport

HISTORY = 512
"""Steps the sparklines look back on."""
LOG_LINES = 20
"""Lines per stage when the output is not a terminal."""
LOG_SECONDS = 10.0
"""Between two lines about one thing that takes long, when the output is not a terminal."""
SPEEDS = ("draw tok/s", "train tok/s")
COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "red")

Arguments = ParamSpec("Arguments")
Method = Callable[Concatenate["Display", Arguments], None]


def harmless(method: Method[Arguments]) -> Method[Arguments]:
    """A display that fails goes dark and says so once."""

    @functools.wraps(method)
    def guarded(self: Display, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        if self.is_dark:
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            self.go_dark(error)

    return guarded


class Waiting:
    """What is being done, and for how many seconds. The panel draws itself anew several times a second, so it counts
    also while nothing is reported: a model may take minutes to load."""

    def __init__(self, text: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.text, self._clock, self._since = text, clock, clock()
        self.how_far = ""
        self._told = -math.inf

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.text, self.how_far)))

    def __rich__(self) -> Text:
        return Text(f"{self} · {self._clock() - self._since:.0f} s")

    def is_worth_a_line(self) -> bool:
        """In a log: at once, and then now and then. Counts what was told."""
        if self._clock() - self._told < LOG_SECONDS:
            return False
        self._told = self._clock()
        return True


class Display:
    """Shows one run. append() and evaluation() are called by the loop after every step and evaluation."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or SafeConsole()
        self._live: Live | None = None
        self._folder = ""
        self._stage, self._steps, self._step = "", 0, 0
        self._report: StepReport | None = None
        self._doing = Waiting("starting")
        self._rewards: deque[float] = deque(maxlen=HISTORY)
        self._losses: deque[float] = deque(maxlen=HISTORY)
        self._step_seconds: deque[float] = deque(maxlen=50)
        self._scores: dict[str, tuple[EvaluationResult, EvaluationResult]] = {}
        self.is_dark = False

    @harmless
    def start(self, folder: Path) -> None:
        self._folder = str(folder)
        self._doing = Waiting("looking at the run and its model")
        if self._console.is_terminal:
            self._live = Live(self._panel(), console=self._console, refresh_per_second=4)
            self._live.start()
        else:
            self._console.print(f"run {folder}", highlight=False)

    @harmless
    def stage(self, name: str, *, steps: int, done: int = 0) -> None:
        """A stage begins, or goes on after `done` steps. The panel of the one before stays on the screen."""
        if self._live and self._stage:
            self._console.print(self._panel())
        self._stage, self._steps, self._step, self._report = name, steps, done, None
        for history in (self._rewards, self._losses, self._step_seconds):
            history.clear()
        self._scores.clear()
        self._doing = Waiting(f"loading data and model, measuring the held-out score before step {done + 1}")
        resumed = f", resumed after step {done}" if done else ""
        self._show(f"stage {name}, {steps} steps{resumed}")

    @harmless
    def doing(self, what: str, how_far: str) -> None:
        """What happens before the first step of a stage, for which the panel counts the seconds."""
        if what != self._doing.text:
            self._doing = Waiting(what)
        self._doing.how_far = how_far
        self._show(str(self._doing) if self._doing.is_worth_a_line() else None)

    @harmless
    def append(self, report: StepReport, batch: Batch) -> None:
        self._report, self._step = report, report.step
        self._step_seconds.append(sum(report.seconds.values()))
        self._losses.append(report.loss)
        if "reward/mean" in report.metrics:
            self._rewards.append(report.metrics["reward/mean"])
        every = max(1, self._steps // LOG_LINES)
        is_due = report.step % every == 0 or report.step in (1, self._steps)
        self._show(self._line(report) if is_due else None)

    @harmless
    def evaluation(self, result: EvaluationResult) -> None:
        first, _ = self._scores.get(result.name, (result, result))
        self._scores[result.name] = (first, result)
        if self._report is None:
            self._doing = Waiting(f"step {result.step + 1} is under way")
        constant = f"commonest answer {100 * result.constant_score:.1f}%"
        self._show(f"step {result.step}/{self._steps}  held-out {result.name} {score(result)}  {constant}")

    @harmless
    def note(self, text: str) -> None:
        """A line that stays, above the panel."""
        self._console.print(text, highlight=False)

    @harmless
    def show(self, what: object) -> None:
        """A table that stays, above the panel."""
        self._console.print(what)

    @harmless
    def close(self) -> None:
        if self._live:
            self._live.update(self._panel())
            self._live.stop()
            self._live = None

    def go_dark(self, error: Exception) -> None:
        self.is_dark = True
        try:
            if self._live:
                self._live.stop()
            self._console.print(f"(the display stopped: {error!r}; training goes on)")
        except Exception:  # a closed terminal: there is nobody to tell
            self._live = None

    def _show(self, line: str | None) -> None:
        if self._live:
            self._live.update(self._panel())
        elif line:
            self._console.print(line, highlight=False, soft_wrap=True)

    def _line(self, report: StepReport) -> str:
        shown = [f"step {report.step}/{self._steps}", f"loss {report.loss:z.4f}"]
        shown += [f"{label} {text}" for label, text in figures(report).items()]
        return "  ".join([*shown, f"{self._step_seconds[-1]:.2f} s/step", f"ETA {self._eta()}"])

    def _eta(self) -> str:
        if not self._step_seconds:
            return "unknown"
        return duration(median(self._step_seconds) * (self._steps - self._step))

    def _bar(self) -> Table:
        bar = Table.grid(padding=(0, 2))
        bar.add_row(
            Text(f"{self._step}/{self._steps}"),
            ProgressBar(total=max(1, self._steps), completed=self._step, width=36),
            Text(f"{self._step_seconds[-1]:.2f} s/step" if self._step_seconds else ""),
            Text(f"ETA {self._eta()}" if self._step_seconds and self._step < self._steps else ""),
        )
        return bar

    def _panel(self) -> RenderableType:
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="dim", justify="right", no_wrap=True, min_width=8)
        rows.add_column(no_wrap=True, overflow="ellipsis")
        if self._steps:
            rows.add_row("step", self._bar())
        if self._report is None:
            rows.add_row("now", self._doing)
        if self._rewards:
            rows.add_row("reward", curve(self._rewards, "green"))
        elif self._losses:
            rows.add_row("loss", curve(self._losses, "yellow"))
        for first, last in self._scores.values():
            rows.add_row("held-out", scores_text(first, last))
        if self._report:
            shown = figures(self._report)
            speeds = [f"{name.split()[0]} {shown.pop(name)}" for name in SPEEDS if name in shown]
            rows.add_row(
                "policy", Text("   ".join(f"{name} {text}" for name, text in shown.items() if name != "reward"))
            )
            rows.add_row("tokens/s", Text("   ".join(speeds)))
            rows.add_row("time", time_split(self._report.seconds))
        title = f" temper · {self._folder} · {self._stage} " if self._stage else f" temper · {self._folder} "
        return Panel(
            rows, title=Text(title), title_align="left", border_style="cyan", width=min(100, self._console.width)
        )


def figures(report: StepReport) -> dict[str, str]:
    """The few numbers worth a glance, in reading order; what a stage does not have is left out."""
    kinds: tuple[tuple[str, str, str], ...] = (
        ("reward", "reward/mean", ".3f"),
        ("entropy", "policy/entropy", ".3f"),
        ("KL ref", "policy/kl_ref_k3", ".4f"),
        ("KL old", "policy/kl_old_k3", ".4f"),
        ("grad", "policy/grad_norm", ".2f"),
        ("length", "gen/len_mean", ".1f"),
        ("draw tok/s", "sys/rollout_tok_s", ",.0f"),
        ("train tok/s", "sys/train_tok_s", ",.0f"),
    )
    metrics = {**report.metrics, **report.system}
    shown = {label: format(metrics[name], style) for label, name, style in kinds if name in metrics}
    if "KL ref" in shown:
        shown.pop("KL old", None)
    return shown


def curve(values: deque[float], colour: str) -> Text:
    line = Text(f"{values[-1]:.3f}  ")
    line.append(sparkline(list(values), 48), style=colour)
    return line


def scores_text(first: EvaluationResult, last: EvaluationResult) -> Text:
    line = Text(f"{last.name:<8}")
    if last is not first:
        line.append(f"{score(first)} → ", style="dim")
    line.append(score(last), style="bold")
    line.append(f"  commonest {100 * last.constant_score:.1f}%", style="dim")
    return line


def time_split(seconds: Mapping[str, float]) -> Text:
    """A bar whose parts are the phases of the step, longest first, with a legend."""
    total = sum(seconds.values())
    phases = sorted(seconds.items(), key=lambda item: -item[1])[: len(COLOURS)]
    if not total or not math.isfinite(total):
        return Text("")
    bar, legend = Text(""), Text("")
    for (name, spent), colour in zip(phases, COLOURS, strict=False):
        bar.append("█" * round(24 * spent / total), style=colour)
        if spent >= total / 100:
            legend.append(f"  {name} {spent / total:.0%}", style=colour)
    return bar + legend
