"""Each chooser changes what is drawn as it promises, on prompts with fixed true pass rates made by one rule."""

from __future__ import annotations

import inspect
import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from temper.errors import UserError
from temper.tasks.choice.adaptive_sources import AdaptiveSources
from temper.tasks.choice.band import Band
from temper.tasks.choice.chooser import Chooser, Look, StageFacts
from temper.tasks.choice.memory import PromptMemory
from temper.tasks.choice.no_positive_resampling import NoPositiveResampling
from temper.tasks.choice.pools import EASY, HARD, MIDDLE, POOLS, Pools
from temper.tasks.choice.registry import CHOOSERS, read_choosers
from temper.tasks.choice.stream import ChosenStream
from temper.tasks.dataset import Stream
from temper.types import Group, PromptHistory
from tests.fakes.prompts import Class, make_group, make_tasks, play_steps, signal_share, true_rates

SIZE, STEPS, GROUPS = 60, 16, 15
"""Four epochs of 60 prompts."""
CASES = range(3)


def play(choose: Sequence[Any], case: int) -> list[tuple[list[Group], dict[str, float]]]:
    tasks = make_tasks("t", SIZE)
    memory = PromptMemory(read_choosers(choose), StageFacts(sources=("t",), weights=(1.0,), steps=STEPS))
    stream: Any = Stream([tasks], [1.0], seed=case)
    pupils = Class(rates=true_rates(case, tasks.tasks), seed=case)
    chosen = ChosenStream(stream, memory) if choose else stream
    return list(play_steps(chosen, memory, pupils, range(1, STEPS + 1), GROUPS))


