"""How a sampler stands is a function of what happened to it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from temper.engine.fleet.health import Health, Standing


@given(events=st.lists(st.sampled_from(["fed", "ended", "restarted", "starved"]), max_size=40), most=st.integers(0, 4))
def test_nobody_draws_who_was_not_fed_since_it_began(events: list[str], most: int) -> None:
    health, lives, is_fed, version, ends = Health(), True, False, 0, 0
    for event in events:
        if event == "fed":
            version += 1
            health = health.fed(version)
            is_fed = lives
        elif event == "ended":
            health = health.ended(f"end {ends}", max_restarts=most)
            ends += lives
            lives = is_fed = False
        elif event == "starved":
            health, is_fed = health.starved(), False
        elif health.standing is Standing.LOST:
            health = health.restarted()
            lives, is_fed = True, False
        assert (health.standing is Standing.READY) == (lives and is_fed)
        assert (health.version == version) if health.standing is Standing.READY else health.version is None or not lives
        assert health.restarts <= most
        if not lives:
            assert (health.standing is Standing.GONE) == (health.restarts == most)
            assert health.why == f"end {ends - 1}"
