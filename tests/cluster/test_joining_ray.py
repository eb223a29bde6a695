"""Joining a Ray cluster ends, whatever listens at its address. Ray itself is not needed here: test_ray.py has it."""

from __future__ import annotations

import threading

import pytest

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
    placing._join_cluster(lambda: joined.append(True), "auto")
    assert joined
