"""Trainer and sampler in two processes, either of which is killed at any instant: after a resume every draw was trained
once, no token was older than the bound, and nothing of a dead run is left."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from temper.build import sampler as build_sampler
from temper.commands.training import train as training
from temper.config import RunConfig, resolve
from temper.engine.fleet import fleet
from temper.engine.local.engine import LocalEngine
from temper.engine.process import saving
from temper.engine.process.client import ProcessSampler
from temper.engine.process.order import open_engine, read_order
from temper.errors import BackendError, TemperError
from temper.runs.reader import RunReader
from temper.types import Completion, Request
from tests.fakes.forked import fork_sampler
from tests.fakes.served import serve_in_a_thread
from tests.test_resume import Interrupter, finish, identity, interrupted, start, write_recipe

GROUPS = 4
KILLS = {staleness: int(os.environ.get("TEMPER_KILLS", usual)) for staleness, usual in ((0, "10"), (1, "3"))}
"""Instants of the heavy tests, by bound."""
SECONDS = 240.0


def placed(recipe: dict[str, Any], staleness: int, *, steps: int) -> dict[str, Any]:
    """The stage that draws alone, in a process of its own."""
    rollout = {"groups_per_step": GROUPS, "group_size": 4, "max_staleness": staleness}
    stage = {**recipe["stage"][1], "steps": steps, "rollout": rollout}
    engine = {"place": "process", "numerics": "exact"}
    # None is replaced here: a run that loses its only sampler must end well, too.
    alone = {"engine": engine, "cluster": {"max_restarts": 0}}
    return {**recipe, "checkpoint": {"every": 1, "keep": 2}, **alone, "stage": [stage]}


def check_run(run: Path, *, steps: int, staleness: int) -> set[int]:
    """Asserts what a run must have kept; returns the ages of its tokens."""
    ages: set[int] = set()
    with RunReader(run) as reader:
        assert reader.is_finished
        draws = [entry.draw for entry in reader.ledger()]
        assert draws == list(range(len(draws))), "every draw is there once, and in order"
        trained = Counter(entry.step for entry in reader.ledger() if entry.outcome == "trained")
        assert trained == dict.fromkeys(range(1, steps + 1), GROUPS)
        for step in range(1, steps + 1):
            for trajectory in reader.trajectories(0, step):
                for row in trajectory.rows:
                    drawn = row.versions[row.loss_mask == 1]
                    ages |= set((step - 1 - np.asarray(drawn)).tolist())
    assert min(ages) >= 0, "nothing was drawn by weights that did not exist yet"
    assert max(ages) <= staleness
    return ages


def test_a_run_that_samples_ahead_in_another_process_keeps_the_bound_and_resumes(
    tiny_recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_sampler, "start_sampler", serve_in_a_thread)
    recipe, run = write_recipe(tmp_path, placed(tiny_recipe, 1, steps=4)), tmp_path / "run"
    interrupted(recipe, run, Interrupter(0, 2), monkeypatch)
    training.train(recipe, run=run, resume=True)
    assert check_run(run, steps=4, staleness=1) == {0, 1}, "without a token of an older version nothing ran ahead"


class Mortal(LocalEngine):
    """An engine whose process is killed when it is asked for the n-th time."""

    asked = 0
    last = 0
    sampler: ProcessSampler | None = None

    async def generate(self, request: Request, **more: Any) -> Completion:
        Mortal.asked += 1
        if Mortal.asked == Mortal.last and Mortal.sampler is not None:
            Mortal.sampler._process.kill()
        return await super().generate(request, **more)


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_sampler_that_dies_in_a_rollout_ends_the_run_and_a_resume_goes_on(
    staleness: int, tiny_recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def mortal(text: str) -> LocalEngine:
        engine = open_engine(read_order(text))
        engine.__class__ = Mortal
        return engine

    def start_mortal(order: str, *shared: Any, **more: Any) -> ProcessSampler:
        Mortal.sampler = serve_in_a_thread(order, *shared, opener=mortal, **more)
        return Mortal.sampler

    monkeypatch.setattr(build_sampler, "start_sampler", start_mortal)
    table, run = placed(tiny_recipe, staleness, steps=3), tmp_path / "run"
    del table["heldout"], table["stage"][0]["evaluation"]
    stages = resolve(table, (), where="test")
    # The gate before step 1 asks for 8, a step for 16 and its canary for 4: this is the middle of step 2's rollout.
    monkeypatch.setattr(Mortal, "asked", 0)
    monkeypatch.setattr(Mortal, "last", 55 + 16 * staleness)
    with pytest.raises(BackendError, match=r"the sampler thread: it ended\. Nothing.*go on with --resume"):
        training.train_stages(stages, run=run)
    with RunReader(run) as reader:
        assert reader.state.name == "failed"
        assert 0 < len(reader.steps()) < 3, "the kill was meant for the middle of the run"
    training.train_stages(stages, run=run, resume=True)
    check_run(run, steps=3, staleness=staleness)


class ToldAndGone(LocalEngine):
    """An engine whose process is killed once, behind the first answers that it told before they were whole."""

    has_told = False
    sampler: ProcessSampler | None = None

    def so_far(self, least: Mapping[str, int]) -> dict[str, Completion]:
        told = super().so_far(least)
        if told and not ToldAndGone.has_told and ToldAndGone.sampler is not None and self.version == 1:
            ToldAndGone.has_told = True
            asyncio.get_running_loop().call_soon(ToldAndGone.sampler._process.kill)
        return told


def test_a_run_goes_on_behind_what_a_dead_sampler_had_told_and_has_the_weights_of_one_left_alone(
    tiny_recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def told_and_gone(text: str) -> LocalEngine:
        engine = open_engine(read_order(text))
        engine.__class__ = ToldAndGone
        return engine

    def begin(order: str, *shared: Any, **more: Any) -> ProcessSampler:
        ToldAndGone.sampler = serve_in_a_thread(order, *shared, opener=told_and_gone, **more)
        return ToldAndGone.sampler

    monkeypatch.setattr(build_sampler, "start_sampler", begin)
    monkeypatch.setattr(saving, "LOOK_SECONDS", 0.001)
    monkeypatch.setattr(saving, "LEAST_TOKENS", 3)
    table = placed(tiny_recipe, 0, steps=3)
    table["cluster"] = {"max_restarts": 2}
    table["sampling"] = {**table.get("sampling", {}), "max_new_tokens": 16}
    del table["heldout"], table["stage"][0]["evaluation"]
    weights, rescued = {}, {}
    for name, is_killed in (("alone", False), ("killed", True)):
        monkeypatch.setattr(ToldAndGone, "has_told", not is_killed)
        training.train_stages(resolve(table, (), where="test"), run=tmp_path / name)
        check_run(tmp_path / name, steps=3, staleness=0)
        last = tmp_path / name / "checkpoints" / "0-rl" / "step-3"
        weights[name] = {path.name: path.read_bytes() for path in last.glob("*.safetensors")}
        with RunReader(tmp_path / name) as reader:
            rescued[name] = sum(point.value for point in reader.metric("sys/rescued"))
    assert weights["alone"] == weights["killed"] != {}
    assert rescued["alone"] == 0 < rescued["killed"]


class Driver:
    """A run in a process that was forked, with samplers that it forks, or starts as a user's run does: a fork while a
    trainer computes would inherit what its threads hold."""

    def __init__(self, stages: Sequence[RunConfig], run: Path, *, forks: bool = True) -> None:
        self._begin_sampler = fork_sampler if forks else build_sampler.start_sampler
        self._log, self._sampler = run.with_suffix(".log"), run.with_suffix(".pid")
        self._sampler.unlink(missing_ok=True)
        self.pid = os.fork()
        if self.pid == 0:
            self._train(stages, run)

    def _train(self, stages: Sequence[RunConfig], run: Path) -> NoReturn:
        log, code = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 9
        os.dup2(log, 1)
        os.dup2(log, 2)

        def begin(order: str, *shared: Any, **more: Any) -> ProcessSampler:
            sampler = self._begin_sampler(order, *shared, **more)
            with self._sampler.open("a") as told:
                told.write(f"{sampler._process.pid}\n")  # type: ignore[attr-defined]
            return sampler

        build_sampler.start_sampler = begin
        fleet.PING_SECONDS = 0.2
        try:
            training.train_stages(stages, run=run, resume=run.exists())
            code = 0
        except TemperError as error:
            os.write(2, str(error).encode())
            code = error.exit_code
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    @property
    def said(self) -> str:
        return self._log.read_text()

    @property
    def samplers(self) -> list[int]:
        """All that were started, the newest last."""
        return [int(pid) for pid in self._sampler.read_text().split()] if self._sampler.exists() else []

    @property
    def sampler(self) -> int:
        """0: not started yet."""
        return self.samplers[-1] if self.samplers else 0

    @property
    def code(self) -> int | None:
        """None: it runs."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None

    def end(self, seconds: float) -> int:
        """Waits for its end; returns the code."""
        deadline = time.monotonic() + seconds
        while (code := self.code) is None:
            assert time.monotonic() < deadline, f"the driver did not end: {self.said}"
            time.sleep(0.002)
        return code


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def kill_one(driver: Driver, seconds: float, random_: random.Random) -> str:
    """Kills the driver or its sampler after so many seconds; returns which. Asserts how the other one ends."""
    deadline, victim = time.monotonic() + seconds, random_.choice(["driver", "sampler"])
    while time.monotonic() < deadline or (victim == "sampler" and not driver.sampler):
        if (code := driver.code) is not None:
            assert code == 0, driver.said
            return "nobody"
        time.sleep(0.001)
    sampler = driver.sampler
    with suppress(ProcessLookupError):  # the run is just over
        os.kill(driver.pid if victim == "driver" else sampler, signal.SIGKILL)
    code = driver.end(SECONDS)
    if victim == "driver":
        assert code in (0, -signal.SIGKILL)
    elif code:  # 0: it had been told to close already
        assert code == BackendError.exit_code, driver.said
        assert "it ended. Nothing that was drawn since the last checkpoint counts; go on with --resume" in driver.said
    ended = time.monotonic() + SECONDS
    while sampler and is_alive(sampler):
        assert time.monotonic() < ended, "an orphan is left"
        time.sleep(0.002)
    return victim if code else "nobody"


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("staleness", [0, 1])
def test_either_process_killed_at_random_instants_leaves_a_whole_run(
    staleness: int, tiny_recipe: dict[str, Any], tmp_path: Path
) -> None:
    table, steps = placed(tiny_recipe, staleness, steps=10), 10
    stages, random_ = resolve(table, (), where="test"), random.Random(staleness)
    began, alone = time.monotonic(), Driver(stages, tmp_path / "alone")
    assert alone.end(SECONDS) == 0, alone.said
    window = time.monotonic() - began
    expected, victims, number = identity(tmp_path / "alone"), Counter[str](), 0
    while victims["driver"] + victims["sampler"] < KILLS[staleness] or not is_finished(tmp_path / f"{number}"):
        if is_finished(tmp_path / f"{number}"):
            number += 1
        is_last = victims["driver"] + victims["sampler"] >= KILLS[staleness]
        driver = Driver(stages, tmp_path / f"{number}")
        if is_last:
            assert driver.end(SECONDS) == 0, driver.said
        else:
            victim = kill_one(driver, random_.uniform(0.0, window), random_)
            victims[victim] += 1
            window *= 0.8 if victim == "nobody" else 1.0  # the machine is less busy than it was
        if is_finished(tmp_path / f"{number}"):
            check_run(tmp_path / f"{number}", steps=steps, staleness=staleness)
            if staleness == 0:
                assert identity(tmp_path / f"{number}") == expected, "as one that was left alone, to the bit"
    print(f"killed: {dict(victims)} over {number + 1} runs")
    assert min(victims["driver"], victims["sampler"]) > 0


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("staleness", [0, 1])
def test_samplers_of_a_fleet_killed_and_stopped_at_random_instants_change_nothing(
    staleness: int, tiny_recipe: dict[str, Any], tmp_path: Path
) -> None:
    """The run goes on by itself, with the weights of one that was left alone."""
    steps, most = (20, KILLS[0]) if staleness == 0 else (30, 3)
    table = placed(tiny_recipe, staleness, steps=steps)
    stages, random_ = resolve(table, (), where="test"), random.Random(staleness)
    cluster = {"samplers": 2, "max_restarts": 1000, "silent_seconds": 2.0 if staleness == 0 else 10.0}
    many = resolve({**table, "cluster": cluster}, (), where="test")
    assert (alone := Driver(stages, tmp_path / "alone")).end(SECONDS) == 0, alone.said
    done, number = Counter[str](), 0
    while sum(done.values()) < most:
        driver = Driver(many, tmp_path / f"{number}", forks=staleness == 0)
        deadline = time.monotonic() + SECONDS
        while (code := driver.code) is None:
            assert time.monotonic() < deadline, f"the run did not end: {driver.said}"
            time.sleep(random_.uniform(0.1, 1.0))
            living = [pid for pid in driver.samplers if is_alive(pid)]
            if len(living) == 2 and sum(done.values()) < most:
                kind = random_.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
                with suppress(ProcessLookupError):  # the run is just over
                    os.kill(random_.choice(living), kind)
                    done[kind.name] += 1
        assert code == 0, driver.said
        check_run(tmp_path / f"{number}", steps=steps, staleness=staleness)
        if staleness == 0:
            assert identity(tmp_path / f"{number}") == identity(tmp_path / "alone"), "to the bit"
        while left := [pid for pid in driver.samplers if is_alive(pid)]:
            assert time.monotonic() < deadline, f"orphans are left: {left}"
            time.sleep(0.01)
        number += 1
    print(f"{dict(done)} over {number} runs")


