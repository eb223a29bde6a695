"""Groups stay together, conversations stay where they are cached, and nobody is overloaded for it."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from temper.engine.fleet import routing
from temper.engine.fleet.routing import BLOCK, OVERLOAD, SLACK, Router


def prompt(seed: int, length: int = 70) -> tuple[int, ...]:
    return tuple(random.Random(seed).randrange(1000) for _ in range(length))


def test_a_group_is_read_once_and_groups_are_spread() -> None:
    router, in_flight = Router(), dict.fromkeys(range(4), 0)
    places = []
    for number in range(40):
        chosen = set()
        for _ in range(4):
            place = router.choose(prompt(number), in_flight)
            in_flight[place] += 1
            chosen.add(place)
        assert len(chosen) == 1
        places.append(chosen.pop())
    assert Counter(places) == dict.fromkeys(range(4), 10)


def test_a_conversation_goes_where_its_turns_are_cached_and_a_shared_beginning_does_not_matter() -> None:
    router, idle = Router(), dict.fromkeys(range(3), 0)
    system = prompt(0, 4 * BLOCK)
    owners = {}
    for number in range(6):
        question = (*system, *prompt(100 + number, 20))
        busy = {place: (0 if place == number % 3 else 1) for place in idle}
        owners[number] = router.choose(question, busy)
        router.drawn(question, prompt(200 + number, 2 * BLOCK), owners[number])
    assert owners == {number: number % 3 for number in range(6)}, "one system prompt is no conversation"
    for number, owner in owners.items():
        first = (*system, *prompt(100 + number, 20), *prompt(200 + number, 2 * BLOCK))
        assert router.choose((*first, *prompt(300 + number, 15)), {**idle, owner: 5}) == owner


def test_who_has_too_much_to_do_gets_no_more_for_its_cache() -> None:
    router = Router()
    assert router.choose(prompt(1), {0: 0, 1: 3}) == 0
    assert router.choose(prompt(1), {0: OVERLOAD * 3 + SLACK, 1: 3}) == 0
    assert router.choose(prompt(1), {0: OVERLOAD * 3 + SLACK + 1, 1: 3}) == 1
    assert router.choose(prompt(1), {0: 50, 1: 30}) == 1, "the group goes on where its prompt is now"


def test_the_dead_are_forgotten_and_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "REMEMBERED", 50)
    router = Router()
    assert router.choose(prompt(1), {0: 0, 1: 1}) == 0
    assert router.choose(prompt(1), {1: 1}) == 1, "who is not ready is not chosen"
    router.choose(prompt(2), {0: 0, 1: 1})
    router.forget(0)
    assert router.choose(prompt(2), {0: 1, 1: 0}) == 1
    for number in range(100, 200):
        router.choose(prompt(number), {0: 0, 1: 1})
    assert len(router._owners) == 50
    assert router.choose(prompt(199), {0: 1, 1: 0}) == 0, "the newest are kept"
    assert router.choose(prompt(120), {0: 1, 1: 0}) == 1
