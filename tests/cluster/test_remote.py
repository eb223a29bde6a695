"""A network that is cut says nothing: the run goes on without what was behind it, and nobody waits for ever."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from temper.cluster.remote import Callback
from temper.commands.training import ranks as led
from temper.commands.training import train as training
from temper.config import resolve, to_toml
from temper.engine.process.client import ProcessSampler
from temper.engine.process.sent_weights import SentWeights
from temper.runs.reader import RunReader
from temper.trainer.ranks.beats import GONE_CODE
from tests.commands.training.test_ranks import digest, make_table, run, weights_of

ROOT = Path(__file__).parents[2]
SECONDS = 600.0
SILENT_SECONDS = 4.0
OURS, THEIRS = "10.231.77.1", "10.231.77.2"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=30)


class Network:
    """A namespace that is joined to this one by a cable."""

    def __init__(self) -> None:
        self.name = f"temper-{secrets.token_hex(3)}"

    def open(self) -> None:
        cable, end = self.name, "far"
        ip("netns", "add", self.name)
        ip("link", "add", cable, "type", "veth", "peer", "name", end, "netns", self.name)
        ip("address", "add", f"{OURS}/30", "dev", cable)
        ip("link", "set", cable, "up")
        self.inside("address", "add", f"{THEIRS}/30", "dev", end)
        self.inside("link", "set", end, "up")

    def close(self) -> None:
        """Also what runs inside: the namespace and its cable would live as long."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self.name], capture_output=True, text=True, timeout=30, check=False
        )
        for pid in listed.stdout.split():
            os.kill(int(pid), signal.SIGKILL)
        subprocess.run(["ip", "netns", "delete", self.name], capture_output=True, timeout=30, check=False)

    def inside(self, *words: str) -> None:
        ip("-n", self.name, *words)

    def cut(self) -> None:
        """No packet passes any more, in either direction, and nobody is told."""
        self.inside("link", "set", "far", "down")


@pytest.fixture
def network() -> Iterator[Network]:
    if shutil.which("ip") is None:
        pytest.skip("needs ip of iproute2")
    made = Network()
    try:
        made.open()
        yield made
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespace can be made here: {error.stderr}")
    finally:
        made.close()