def late_signal(choose: Sequence[Any], case: int) -> float:
    """Share of groups with a difference, from the second epoch on: in the first nothing is known."""
    return signal_share([group for groups, _ in play(choose, case)[STEPS // 4 :] for group in groups])


@pytest.mark.parametrize(("name", "factor"), [("no_positive_resampling", 1.1), ("band", 1.35)])
def test_groups_with_a_learning_signal_become_more_frequent_by_the_stated_factor(name: str, factor: float) -> None:
    """The factors of docs/curriculum.md."""
    without, with_it = (fmean(late_signal(choose, case) for case in CASES) for choose in ([], [name]))
    assert with_it >= factor * without


@pytest.mark.parametrize("case", CASES)
def test_a_solved_prompt_is_not_drawn_again(case: int) -> None:
    solved: set[str] = set()
    rates: dict[str, float] = {}
    for groups, metrics in play([{"name": "no_positive_resampling", "threshold": 0.8}], case):
        assert not solved & {group.task.id for group in groups}
        for group in groups:
            now, name = fmean(group.rewards), group.task.id
            rates[name] = 0.5 * rates[name] + 0.5 * now if name in rates else now
        solved |= {name for name, rate in rates.items() if rate >= 0.8}
        assert metrics["data/solved_share"] == pytest.approx(len(solved) / len(rates))
    assert solved


def test_a_prompt_is_solved_from_the_threshold_on() -> None:
    chooser = NoPositiveResampling(threshold=0.75)
    rates = {0.75: True, 0.749: False, 1.0: True, None: False}
    assert {rate: chooser.is_out(PromptHistory(task_id="t", rate=rate)) for rate in rates} == rates


@pytest.mark.parametrize("case", CASES)
def test_a_band_loses_no_prompt_for_ever(case: int) -> None:
    """Out of the band one time in ten is left: over the epochs that makes certain, each comes back."""
    tasks = make_tasks("t", 12)
    memory = PromptMemory([Band(low=0.4, high=0.6)], StageFacts(sources=("t",), weights=(1.0,), steps=0))
    stream = ChosenStream(Stream([tasks], [1.0], seed=case), memory)
    pupils = Class(rates=true_rates(case, tasks.tasks), seed=case)
    steps = [groups for groups, _ in play_steps(stream, memory, pupils, range(1, 61), 6)]
    late = Counter(group.task.id for groups in steps[30:] for group in groups)
    assert late.keys() == {task.id for task in tasks.tasks}


def test_a_prompt_outside_of_the_band_is_skipped_as_often_as_the_recipe_says() -> None:
    band, history = Band(low=0.2, high=0.8, skip=0.7), PromptHistory(task_id="t", rate=0.1)
    looks = [Look(seed=3, draw=draw, number=0, history=history) for draw in range(2000)]
    skipped = fmean(not band.wants(look) for look in looks)
    assert skipped == pytest.approx(0.7, abs=0.04)  # four deviations
    for rate in (0.2, 0.8, None):  # both ends belong to it, and what was never scored
        inside = PromptHistory(task_id="t", rate=rate)
        assert all(band.wants(Look(seed=3, draw=d, number=0, history=inside)) for d in range(50))


@pytest.mark.parametrize("case", CASES)
def test_pools_are_drawn_from_in_the_shares_of_their_curriculum(case: int) -> None:
    """Known prompts in equal numbers; what is drawn of them at the start, half way and at the end."""
    shares = {"easy_start": 0.7, "easy_end": 0.1, "hard_start": 0.1, "hard_end": 0.6}
    pools = Pools(steps=3, **shares)
    rates = {EASY: 0.9, MIDDLE: 0.5, HARD: 0.1}
    known = [PromptHistory(task_id=f"{pool}:{n}", rate=rate) for pool, rate in rates.items() for n in range(5)]
    chance = random.Random(case)
    for step, expected in ((0, (0.7, 0.2, 0.1)), (1, (0.4, 0.25, 0.35)), (2, (0.1, 0.3, 0.6)), (50, (0.1, 0.3, 0.6))):
        pools.look_around(known, step)
        drawn: Counter[str] = Counter()
        for draw in range(900):
            order = chance.sample(known, len(known))
            looks = [Look(seed=case, draw=draw, number=n, history=one) for n, one in enumerate(order)]
            first = next(look for look in looks if pools.wants(look))
            drawn[pools.pool_of(first.history)] += 1
        assert [drawn[pool] / 900 for pool in POOLS] == pytest.approx(expected, abs=0.066)  # four deviations


def test_the_share_of_an_empty_pool_goes_to_the_others_in_their_proportions() -> None:
    pools = Pools(easy_start=0.5, hard_start=0.2, easy_end=0.5, hard_end=0.2)
    known = [PromptHistory(task_id="a", rate=0.5), PromptHistory(task_id="b", rate=0.0)]
    elsewhere = PromptHistory(task_id="c", rate=1.0, source="other")  # no use to a draw of another source
    pools.look_around([*known, elsewhere], 0)
    looks = [Look(seed=0, draw=draw, number=0, history=known[0]) for draw in range(2000)]
    wanted = fmean(pools.wants(look) for look in looks)
    assert wanted == pytest.approx(0.3 / 0.5, abs=0.045)
    assert pools.wants(Look(seed=0, draw=0, number=0, history=elsewhere))


@pytest.mark.parametrize("case", CASES)
def test_pools_report_what_was_drawn_of_each(case: int) -> None:
    steps = play(["pools"], case)
    for _, metrics in steps:
        parts = [metrics[f"data/pool_{pool}"] for pool in (*POOLS, "unseen")]
        assert sum(parts) == pytest.approx(1)
    assert steps[0][1]["data/pool_unseen"] == 1.0
    assert steps[-1][1]["data/pool_unseen"] == 0.0


def test_shares_of_sources_follow_their_signals_above_a_floor() -> None:
    """Worked by hand: floor 0.1, weights 2 and 1 and 1, signals 0.5, 1 and 0."""
    chooser = AdaptiveSources(floor=0.1, newest=1.0)
    chooser.open(StageFacts(sources=("a", "b", "c"), weights=(2.0, 1.0, 1.0), steps=0))
    assert chooser.weights() == pytest.approx([0.1 + 0.7 / 2, 0.1 + 0.7 / 4, 0.1 + 0.7 / 4])
    tasks = {name: make_tasks(name, 1, name).tasks[0] for name in "abc"}
    mixed, same = [1.0, 0.0], [1.0, 1.0]
    said = (mixed, same, mixed, same)
    groups = [make_group(tasks[name], n, r) for n, (name, r) in enumerate(zip("aabc", said, strict=True))]
    chooser.learn(groups, {})
    assert chooser.weights() == pytest.approx([0.1 + 0.7 / 2, 0.1 + 0.7 / 2, 0.1])
    assert chooser.measure()["data/signal/a"] == 0.5
    chooser.learn([make_group(tasks[name], 9, same) for name in "abc"], {})
    assert chooser.weights() == pytest.approx([0.1 + 0.7 / 2, 0.1 + 0.7 / 4, 0.1 + 0.7 / 4]), "nothing to go by"


def test_variance_is_full_in_the_middle_and_nothing_at_the_ends() -> None:
    chooser = AdaptiveSources(signal="variance", newest=1.0)
    chooser.open(StageFacts(sources=("a", "b"), weights=(1.0, 1.0), steps=0))
    tasks = {name: make_tasks(name, 1, name).tasks[0] for name in "ab"}
    chooser.learn([make_group(tasks["a"], 0, [1.0, 0.0]), make_group(tasks["b"], 1, [1.0] * 3 + [0.0])], {})
    assert chooser.measure()["data/signal/a"] == 1.0
    assert chooser.measure()["data/signal/b"] == pytest.approx(0.75)


SOURCES = {"solved": (0.99, 1.0), "hopeless": (0.0, 0.01), "fair": (0.3, 0.7)}
"""The rule for a mixture: between which true pass rates the prompts of a source lie."""


def play_mixture(case: int, choosers: Sequence[Chooser]) -> list[tuple[list[Group], dict[str, float]]]:
    sources = [make_tasks(name, 30, name) for name in SOURCES]
    chance = random.Random(f"case {case}")
    rates = {task.id: chance.uniform(*SOURCES[task.source]) for source in sources for task in source.tasks}
    memory = PromptMemory(choosers, StageFacts(sources=tuple(SOURCES), weights=(1.0,) * 3, steps=30))
    stream: Any = Stream(sources, [1.0] * 3, seed=case)
    chosen = ChosenStream(stream, memory) if choosers else stream
    return list(play_steps(chosen, memory, Class(rates=rates, seed=case), range(1, 31), 10))


def test_a_mixture_moves_to_the_sources_that_teach() -> None:
    """Groups with a signal become 1.7 times as many at least; all of them from the one source would be 3 times."""
    shares = {}
    for is_adaptive in (False, True):
        played = [play_mixture(case, [AdaptiveSources()] if is_adaptive else []) for case in CASES]
        shares[is_adaptive] = signal_share([g for steps in played for groups, _ in steps[15:] for g in groups])
    assert shares[True] >= 1.7 * shares[False]


@pytest.mark.parametrize("case", CASES)
def test_the_floor_of_a_mixture_holds_for_weights_and_for_draws(case: int) -> None:
    floor = random.Random(case).uniform(0.1, 0.25)
    played = play_mixture(case, [AdaptiveSources(floor=floor)])
    weights = [metrics[f"data/weight/{name}"] for _, metrics in played for name in SOURCES]
    assert min(weights) >= floor - 1e-12
    assert min(weights) < 0.3, "or it would be no floor that holds"
    counts = Counter(group.task.source for groups, _ in played for group in groups)
    deviation = (300 * floor * (1 - floor)) ** 0.5
    assert min(counts.values()) >= 300 * floor - 4 * deviation


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("bend", r"'bend' is unknown. Did you mean \"band\"\? Known: no_positive_resampling, band, pools, adaptive"),
        ({"low": 0.1}, "None is unknown"),
        ({"name": "band", "lo": 0.1}, r'band: option "lo" is unknown. Did you mean "low"\? Known: high, low, skip'),
        ({"name": "band", "low": "x"}, "band: option low='x' must be of type float"),
        ({"name": "band", "low": 0.9, "high": 0.1}, "low=0.9 and high=0.1 must be in order"),
        ({"name": "band", "skip": 1.0}, "skip=1 must be at least 0 and below 1: .* use no_positive_resampling"),
        ({"name": "no_positive_resampling", "threshold": 0.0}, "threshold=0 must be above 0"),
        ({"name": "pools", "hard_to": 0.8}, "hard_to=0.8 must be below easy_from=0.75"),
        ({"name": "pools", "easy_end": 0.7, "hard_end": 0.4}, "easy_end=0.7 and hard_end=0.4 are shares"),
        ({"name": "pools", "steps": -1}, "steps=-1 must be 0"),
        ({"name": "adaptive_sources", "signal": "sum"}, 'signal "sum" is unknown.* Known: difference, variance'),
        ({"name": "adaptive_sources", "floor": 0.0}, "floor=0 must be above 0 and below 1"),
        ({"name": "adaptive_sources", "newest": 0.0}, "newest=0 must be above 0"),
    ],
)
def test_what_a_chooser_cannot_do_is_refused_by_name(entry: Any, message: str) -> None:
    with pytest.raises(UserError, match=f"^data.choose: .*{message}"):
        read_choosers([entry])


def test_a_chooser_is_named_once() -> None:
    with pytest.raises(UserError, match="band is named twice"):
        read_choosers(["band", {"name": "band", "low": 0.3}])


def test_choosers_are_found_by_their_names_with_their_defaults() -> None:
    assert [type(chooser) for chooser in read_choosers([*CHOOSERS])] == [
        NoPositiveResampling, Band, Pools, AdaptiveSources,
    ]  # fmt: skip


def test_a_pool_whose_prompts_another_chooser_put_out_counts_as_empty() -> None:
    """Or every draw of its share would search two epochs in vain."""
    pools = Pools(easy_start=0.9, easy_end=0.9, hard_start=0.0, hard_end=0.0)
    facts = StageFacts(sources=("t",), weights=(1.0,), steps=5)
    memory = PromptMemory([NoPositiveResampling(threshold=0.7), pools], facts)
    easy, middle = make_tasks("t", 2).tasks
    memory.learn(1, [make_group(easy, 0, [1.0, 1.0]), make_group(middle, 1, [1.0, 0.0])])
    looks = [Look(seed=0, draw=draw, number=0, history=memory.histories.get(middle.id)) for draw in range(50)]
    assert all(pools.wants(look) for look in looks)


@pytest.mark.parametrize("name", CHOOSERS)
def test_the_page_names_every_option_with_its_default(name: str) -> None:
    page = (Path(__file__).parents[3] / "docs" / "curriculum.md").read_text()
    (row,) = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
    options = inspect.signature(CHOOSERS[name]).parameters.values()
    assert (
        row.rpartition(" | ")[2]
        == ", ".join(f"`{option.name} = {json.dumps(option.default)}`" for option in options) + " |"
    )
