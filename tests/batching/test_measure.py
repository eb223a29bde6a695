"""Metrics of a batch."""

from __future__ import annotations

import dataclasses
import json
import random

import numpy as np
import pytest
import torch

from temper.batching.measure import RecentPrompts, count_grams, measure_advantages, measure_groups
from temper.types import Event, EventKind, Finish, Status


def test_shares_are_over_generated_groups_trained_and_dropped(group) -> None:
    trained = [group([(1.0, 2), (0.0, 4)])]
    dropped = [
        (group([(1.0, 1), (1.0, 1)], draw=1), "degenerate"),
        (group([(0.0, 1), (0.0, 1)], draw=2), "degenerate"),
        (group([(0.5, 1), (0.5, 1)], draw=3), "degenerate"),
    ]
    metrics = measure_groups(trained, dropped, version=0)
    assert metrics["data/degenerate"] == 0.75
    assert metrics["data/all_pass"] == 0.25
    assert metrics["data/all_fail"] == 0.25
    assert metrics["data/effective_groups"] == 1
    assert metrics["data/gen_factor"] == 4
    assert metrics["reward/mean"] == 0.5


def test_equal_rewards_are_counted_as_degenerate_despite_float_noise(group) -> None:
    noisy = torch.tensor([0.1] * 7, dtype=torch.float32).tolist()
    noisy[0] += 1e-9
    assert measure_groups([group([(r, 1) for r in noisy])], [], version=0)["data/degenerate"] == 1.0


def test_rewards_and_lengths(group) -> None:
    statuses = [Status.COMPLETED, Status.TRUNCATED_LENGTH, Status.COMPLETED, Status.TIMEOUT]
    metrics = measure_groups([group([(1.0, 3), (0.0, 2), (None, 1), (0.0, 2)], statuses=statuses)], [], version=0)
    assert metrics["reward/mean"] == 0.5
    assert metrics["reward/std"] == 0.5
    assert metrics["gen/len_mean"] == 2
    assert metrics["gen/len_max"] == 3
    assert metrics["gen/truncation_rate"] == 0.25
    assert metrics["data/unscorable"] == 1
    assert metrics["data/env_error"] == 1


def test_staleness_is_that_of_the_oldest_token(group, turn) -> None:
    mixed = [turn([1], [2], version=3), turn([1, 2], [3], version=5)]
    fresh = [turn([1], [2, 3], version=6)]
    metrics = measure_groups([group([(1.0, mixed), (0.0, fresh)])], [], version=6)
    assert metrics["stale/max"] == 3
    assert metrics["stale/mean"] == 1.5
    assert metrics["stale/mixed_version_frac"] == 0.5


def test_advantages_are_measured_over_trajectories() -> None:
    advantages_N = torch.tensor([1.5] * 3 + [-0.5] * 3 + [0.0] * 2, dtype=torch.float64)
    metrics = measure_advantages(advantages_N, torch.tensor([3, 2, 1, 2]))
    assert metrics["adv/abs_mean"] == pytest.approx(0.625)
    assert metrics["adv/mean"] == pytest.approx(0.125)
    assert metrics["adv/frac_zero"] == 0.25
    assert (metrics["adv/min"], metrics["adv/max"]) == pytest.approx((-0.5, 1.5))


def test_nothing_generated_measures_nothing_but_counts() -> None:
    assert measure_groups([], [], version=0) == dict.fromkeys(
        ("data/unscorable", "data/env_error", "gen/env_reset_fail", "sys/replayed"), 0.0
    )
    assert measure_advantages(torch.tensor([]), torch.tensor([], dtype=torch.int64)) == {}


def test_lengths_by_verdict_and_their_percentile(group) -> None:
    members = [(1.0, 10), (0.0, 2), (0.5, 4), (None, 50), (1.0, 20)]
    metrics = measure_groups([group(members)], [], version=0)
    assert metrics["gen/len_correct"] == 15
    assert metrics["gen/len_wrong"] == 3
    assert metrics["gen/len_p95"] == 50
    twenty = [(1.0, length) for length in range(1, 21)]
    random.Random(0).shuffle(twenty)
    assert measure_groups([group(twenty)], [], version=0)["gen/len_p95"] == 19
    assert "gen/len_wrong" not in measure_groups([group(twenty)], [], version=0)