class Elsewhere:
    """A process on another machine, as its launcher sees it: out of reach once the network is cut."""

    def __init__(self, name: str, command: list[str], environment: Mapping[str, str], is_reached: Callable[[], bool]):
        self.name, self.is_reached = name, is_reached
        environment = {**os.environ, **environment, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(command, env=environment, cwd=ROOT, stderr=subprocess.DEVNULL)

    def wait(self, seconds: float) -> str | None:
        try:
            return f"it ended with code {self.process.wait(timeout=seconds)}"
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        if self.is_reached():
            self.process.kill()


class TwoMachines:
    """Takes the place of RayPlace: the first sampler is behind the cable, others are here."""

    def __init__(self, network: Network) -> None:
        self.network, self.host, self.is_whole = network, OURS, True
        self.started: list[Elsewhere] = []

    def start_sampler(
        self, number: int, name: str, order: str, environment: Mapping[str, str], silent_seconds: float
    ) -> ProcessSampler:
        callback = Callback(silent_seconds)
        where = (OURS if number == 0 else "127.0.0.1", callback.port, callback.token, silent_seconds)
        python = [sys.executable, "-c", f"from temper.cluster.remote import serve_caller; serve_caller(*{where!r})"]
        behind = ["ip", "netns", "exec", self.network.name] if number == 0 else []
        self.started.append(Elsewhere(name, behind + python, environment, lambda: self.is_whole or number > 0))
        return ProcessSampler(callback, SentWeights(), self.started[-1], order=order)

    def cut(self) -> None:
        self.is_whole = False
        self.network.cut()

    def close(self) -> None:
        """Whoever is left ends by itself."""


@pytest.mark.heavy
def test_a_run_goes_on_without_the_sampler_behind_a_cut_network(
    tiny_recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, network: Network
) -> None:
    engine = {"place": "process", "numerics": "exact", "threads": 1}
    del tiny_recipe["heldout"]
    expected = run(make_table(tiny_recipe, steps=(2, 12)), tmp_path / "alone")
    place = TwoMachines(network)
    monkeypatch.setattr(led, "RayPlace", lambda *_, **__: place)
    cluster = {"place": "ray", "samplers": 2, "silent_seconds": SILENT_SECONDS, "max_restarts": 1}
    table = make_table(tiny_recipe, steps=(2, 12), **cluster) | {"engine": engine}
    folder = tmp_path / "run"

    def cut_in_the_middle() -> None:
        end = time.monotonic() + SECONDS
        while not (folder / "checkpoints/1-rl/step-3").is_dir() and time.monotonic() < end:
            time.sleep(0.02)
        place.cut()

    threading.Thread(target=cut_in_the_middle, daemon=True).start()
    training.train_stages(resolve(table, (), where="test"), run=folder)
    assert not place.is_whole
    assert digest(weights_of(folder)) == digest(expected)
    with RunReader(folder) as reader:
        told = [event.text for event in reader.events() if "another takes its place" in event.text]
    assert len(told) == 1, told
    assert "sampler process 1 of 2" in told[0]
    # Nobody could reach it to end it, and nobody hung up: its own kernel missed us.
    assert place.started[0].wait(10 * SILENT_SECONDS) == "it ended with code 0"
    assert all(other.wait(SECONDS) for other in place.started)


def test_one_who_ends_before_it_calls_is_not_waited_for() -> None:
    began = time.monotonic()
    with pytest.raises(OSError, match="it was given up"):
        Callback(1.0).wait(lambda: time.monotonic() > began + 0.1)


def test_strangers_are_turned_away_and_the_one_with_the_token_is_let_in() -> None:
    callback = Callback(30.0)
    stranger = socket.create_connection(("127.0.0.1", callback.port), timeout=5)
    stranger.sendall(b"x" * 32)
    expected = socket.create_connection(("127.0.0.1", callback.port), timeout=5)
    expected.sendall(callback.token.encode())
    with stranger, expected, callback.wait(lambda: False) as caller:
        caller.sendall(b"welcome")
        assert expected.recv(7) == b"welcome"
        assert stranger.recv(1) == b""
        assert caller.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1


def rank_command(folder: Path) -> list[str]:
    return [sys.executable, "-m", "temper", "train", str(folder.parent / "recipe.toml"), "--run", str(folder)]


@pytest.mark.heavy
def test_a_trainer_rank_behind_a_cut_network_is_named_and_ends_by_itself(
    tiny_recipe: dict[str, Any], tmp_path: Path, network: Network
) -> None:
    """Its rank 0 keeps the store on this side of the cable, as under srun on two machines."""
    folder, seconds = tmp_path / "run", 12.0
    table = make_table(tiny_recipe, steps=(2000, 3), rank_seconds=seconds)
    (tmp_path / "recipe.toml").write_text(to_toml(resolve(table, (), where="test")))
    shared = {
        "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": OURS, "MASTER_PORT": "29655", "OMP_NUM_THREADS": "1",
        "COLUMNS": "200", "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    behind = ["ip", "netns", "exec", network.name]
    tasks = [
        subprocess.Popen(
            command,
            env={**os.environ, **shared, "RANK": str(rank), "GLOO_SOCKET_IFNAME": cable},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, cable, command in (
            (0, network.name, rank_command(folder)),
            (1, "far", behind + rank_command(folder)),
        )
    ]
    try:
        end = time.monotonic() + SECONDS
        while not (folder / "checkpoints/0-sft/step-3").is_dir() and time.monotonic() < end:
            assert all(task.poll() is None for task in tasks), [task.communicate(timeout=30) for task in tasks]
            time.sleep(0.05)
        network.cut()
        cut = time.monotonic()
        told, _ = tasks[0].communicate(timeout=SECONDS)
        assert tasks[0].returncode == 3, told
        assert "trainer rank 1 of 2 was lost" in told
        # The word under way has its seconds, then beats are compared and a connection or two is given up.
        assert time.monotonic() - cut < 3 * seconds + 30
        told, _ = tasks[1].communicate(timeout=3 * seconds + 30)
        assert tasks[1].returncode == GONE_CODE, told
        assert "this trainer rank ends: nothing was heard of rank 0 for 12 s" in told
    finally:
        for task in tasks:
            task.kill()
