"""The search for a prompt ends, and a resumed search finds what an unbroken one finds."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest

from temper.errors import UserError
from temper.tasks.choice.chooser import Chooser, Look, StageFacts
from temper.tasks.choice.memory import CHOOSERS, DRAWN, HISTORIES, STEP, PromptMemory
from temper.tasks.choice.registry import read_choosers
from temper.tasks.choice.stream import ChosenStream
from temper.tasks.dataset import Stream
from temper.types import Group, PromptHistory
from tests.fakes.prompts import Class, make_tasks, play_steps, true_rates

A, B = make_tasks("a", 12, "a"), make_tasks("b", 7, "b")
FACTS = StageFacts(sources=("a", "b"), weights=(2.0, 1.0), steps=12)
EVERY: list[Any] = ["no_positive_resampling", "band", "pools", "adaptive_sources"]


def make_pair(choosers: Sequence[Chooser], seed: int = 0) -> tuple[ChosenStream, PromptMemory]:
    memory = PromptMemory(choosers, FACTS)
    return ChosenStream(Stream([A, B], [2.0, 1.0], seed=seed), memory), memory


WANTED, SECOND, OUT = "wanted", "second", "out"


class Says(Chooser):
    """Thinks of prompts that were seen what it was told of their source."""

    name = "says"

    def __init__(self, **said: str) -> None:
        self._said = said

    def is_out(self, history: PromptHistory) -> bool:
        return self._said[history.source] == OUT

    def wants(self, look: Look) -> bool:
        return look.history is None or self._said[look.history.source] == WANTED


def play(stream: Any, memory: PromptMemory, steps: Sequence[int], case: int = 0) -> list[list[Group]]:
    pupils = Class(rates=true_rates(case, (*A.tasks, *B.tasks)), seed=case)
    return [groups for groups, _ in play_steps(stream, memory, pupils, steps, 6)]


def names(steps: Sequence[Sequence[Group]]) -> list[tuple[int, str]]:
    return [(group.draw, group.task.id) for groups in steps for group in groups]


def test_choosers_that_want_everything_draw_what_the_stream_below_draws() -> None:
    chosen = play(*make_pair([Says(a=WANTED, b=WANTED)]), range(1, 10))
    plain = play(Stream([A, B], [2.0, 1.0], seed=0), PromptMemory(), range(1, 10))
    assert names(chosen) == names(plain)


def test_a_draw_that_finds_nothing_wanted_takes_the_first_that_is_not_out() -> None:
    stream, memory = make_pair([Says(a=SECOND, b=OUT)])
    play(stream, memory, range(1, 20))  # until every prompt has been seen
    late = [stream.next()[1] for _ in range(6)]
    assert {task.source for task in late} == {"a"}, "the other source is out"
    # Two epochs of each source that is looked into: b once, as it stays empty until a step is consumed.
    assert memory.num_looks == 2 * (6 * len(A.tasks) + len(B.tasks))


def test_a_search_in_a_large_source_is_given_up_for_a_prompt_that_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("temper.tasks.choice.stream.MOST_LOOKS", 5)
    stream, memory = make_pair([Says(a=SECOND, b=SECOND)])
    play(stream, memory, range(1, 20))
    stream.next()
    assert memory.num_looks == 6
    assert memory.num_skips == 5, "one of them was drawn after all"


def test_when_all_is_out_the_error_says_so_with_rates_and_the_key_to_change() -> None:
    stream, memory = make_pair(read_choosers([{"name": "no_positive_resampling", "threshold": 0.01}]))
    pupils = Class(rates=dict.fromkeys([task.id for task in (*A.tasks, *B.tasks)], 0.9))
    with pytest.raises(UserError) as caught:
        list(play_steps(stream, memory, pupils, range(1, 100), 6))
    text = str(caught.value)
    assert f"no prompt is left to draw after step {memory.step}: data.choose (no_positive_resampling)" in text
    assert "has put out all 19, whose running pass rates are 0." in text
    assert f"steps = {memory.step}" in text
    assert "raise its threshold" in text


@pytest.mark.parametrize("case", range(4))
def test_a_run_that_is_resumed_after_any_step_draws_what_the_unbroken_one_draws(case: int) -> None:
    straight = play(*make_pair(read_choosers(EVERY), case), range(1, 13), case)
    broken = random.Random(case).randrange(1, 12)
    stream, memory = make_pair(read_choosers(EVERY), case)
    before = play(stream, memory, range(1, broken + 1), case)
    state = {**stream.state(), **memory.state()}
    stream, memory = make_pair(read_choosers(EVERY), case)
    stream.load_state(state)
    memory.load_state(state)
    after = play(stream, memory, range(broken + 1, 13), case)
    assert names(before) + names(after) == names(straight)


@pytest.mark.parametrize("case", range(4))
def test_draws_under_way_come_to_the_same_prompts_after_a_resume_whatever_was_learned_since(case: int) -> None:
    """As a sampler that runs ahead is saved: from the first draw that is not consumed on, though later ones are."""
    stream, memory = make_pair(read_choosers(EVERY), case)
    play(stream, memory, range(1, 6), case)
    pupils, chance = Class(rates=true_rates(case, (*A.tasks, *B.tasks)), seed=case), random.Random(case)
    before, ahead = stream.state(), [stream.next() for _ in range(12)]
    done = chance.sample(ahead[1:], 6)  # not the first
    memory.learn(6, [pupils.answer(task, draw) for draw, task in done])
    state = {**before, **memory.state()}
    assert [json.loads(line)[0] for line in state[DRAWN]] == [draw for draw, _ in ahead]
    further = [stream.next() for _ in range(6)]
    again, known = make_pair(read_choosers(EVERY), case)
    again.load_state(state)
    known.load_state(state)
    assert [again.next() for _ in range(18)] == ahead + further
    assert again.state() == stream.state()
    known.learn(7, [pupils.answer(task, draw) for draw, task in ahead + further if (draw, task) not in done])
    assert known.state()[DRAWN] == [], "nothing is kept of what is consumed"


@pytest.mark.parametrize("lost", [HISTORIES, CHOOSERS, STEP])
def test_a_resume_that_forgets_a_part_of_the_state_is_seen(lost: str) -> None:
    """The mutation: without it, the test above could be blind."""
    differing = 0
    for case in range(4):
        straight = play(*make_pair(read_choosers(EVERY), case), range(1, 13), case)
        stream, memory = make_pair(read_choosers(EVERY), case)
        play(stream, memory, range(1, 7), case)
        state = {**stream.state(), **memory.state()}
        del state[lost]
        stream, memory = make_pair(read_choosers(EVERY), case)
        stream.load_state(state)
        memory.load_state(state)
        differing += names(play(stream, memory, range(7, 13), case)) != names(straight[6:])
    assert differing > 0


def test_the_state_of_a_draw_does_not_grow_with_what_is_remembered() -> None:
    """One is kept for every draw that no step has consumed yet."""
    stream, memory = make_pair(read_choosers(EVERY))
    before = stream.state().keys()
    play(stream, memory, range(1, 8))
    assert stream.state().keys() == before == Stream([A, B], [2.0, 1.0], seed=0).state().keys()


def test_a_share_of_what_was_looked_at_says_how_much_was_passed_over() -> None:
    stream, memory = make_pair([Says(a=WANTED, b=OUT)])
    play(stream, memory, range(1, 20))
    pupils = Class(rates=true_rates(0, (*A.tasks, *B.tasks)))
    ((groups, metrics),) = play_steps(stream, memory, pupils, [20], 6)
    assert len(groups) == 6
    looks = 6 + 2 * len(B.tasks)  # b is found empty once
    assert metrics["data/skipped_share"] == pytest.approx(2 * len(B.tasks) / looks)