def test_repeated_grams_are_counted_inside_a_turn_and_never_across_two(group, turn) -> None:
    looping = [turn([1], [5, 6, 5, 6, 5, 6, 5])]  # 5656 6565 5656 6565: two of four are new
    across = [turn([1], [1, 2, 3, 4]), turn([1], [1, 2, 3, 4])]  # the second turn repeats the first
    short = [turn([1], [1, 2, 3])]
    rate = {name: measure_groups([group([(1.0, what)])], [], version=0).get("gen/repetition_rate")
            for name, what in (("looping", looping), ("across", across), ("short", short))}  # fmt: skip
    assert rate == {"looping": 0.5, "across": 0.5, "short": None}
    both = measure_groups([group([(1.0, looping), (0.0, short), (0.0, [turn([1], range(8))])])], [], version=0)
    assert both["gen/repetition_rate"] == 0.25


def test_ends_formats_and_failed_resets(group, turn) -> None:
    cut = dataclasses.replace(turn([1], [2]).completion, finish=Finish.LENGTH)
    members = [(1.0, 2), (0.0, [dataclasses.replace(turn([1], [2]), completion=cut)]), (0.0, 2), (None, []), (None, 1)]
    statuses = [Status.COMPLETED, Status.TRUNCATED_LENGTH, Status.BAD_FORMAT, Status.TOOL_ERROR, Status.TIMEOUT]
    metrics = measure_groups([group(members, statuses=statuses)], [], version=0)
    assert metrics["gen/eos_rate"] == 0.75
    assert metrics["gen/format_valid_rate"] == 0.75
    assert metrics["gen/env_reset_fail"] == 1
    assert metrics["gen/interrupt_rate"] == 0
    paused = dataclasses.replace(turn([1], [2]).completion, finish=Finish.INTERRUPT)
    turns = [dataclasses.replace(turn([1], [2]), completion=paused), turn([1, 2], [3])]
    assert measure_groups([group([(1.0, turns), (0.0, 1)])], [], version=0)["gen/interrupt_rate"] == 0.5
    assert metrics["data/env_error"] == 2


def test_plays_that_were_lost_are_counted_and_what_they_cost_is_a_part_of_what_a_success_costs(group, turn) -> None:
    lost = Event(kind=EventKind.REPLAYED, name="environment", cost=2.0)
    called = dataclasses.replace(turn([1], [2]), events=(Event(kind=EventKind.TOOL_CALL, name="buy", cost=4.0),))
    one = group([(1.0, [called]), (0.0, 1), (None, [])], statuses=[*[Status.COMPLETED] * 2, Status.TOOL_ERROR])
    solved, *others, failed = one.trajectories
    solved = dataclasses.replace(solved, unplaced_events=(lost, lost))
    failed = dataclasses.replace(failed, unplaced_events=(lost,))
    metrics = measure_groups([dataclasses.replace(one, trajectories=(solved, *others, failed))], [], version=0)
    assert metrics["sys/replayed"] == 3, "those of episodes that drew nothing, too"
    assert metrics["gen/cost_per_success"] == 8.0
    assert metrics["gen/tool_calls_mean"] == 0.5


def test_pass_rates_fall_into_ten_bins_exactly(group) -> None:
    groups = [group([(float(i < solved), 1) for i in range(10)], draw=solved) for solved in range(11)]
    metrics = measure_groups(groups[:6], [(g, "degenerate") for g in groups[6:]], version=0)
    shares = [metrics[f"data/p_hist/{place:02d}"] for place in range(10)]
    assert shares == [1 / 11] * 9 + [2 / 11]  # nine and ten of ten share the last
    assert metrics["data/p_hist/03"] == 1 / 11  # 10 * 0.3 is 3.0000000000000004 or less, by how it was computed


def test_equal_responses_count_only_inside_their_group(group, turn) -> None:
    one = group([(1.0, [turn([1], [7, 8])]), (1.0, [turn([1], [7, 8])]), (0.0, [turn([1], [7])])])
    other = group([(0.0, [turn([1], [7])]), (0.0, [turn([1], [9])])], draw=1)
    assert measure_groups([one], [(other, "degenerate")], version=0)["data/dup_response_rate"] == 2 / 5


def test_ages_of_tokens_and_where_they_were_spent(group, turn) -> None:
    mixed = [turn([1], [2], version=3), turn([1, 2], [3, 4, 5], version=5)]
    fresh, old = [turn([1], [2, 3], version=16)], [turn([1], [2], version=0)]
    metrics = measure_groups([group([(1.0, mixed), (0.0, fresh), (0.0, old)])], [], version=16)
    assert metrics["stale/p95"] == 16
    assert metrics["stale/in_flight"] == pytest.approx(2 / 3)
    assert metrics["stale/in_queue"] == pytest.approx((11 + 0 + 16) / 3)
    assert metrics["stale/mean"] == pytest.approx(metrics["stale/in_flight"] + metrics["stale/in_queue"])
    shares = {place: metrics[f"stale/token_hist/{place:02d}"] for place in range(10)}
    assert shares == pytest.approx({**dict.fromkeys(range(10), 0.0), 0: 2 / 7, 9: 5 / 7})


