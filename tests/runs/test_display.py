"""What a person sees while training."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

from temper.runs.display import Display, Waiting
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


def panel_of(display: Display) -> str:
    output = io.StringIO()
    SafeConsole(file=output, width=110, color_system=None).print(display._panel())
    return output.getvalue()


def test_the_panel_counts_on_while_one_thing_is_being_done() -> None:
    display = Display(SafeConsole(file=io.StringIO(), width=110, force_terminal=True, color_system=None))
    display.doing("compiling kernels", "recording 1 of 22 sizes")
    begun = display._doing
    display.doing("compiling kernels", "recording 14 of 22 sizes")
    assert display._doing is begun, "its seconds go on"
    assert "compiling kernels, recording 14 of 22 sizes · 0 s" in panel_of(display)
    display.doing("comparing sampler and trainer", "")
    assert "comparing sampler and trainer · 0 s" in panel_of(display)


def test_a_log_hears_at_once_and_then_now_and_then_what_is_being_done() -> None:
    output, now = io.StringIO(), [0.0]
    display = Display(SafeConsole(file=output, width=80))
    display._doing = Waiting("compiling kernels", clock=lambda: now[0])
    for seconds in range(25):
        now[0] = float(seconds)
        display.doing("compiling kernels", f"recording {seconds} of 25 sizes")
    assert output.getvalue().splitlines() == [
        f"compiling kernels, recording {done} of 25 sizes" for done in (0, 10, 20)
    ]


def test_the_panel_says_what_happens_before_the_first_step(
    make_step: StepMaker, make_evaluation: EvaluationMaker
) -> None:
    display = Display(SafeConsole(file=io.StringIO(), width=110, force_terminal=True, color_system=None))
    display.start(Path("runs/demo"))
    try:
        assert "looking at the run and its model · 0 s" in panel_of(display)
        assert "0/0" not in panel_of(display), "no bar of nothing"
        display.stage("1 of 2: sft", steps=60)
        assert "loading data and model, measuring the held-out score before step 1 · 0 s" in panel_of(display)
        display.evaluation(make_evaluation(0, 0.5))
        assert "step 1 is under way · 0 s" in panel_of(display)
        display.append(*make_step(1))
        assert "under way" not in panel_of(display)
        display.stage("2 of 2: rl", steps=60, done=7)
        assert "before step 8" in panel_of(display)
    finally:
        display.close()


def test_waiting_is_counted_when_it_is_drawn_and_not_when_it_began() -> None:
    now = [100.0]
    waiting = Waiting("loading", clock=lambda: now[0])
    assert waiting.__rich__().plain == "loading · 0 s"
    now[0] = 107.4
    assert waiting.__rich__().plain == "loading · 7 s"


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
