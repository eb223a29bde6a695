"""Samplers that were started by themselves: whatever starts the trainers, the run is the one of a single process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from temper.cluster.handshake import KEY_VARIABLE
from temper.commands.training import train as training
from temper.config import resolve
from temper.errors import UserError
from temper.runs.reader import RunReader
from tests.commands.training.test_ranks import (
    IN_PROCESS,
    ROOT,
    digest,
    end_of,
    make_table,
    run,
    start,
    wait_for,
    weights_of,
)  # fmt: skip

KEY = "a key of tests"


class Standing:
    """`temper sampler` in a process of its own."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "temper", "sampler", "--listen", "127.0.0.1:0"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", KEY_VARIABLE: KEY}
        self.process = subprocess.Popen(
            command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    @property
    def address(self) -> str:
        assert self.process.stdout is not None
        said = ""
        while (found := re.search(r"listens at (\S+)", said)) is None:
            assert self.process.poll() is None, said
            said += self.process.stdout.readline()
        return found[1]


@pytest.fixture
def standing() -> Iterator[list[Standing]]:
    made = [Standing(), Standing()]
    try:
        yield made
    finally:
        for one in made:
            one.process.kill()
            one.process.communicate(timeout=30)


@pytest.mark.heavy
def test_under_torchrun_samplers_by_address_draw_what_the_trainers_own_engine_draws(
    tiny_recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, standing: list[Standing]
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    addresses = {"engine": IN_PROCESS, "cluster": {"samplers": [one.address for one in standing]}}
    launcher = ("-m", "torch.distributed.run", "--nproc_per_node=2", "-m", "--", "temper")
    code, said = end_of(start(make_table(tiny_recipe) | addresses, tmp_path / "launched", launcher))
    assert code == 0, said
    together = run(make_table(tiny_recipe, trainers=2), tmp_path / "together")
    assert digest(weights_of(tmp_path / "launched")) == digest(together)
    with RunReader(tmp_path / "launched") as reader:
        assert {point.value for point in reader.metric("sys/samplers")} == {2.0}


@pytest.mark.heavy
def test_a_run_goes_on_with_the_other_when_a_sampler_goes_away(
    tiny_recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, standing: list[Standing]
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    expected = run(make_table(tiny_recipe, steps=(2, 12)), tmp_path / "alone")
    addresses = [one.address for one in standing]
    table = make_table(tiny_recipe, steps=(2, 12)) | {"engine": IN_PROCESS, "cluster": {"samplers": addresses}}
    process = start(table, tmp_path / "run")
    wait_for(lambda: (tmp_path / "run/checkpoints/1-rl/step-3").is_dir(), "a checkpoint")
    standing[0].process.send_signal(signal.SIGTERM)
    code, said = end_of(process)
    assert code == 0, said
    assert digest(weights_of(tmp_path / "run")) == digest(expected)
    assert f"the sampler at {addresses[0]}: it hung up" in re.sub(r"\s+", " ", said)


def test_addresses_without_a_key_are_refused_before_anything_is_opened(
    tiny_recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    table = make_table(tiny_recipe) | {"engine": IN_PROCESS, "cluster": {"samplers": ["gpu7:29600"]}}
    with pytest.raises(UserError, match=f"set {KEY_VARIABLE} to what it was"):
        training.train_stages(resolve(table, (), where="test"), run=tmp_path / "run")