def test_no_order_of_groups_and_members_changes_a_number(group, turn) -> None:
    draw = random.Random(3)
    groups = [
        group([(draw.choice([0.0, 0.4, 1.0]), [turn([1], draw.choices(range(2), k=draw.randint(1, 12)), version=v)])
               for v in draw.choices(range(6), k=5)], draw=n)
        for n in range(6)
    ]  # fmt: skip
    plain = measure_groups(groups, [], version=6)
    for _ in range(3):
        draw.shuffle(groups)
        shuffled = [dataclasses.replace(g, trajectories=tuple(draw.sample(g.trajectories, 5))) for g in groups]
        assert measure_groups(shuffled, [], version=6) == pytest.approx(plain, abs=1e-12)
    # The planted fault: numbers of parts, averaged.
    parts = [measure_groups(part, [], version=6) for part in (groups[:1], groups[1:])]
    for name in ("gen/len_mean", "gen/repetition_rate", "stale/mean", "data/group_std_mean"):
        assert sum(part[name] for part in parts) / 2 != pytest.approx(plain[name]), name


def test_advantages_are_also_measured_over_tokens() -> None:
    advantages_N = torch.tensor([1.5] * 3 + [-0.5] * 3 + [0.0] * 2, dtype=torch.float64)
    metrics = measure_advantages(advantages_N, torch.tensor([3, 2, 1, 2]))
    assert metrics["adv/token_mean"] == pytest.approx(3 / 8)
    assert metrics["adv/token_frac_zero"] == 0.25
    assert metrics["adv/token_abs_mean"] == pytest.approx(6 / 8)
    assert metrics["adv/token_std"] == pytest.approx(advantages_N.std(unbiased=False).item())


def test_prompts_are_remembered_for_eight_steps_and_over_a_resume(group) -> None:
    recent, rates = RecentPrompts(), []
    for step in range(12):
        if step == 5:
            resumed = RecentPrompts()
            resumed.load_state(json.loads(json.dumps(recent.state())))
            recent = resumed
        names = ["first", "new"] if step in (0, 8, 11) else [f"{step}", f"{step}b"]
        groups = [group([(1.0, 1)], task=name, draw=place) for place, name in enumerate(names)]
        rates.append(recent.measure(groups)["data/prompt_repeat_rate"])
    assert rates == [0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1]  # step 0 is still seen by step 8, eight steps later
    late = RecentPrompts()
    seen = [late.measure([group([(1.0, 1)], task="a" if step in (0, 9) else str(step))]) for step in range(10)]
    assert seen[-1] == {"data/prompt_repeat_rate": 0.0}
    assert late.measure([]) == {}


@pytest.mark.parametrize("vocabulary", [3, 40, 150_000])
@pytest.mark.parametrize("sizes", [[0], [3], [4], [500], [1, 4, 0, 90, 5], [70_000]])
def test_grams_are_counted_as_a_set_of_tuples_would(vocabulary: int, sizes: list[int]) -> None:
    draw = np.random.default_rng(sum(sizes) + vocabulary)
    pieces = [draw.integers(0, vocabulary, size, dtype=np.int32) for size in sizes]
    grams = [tuple(piece[place : place + 4].tolist()) for piece in pieces for place in range(len(piece) - 3)]
    assert count_grams(pieces) == (len(grams), len(set(grams)))


def test_sources_that_are_told_apart_have_metrics_of_their_own(group) -> None:
    statuses = [Status.COMPLETED, Status.TRUNCATED_LENGTH]
    math, code = group([(1.0, 2), (0.0, 4)], statuses=statuses), group([(0.5, 6), (0.5, 6)], draw=1)
    plain = measure_groups([math], [(code, "degenerate")], version=0)
    assert not [name for name in plain if name.startswith("source/")]
    named = [
        dataclasses.replace(one, task=dataclasses.replace(one.task, source=name))
        for one, name in ((math, "math"), (code, "code"))
    ]
    metrics = measure_groups(named[:1], [(named[1], "degenerate")], version=0)
    assert {name: value for name, value in metrics.items() if name.startswith("source/")} == {
        "source/math/groups": 1, "source/math/degenerate": 0, "source/math/reward": 0.5, "source/math/length": 3,
        "source/math/truncated": 0.5, "source/code/groups": 1, "source/code/degenerate": 1, "source/code/reward": 0.5,
        "source/code/length": 6, "source/code/truncated": 0,
    }  # fmt: skip
    assert {name: value for name, value in metrics.items() if not name.startswith("source/")} == plain
