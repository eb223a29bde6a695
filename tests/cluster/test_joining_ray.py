"""Joining a Ray cluster ends, whatever listens at its address. Ray itself is not needed here: test_ray.py has it."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from temper.children import PR_SET_PDEATHSIG
from temper.cluster import ray as placing
from temper.errors import UserError


def test_something_else_that_listens_at_the_address_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "JOIN_SECONDS", 0.2)
    never = threading.Event()
    with pytest.raises(UserError, match=r'cluster.address = "a:80": no Ray answers there: .* said nothing for 0.2 s'):
        placing._join_cluster(lambda: never.wait(20), "a:80")
    never.set()


@pytest.mark.parametrize(
    ("address", "told"), [("a:80", "no Ray answers there: gone"), ("", "could not be started here")]
)
def test_what_ray_says_against_it_is_told(address: str, told: str) -> None:
    def refuse() -> None:
        raise ConnectionError("gone")

    with pytest.raises(UserError, match=told):
        placing._join_cluster(refuse, address)


def test_a_cluster_that_lets_us_in_is_joined() -> None:
    joined: list[bool] = []
    placing._join_cluster(lambda: joined.append(True), "auto").set()
    assert joined


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no child ends with its parent")
def test_what_ray_starts_lives_until_the_cluster_is_left() -> None:
    """Ray has the kernel end it with its parent, which for the kernel is the thread that started it."""
    started: list[subprocess.Popen[bytes]] = []

    def end_with_parent() -> None:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    def begin() -> None:
        started.append(subprocess.Popen(["sleep", "600"], preexec_fn=end_with_parent))

    left = placing._join_cluster(begin, placing.OWN_CLUSTER)
    with pytest.raises(subprocess.TimeoutExpired):
        started[0].wait(timeout=1.0)
    left.set()
    assert started[0].wait(timeout=20) == -signal.SIGKILL


class FakeRay:
    """Whether this process is in a cluster, and which."""

    def __init__(self, address: str = "") -> None:
        self.address = address
        self.util = SimpleNamespace(get_node_ip_address=lambda: "a", remove_placement_group=lambda group: None)

    def is_initialized(self) -> bool:
        return bool(self.address)

    def init(self, address: str, **_: Any) -> None:
        self.address = address

    def shutdown(self) -> None:
        self.address = ""

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(gcs_address=self.address)


def install(monkeypatch: pytest.MonkeyPatch, fake: FakeRay) -> None:
    monkeypatch.setattr(placing, "require_ray", lambda: None)
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")


@pytest.mark.parametrize("address", [placing.OWN_CLUSTER, "auto"])
def test_a_cluster_without_room_is_left(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRay()
    install(monkeypatch, fake)

    def refuse(*_: Any) -> None:
        assert fake.is_initialized()
        raise UserError("no room")

    monkeypatch.setattr(placing, "_find_room", refuse)
    with pytest.raises(UserError, match="no room"):
        placing.RayPlace(address, ranks=1, samplers=1, gpus=0)
    assert not fake.is_initialized()


def test_another_cluster_than_that_of_this_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRay("10.0.0.1:6379")
    install(monkeypatch, fake)
    monkeypatch.setattr(placing, "_find_room", lambda *_: "a group")
    with pytest.raises(UserError, match=r'"10.0.0.2:6379", and this process is in the Ray cluster at 10.0.0.1:6379'):
        placing.RayPlace("10.0.0.2:6379", ranks=1, samplers=1, gpus=0)
    for same in (placing.OWN_CLUSTER, "auto", "10.0.0.1:6379"):
        placing.RayPlace(same, ranks=1, samplers=1, gpus=0).close()
    assert fake.is_initialized(), "who was in it before stays"
