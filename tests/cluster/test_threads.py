"""Nobody is given cores that another one uses at the same time."""

from __future__ import annotations

from temper.cluster.threads import Threads, share_threads


def test_those_who_work_at_once_share_and_those_who_take_turns_do_not() -> None:
    assert share_threads(8, "auto", takes_turns=False) == Threads(sampler=4, trainer=4)
    assert share_threads(8, 6, takes_turns=False) == Threads(sampler=6, trainer=2)
    assert share_threads(3, "auto", takes_turns=False) == Threads(sampler=1, trainer=2)
    assert share_threads(8, "auto", takes_turns=True) == Threads(sampler=8, trainer=8)
    assert share_threads(8, 2, takes_turns=True) == Threads(sampler=2, trainer=8)


def test_several_samplers_share_what_one_would_have() -> None:
    assert share_threads(16, "auto", takes_turns=False, num_samplers=4) == Threads(sampler=2, trainer=8)
    assert share_threads(16, 3, takes_turns=False, num_samplers=4) == Threads(sampler=3, trainer=4)
    assert share_threads(16, "auto", takes_turns=True, num_samplers=4) == Threads(sampler=4, trainer=16)
    assert share_threads(2, "auto", takes_turns=False, num_samplers=4) == Threads(sampler=1, trainer=1)


def test_everybody_has_one() -> None:
    assert share_threads(1, "auto", takes_turns=False) == Threads(sampler=1, trainer=1)
    assert share_threads(2, 5, takes_turns=False) == Threads(sampler=5, trainer=1)