def is_finished(run: Path) -> bool:
    return run.exists() and training.is_finished(run)


def sampler_of(pid: int) -> int:
    """The sampler process of a driver; 0: it has none."""
    for folder in Path("/proc").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            if folder.name.isdigit() and b"temper.cluster.sampler_main" in (folder / "cmdline").read_bytes():
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == pid:
                    return int(folder.name)
    return 0


@pytest.mark.heavy
@pytest.mark.parametrize("victim", ["driver", "sampler"])
def test_a_command_and_its_sampler_process_end_together(
    victim: str, tiny_recipe: dict[str, Any], tmp_path: Path
) -> None:
    """The same with the programs that a user starts, once each."""
    recipe, run = write_recipe(tmp_path, placed(tiny_recipe, 1, steps=30)), tmp_path / "run"
    command, deadline = start(recipe, run, resume=False), time.monotonic() + SECONDS
    while not list(run.glob("checkpoints/*/step-2")) and command.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    sampler = sampler_of(command.pid)
    assert sampler, "it draws in a process of its own"
    os.kill(command.pid if victim == "driver" else sampler, signal.SIGKILL)
    output, _ = command.communicate(timeout=SECONDS)
    while is_alive(sampler):
        assert time.monotonic() < deadline + SECONDS, "an orphan is left"
        time.sleep(0.01)
    if victim == "sampler":
        assert command.returncode == BackendError.exit_code, output.decode()
        assert "it was killed by SIGKILL" in output.decode()
        assert "--resume" in output.decode()
    finish(start(recipe, run, resume=True))
    check_run(run, steps=30, staleness=1)
