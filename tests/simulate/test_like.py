"""Speeds and lengths of a finished run: what was put into its records is found in them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from temper.errors import UserError
from temper.runs.reader import Point
from temper.simulate.like import RunSettings, fit_non_negative, read_run

STEP, ROW, CACHED, BEGIN = 0.02, 0.0005, 0.00001, 0.3
"""Seconds of a decode step, of each sequence in it, of each token these have in the cache, and before the first."""
PROMPT = 10


class Records:
    """A run whose answers took as long as a decode step of these seconds says."""

    folder = Path("runs/made-up")

    def __init__(self, *, steps: int = 8, dropped: int = 0, paces: Sequence[float] = (1.0,)) -> None:
        """paces: how slow each step was as a whole, in turn."""
        lot = random.Random(0)
        self.seconds, self.groups, self.trajectories = [], [], []
        self.points: dict[str, list[Point]] = {"sys/rollout_tokens": [], "sys/train_tokens": []}
        for step in range(1, steps + 1):
            drawn = [[lot.randint(5, 60) for _ in range(4)] for _ in range(6)]
            flat = [length for group in drawn for length in group]
            running = [sum(length >= k for length in flat) for k in range(1, 61)]
            taken = [STEP + (ROW + CACHED * (PROMPT + k)) * n for k, n in enumerate(running, start=1)]
            ends = [BEGIN + sum(taken[:own]) for own in flat]
            trained = [length for group in drawn[dropped:] for length in group]
            tokens = sum(trained) + PROMPT * len(trained)
            slow = 10.0 if step == 1 else paces[step % len(paces)]
            ends = [slow * end for end in ends]
            phases = {
                "rollout": max(ends) / slow + 0.24, "credit": 0.001 * sum(flat), "forward_backward": 0.0005 * tokens,
                "optimizer": 0.5, "train_other": 0.1, "publish": 0.2, "record": 0.05, "canary": 0.07,
                "evaluate": 99.0, "checkpoint": 50.0,
            }  # fmt: skip
            for name, seconds in phases.items():
                self.seconds.append({"step": step, "name": name, "seconds": seconds * slow})
            for number, group in enumerate(drawn):
                outcome = "dropped:degenerate" if number < dropped else "trained"
                self.groups.append({"step": step, "group_id": f"g{number}", "draw": number, "outcome": outcome})
                self.trajectories += [
                    {"step": step, "group_id": f"g{number}", "num_tokens": tokens, "seconds": ends[4 * number + member]}
                    for member, tokens in enumerate(group)
                ]
            self.points["sys/rollout_tokens"].append(Point(stage=1, step=step, value=float(sum(flat))))
            self.points["sys/train_tokens"].append(
                Point(stage=1, step=step, value=sum(trained) + PROMPT * len(trained))
            )
            self.last = drawn

    def query(self, statement: str, *_: object) -> list[dict[str, Any]]:
        tables = {"FROM seconds": self.seconds, "FROM groups": self.groups, "FROM trajectories": self.trajectories}
        return next(rows for name, rows in tables.items() if name in statement)

    def metric(self, name: str) -> list[Point]:
        return self.points.get(name, [])


def settings(**changes: Any) -> RunSettings:
    plain = {"stage": 1, "groups_per_step": 6, "max_staleness": 0, "max_running": 64, "updates": 2}
    return RunSettings(**{**plain, **changes})


def test_a_synchronous_run_tells_what_a_decode_step_takes_by_how_many_are_in_it() -> None:
    records = Records(dropped=1)
    found = read_run(records, settings())  # type: ignore[arg-type]
    speeds = found.speeds
    assert speeds.decode_step == pytest.approx(STEP)
    assert speeds.decode_row == pytest.approx(ROW)
    assert speeds.decode_kv == pytest.approx(CACHED)
    assert speeds.request == pytest.approx((BEGIN + 0.24) / 24), "by answer"
    assert speeds.credit_token == pytest.approx(0.001)
    assert speeds.train_token == pytest.approx(0.0005)
    assert speeds.train_step == pytest.approx(0.6 / 2), "by update"
    assert speeds.publish == pytest.approx(0.25)
    assert speeds.after_step == pytest.approx(0.07)
    assert found.degenerate == pytest.approx(1 / 6)
    assert tuple(records.last[-1]) in found.groups
    assert 3.0 < found.seconds_per_step < 8.0, "evaluations, checkpoints and the first step are left out"


def test_steps_that_were_slow_as_a_whole_do_not_bend_the_curve() -> None:
    speeds = read_run(Records(steps=12, paces=(1.0, 1.0, 1.0, 2.5)), settings()).speeds  # type: ignore[arg-type]
    assert speeds.decode_step == pytest.approx(STEP, rel=0.02)
    assert speeds.decode_row == pytest.approx(ROW, rel=0.02)


def test_a_run_that_ran_ahead_tells_the_mean_of_a_decode_step() -> None:
    records = Records()
    running = {step: 20.0 + step for step in range(1, 9)}
    records.points["sys/occupancy"] = [Point(stage=1, step=s, value=n / 64) for s, n in running.items()]
    rates = {step: n / (STEP + ROW * n) for step, n in running.items()}
    records.points["sys/decode_tok_s"] = [Point(stage=1, step=s, value=rate) for s, rate in rates.items()]
    speeds = read_run(records, settings(max_staleness=2)).speeds  # type: ignore[arg-type]
    assert (speeds.decode_step, speeds.decode_row) == (pytest.approx(STEP), pytest.approx(ROW))


def test_a_synchronous_run_that_replaces_groups_tells_means_as_well() -> None:
    """Replacements are drawn in rounds of their own: waiting for them is not a part of the first one."""
    records = Records(dropped=1)
    for name, values in {"sys/occupancy": [0.25, 0.5, 0.125], "sys/decode_tok_s": [400.0, 500.0, 300.0]}.items():
        records.points[name] = [Point(stage=1, step=step, value=v) for step, v in enumerate(values, start=1)]
    found = read_run(records, settings(groups_per_step=5)).speeds  # type: ignore[arg-type]
    assert found.decode_step + 32 * found.decode_row == pytest.approx(32 / 500)
    assert found.decode_step + 8 * found.decode_row == pytest.approx(8 / 300)
    assert found.request == 0


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(UserError, match="Let it run longer"):
        read_run(Records(steps=3), settings())  # type: ignore[arg-type]
    with pytest.raises(UserError, match="Use a synchronous run"):
        read_run(Records(), settings(max_staleness=2))  # type: ignore[arg-type]


def test_no_fitted_speed_is_negative() -> None:
    columns = np.asarray([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert fit_non_negative(columns, np.asarray([3.0, 2.0, 1.0])) == pytest.approx([2.0, 0.0])
    assert fit_non_negative(columns, np.asarray([-1.0, -1.0, -1.0])) == [0.0, 0.0]
