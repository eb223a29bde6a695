"""What takes long says so: lines in a log, a bar that moves with the tokens in a terminal."""

from __future__ import annotations

import io
import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from rich.console import Console

from temper.commands import progress
from temper.commands.judging.evaluate import SuiteRequest, evaluate_suite
from temper.commands.judging.scale import Ways, scale
from temper.commands.progress import show_work
from temper.models.tiny import make_tiny_model
from tests.fakes.sampler import FakeSampler


class Counting(FakeSampler):
    """Draws ten tokens between two looks."""

    def __init__(self) -> None:
        super().__init__(lambda request: [1])

    def stats(self) -> Mapping[str, float]:
        return {"decode_tokens": 10.0}


def wait_for(is_there: Callable[[], bool]) -> None:
    end = time.monotonic() + 20.0
    while not is_there() and time.monotonic() < end:
        time.sleep(0.01)
    assert is_there()


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Console:
    monkeypatch.setattr(progress, "FIRST_SECONDS", 0.02)
    return Console(file=io.StringIO(), width=200)


def written(console: Console) -> str:
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_a_log_gets_lines_with_answers_and_tokens(log: Console) -> None:
    with show_work("gsm8k", total=200, sampler=Counting(), console=log) as work:
        work.advance(12)
        wait_for(lambda: len(re.findall(r"12 of 200 answers, \d+ tokens drawn \(0:", written(log))) >= 2)
        work.rename("math")
        wait_for(lambda: "math: 12 of 200 answers" in written(log))
    lines = written(log).splitlines()
    assert lines[0].startswith("gsm8k: ")
    assert "10 tokens drawn" in lines[0]
    assert "20 tokens drawn" in lines[1], "it moves though no answer was finished in between"


def test_what_is_quick_says_nothing() -> None:
    console = Console(file=io.StringIO())
    with show_work("quick", console=console):
        pass
    assert written(console) == ""


def test_nothing_is_shown_where_nobody_looks(log: Console) -> None:
    with show_work("gsm8k", total=1, is_live=False, console=log) as work:
        work.advance(1)
        time.sleep(0.1)
    assert written(log) == ""


def test_lines_of_long_work_become_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, waits = [0.0], list[float]()
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    class Never:
        def wait(self, timeout: float) -> bool:
            waits.append(timeout)
            clock[0] += timeout
            return len(waits) > 8

    progress._write_lines(progress._Work("x", 0, None), Console(file=io.StringIO()), Never())  # type: ignore[arg-type]
    assert waits == [3, 3, 6, 12, 24, 48, 60, 60, 60]


def test_a_terminal_gets_a_bar_that_moves_with_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LOOK_SECONDS", 0.02)
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    with show_work("gsm8k", total=4, sampler=Counting(), console=console) as work:
        work.advance(1)
        wait_for(lambda: len(set(re.findall(r"1 of 4 answers, (\d+) tokens", written(console)))) >= 3)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    alphabet = "".join(map(chr, range(32, 127))) + "\n"
    shape = {"layers": 1, "width": 16, "heads": 2, "kv_heads": 1, "mlp_width": 32, "context": 2048, "seed": 0}
    return make_tiny_model(tmp_path / "model", alphabet=alphabet, **shape)


@pytest.mark.parametrize("verb", ["eval", "scale"])
def test_eval_and_scale_are_not_silent_in_a_log(
    verb: str, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "FIRST_SECONDS", 0.005)
    assert not sys.stderr.isatty()
    asked = SuiteRequest(suite="gsm8k", samples=2, max_new_tokens=16, limit=4)
    if verb == "eval":
        evaluate_suite(model, asked, note=lambda line: None)
    else:
        scale(
            model, asked, Ways(modes=("best_of", "refine"), samples=2, rounds=1), out=Path("o"), note=lambda line: None
        )
    said = capsys.readouterr().err
    assert ("gsm8k: " if verb == "eval" else "gsm8k, samples: ") in said
    assert "tokens drawn" in said
