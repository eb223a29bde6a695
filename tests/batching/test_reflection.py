"""Signs of looking back are counted where they stand, and not where the words only look alike."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from temper.batching.reflection import BACKTRACKING, REFLECTION, looks_back_in, reflection_metrics
from temper.types import Trajectory


@pytest.mark.parametrize(
    "text", ["Wait, 7 * 8 = 56.", "hmm. 12", "Let me check: 3 + 4", "To verify, add them", "double-checking this"]
)
def test_looking_again_is_seen(text: str) -> None:
    assert REFLECTION.search(text)


@pytest.mark.parametrize("text", ["That is wrong. It is 4.", "On second thought 5", "let me redo it", "I'll try again"])
def test_giving_up_what_was_said_is_seen(text: str) -> None:
    assert BACKTRACKING.search(text)


@pytest.mark.parametrize("text", ["The waiter brings 3 plates.", "awaiting", "He checks in at noon", "12", ""])
def test_words_that_only_look_alike_are_not(text: str) -> None:
    assert not REFLECTION.search(text)
    assert not BACKTRACKING.search(text)


@pytest.mark.parametrize(("which", "pattern"), [(0, REFLECTION), (1, BACKTRACKING)])
def test_whatever_a_pattern_finds_has_one_of_its_parts(which: int, pattern: re.Pattern[str]) -> None:
    """Else a look for the parts, which is cheaper, would hide it. Also in capitals."""

    @settings(max_examples=300, deadline=None, derandomize=True)
    @given(st.from_regex(pattern, fullmatch=True))
    def check(text: str) -> None:
        assert pattern.search(text)
        assert looks_back_in(f"so {text}.")[which] == bool(pattern.search(f"so {text}."))

    check()


def test_shares_are_over_responses_and_each_counts_once() -> None:
    said = ["wait, wait, wait: 3", "3", "wait. that is wrong. 4", "4"]
    metrics = reflection_metrics([Trajectory.saying(str(number), text) for number, text in enumerate(said)])
    assert metrics == {"gen/reflection_rate": 0.5, "gen/backtracking_rate": 0.25}
    assert reflection_metrics([]) == {}
