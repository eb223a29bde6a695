"""What must hold of every history that survives its crashes, whatever schedule and controls it had."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from temper.interpreter import seldom_collected
from tests.fakes.schedules import (
    Answer,
    History,
    Parts,
    Schedule,
    Step,
    lengths_of,
    live_through,
    on_failure,
    stream_of,
)


def live_and_check(schedules: Iterable[Schedule], parts: Parts = Parts()) -> int:
    """How often a run was resumed."""
    resumes = 0
    with seldom_collected():  # once for all: every run would go through all that is imported, six times its own work
        for schedule in schedules:
            with on_failure(schedule):
                history = live_through(schedule, parts)
                check(schedule, history)
            resumes += history.resumes
    return resumes


def check(schedule: Schedule, history: History) -> None:
    """What must hold of every schedule."""
    steps = [history.steps[step] for step in range(1, schedule.steps + 1)]
    assert all(len(step.trained) == schedule.groups_per_step for step in steps), "every step is full"
    consumed = sorted(draw for step in steps for draw in (*step.trained, *step.dropped))
    stream = stream_of(schedule)
    drawn = [(draw, task.id) for draw, task in (stream.next() for _ in range(consumed[-1][0] + 1))]
    left_behind = set(drawn) - set(consumed)
    assert sorted([*consumed, *left_behind]) == drawn, "each draw is trained or dropped, once"
    assert len(left_behind) <= schedule.most_left_behind, "each draw is trained or dropped, once"
    for first in range(0, len(drawn) - schedule.num_tasks + 1, schedule.num_tasks):
        epoch = {task for draw, task in drawn if first <= draw < first + schedule.num_tasks}
        assert len(epoch) == schedule.num_tasks, "each prompt is there once in an epoch"
    check_answers(schedule, [answer for step in steps for answer in step.answers])
    assert max(age for step in steps for age in step.ages) <= schedule.staleness, "the bound is kept"
    check_overtaken(schedule, steps)
    for step in steps:
        # A group that is dropped or cut is replaced when it ends, never later. Controls may let one run at a time.
        rounds = (schedule.groups_per_step if schedule.controls else 1) + len(step.dropped) + step.num_cut
        assert step.waited <= rounds * schedule.longest_seconds + 1e-3, "nothing waits for what has not been started"


def check_answers(schedule: Schedule, answers: Sequence[Answer]) -> None:
    """Cut, paused or left alone: an answer is the one that it would have been, and says who drew it."""
    length_of = lengths_of(schedule)
    for answer in answers:
        assert answer.versions == answer.drawn_by, "each token has the version that drew it"
        assert len(answer.versions) == length_of("g", answer.draw), "an answer is as long as it would have been"


def check_overtaken(schedule: Schedule, steps: Sequence[Step]) -> None:
    """A draw that was never consumed is one that the step after the last may consume."""
    consumed = [[draw for draw, _ in (*step.trained, *step.dropped)] for step in steps]
    when = {draw: number for number, draws in enumerate(consumed) for draw in draws}
    for draw in range(max(when)):
        end = when.get(draw, len(steps))
        # Where tokens may be old, waiting begins anew with the process: it has to be drawn anew.
        begin = steps[min(end, len(steps) - 1)].first_of_life - 1 if schedule.staleness else 0
        passed = [number for number in range(begin, end) if max(consumed[number]) > draw]
        assert not passed or end - passed[0] <= schedule.most_overtaken, "nobody starves"
