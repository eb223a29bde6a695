"""What a person sees while training."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

from temper.runs.display import Display
from temper.terminal import SafeConsole
from temper.types import Batch, EvaluationResult, StepReport

StepMaker = Callable[..., tuple[StepReport, Batch]]
EvaluationMaker = Callable[..., EvaluationResult]


def play(console: SafeConsole, make_step: StepMaker, make_evaluation: EvaluationMaker, steps: int = 100) -> None:
    display = Display(console)
    display.start(Path("runs/demo"))
    display.stage("2 of 2: rl", steps=steps)
    display.evaluation(make_evaluation(0, 0.5))
    for step in range(1, steps + 1):
        display.append(*make_step(step))
    display.evaluation(make_evaluation(steps, 0.9))
    display.note("done [not markup]")
    display.close()


def test_a_log_file_gets_one_line_now_and_then(make_step: StepMaker, make_evaluation: EvaluationMaker) -> None:
    output = io.StringIO()
    play(SafeConsole(file=output, width=80), make_step, make_evaluation)
    lines = output.getvalue().splitlines()
    assert "\x1b" not in output.getvalue()
    assert len([line for line in lines if "s/step" in line]) == 21, "first, and every fifth of a hundred"
    assert lines[2] == "step 0/100  held-out greedy 50.0% [45.0, 55.0]  commonest answer 2.0%"
    assert lines[3] == (
        "step 1/100  loss 0.5000  reward 0.100  entropy 0.333  draw tok/s 101  4.00 s/step  ETA 6 min 36 s"
    )
    assert lines[-1] == "done [not markup]"


def test_a_terminal_gets_a_panel_with_scores_curve_and_time_split(
    make_step: StepMaker, make_evaluation: EvaluationMaker
) -> None:
    output = io.StringIO()
    play(
        SafeConsole(file=output, width=110, force_terminal=True, color_system=None),
        make_step,
        make_evaluation,
        steps=12,
    )
    panel = output.getvalue()
    for part in (
        "temper · runs/demo · 2 of 2: rl",
        "12/12",
        "50.0% [45.0, 55.0] → 90.0% [85.0, 95.0]",
        "█",
        "rollout 75%",
    ):
        assert part in panel, part


def test_a_broken_display_never_reaches_the_training(make_step: StepMaker, make_evaluation: EvaluationMaker) -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError("the terminal is gone")

    play(SafeConsole(file=Broken(), width=80), make_step, make_evaluation)
    play(SafeConsole(file=Broken(), width=80, force_terminal=True), make_step, make_evaluation)


def test_a_display_that_fails_says_so_once_and_stays_dark(make_step: StepMaker) -> None:
    output = io.StringIO()
    display = Display(SafeConsole(file=output, width=120))
    display.append(None, None)  # type: ignore[arg-type]
    display.append(*make_step(1))
    assert output.getvalue().count("the display stopped") == 1
    assert "step 1" not in output.getvalue()
