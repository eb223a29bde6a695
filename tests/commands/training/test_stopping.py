"""A signal ends a run where it can be resumed; the terminal says where that is and how."""

from __future__ import annotations

import asyncio
import copy
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from temper.cli import main
from temper.commands.training import train as training
from temper.commands.training.stopping import Stopped, run_until_stopped
from temper.config import resolve, to_toml
from temper.runs.reader import RunReader
from temper.trainer.checkpoint import list_checkpoints


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """A shell starts what it puts into the background with SIGINT ignored; these tests are about one that is not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def recipe(tiny_recipe: dict[str, Any], tmp_path: Path) -> Path:
    made = copy.deepcopy(tiny_recipe)
    del made["heldout"]
    made["stage"] = [{**made["stage"][0], "steps": 6}]
    path = tmp_path / "recipe.toml"
    path.write_text(to_toml(resolve(made, [], where="test")))
    return path


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_a_checkpoint_is_written_ends_the_run_behind_it(
    number: signal.Signals,
    code: int,
    recipe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write = training.write_checkpoint

    def slowly(parent: Path, name: str, *rest: Any) -> Any:
        if name == "step-4":
            signal.pthread_kill(main_thread, number)
            time.sleep(0.3)
        return write(parent, name, *rest)

    main_thread = threading.main_thread().ident or 0
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    monkeypatch.setattr(training, "write_checkpoint", slowly)
    monkeypatch.setattr(sys, "argv", ["temper", "train", str(recipe), "--run", str(tmp_path / "run")])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == code
    said = capsys.readouterr().out
    checkpoint = tmp_path / "run" / "checkpoints" / "0-sft" / "step-4"
    assert f"stopped by {number.name} after step 4 of 6 of stage 1 (sft); the last checkpoint is {checkpoint}" in said
    assert f"temper train {recipe} --run {tmp_path / 'run'} --resume" in said
    assert list_checkpoints(checkpoint.parent)[-1] == checkpoint
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers
    with RunReader(tmp_path / "run") as reader:
        assert (reader.state.name, reader.state.text) == ("stopped", f"stopped by {number.name}")
    monkeypatch.setattr(sys, "argv", ["temper", "train", str(recipe), "--run", str(tmp_path / "run"), "--resume"])
    monkeypatch.setattr(training, "write_checkpoint", write)
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0


def test_a_second_signal_does_not_wait_for_the_first() -> None:
    async def stubborn() -> None:
        try:
            await asyncio.sleep(30)
        finally:
            signal.raise_signal(signal.SIGTERM)
            await asyncio.sleep(30)

    async def go() -> None:
        asyncio.get_running_loop().call_later(0.01, signal.raise_signal, signal.SIGINT)
        await run_until_stopped(stubborn())

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt) as end:
        asyncio.run(go())
    assert not isinstance(end.value, Stopped)
    assert time.monotonic() - started < 20


def test_handlers_of_the_program_are_left_alone() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:

        async def work() -> None:
            signal.raise_signal(signal.SIGTERM)
            await asyncio.sleep(0)

        asyncio.run(run_until_stopped(work()))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM]


def test_cancelled_without_a_signal_is_cancelled() -> None:
    async def work() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run_until_stopped(work()))
