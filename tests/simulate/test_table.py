"""Simulated runs in words, in a picture, and for machines."""

from __future__ import annotations

import json

from temper.simulate.outcome import SimulatedRun
from temper.simulate.speeds import Speeds
from temper.simulate.table import as_json, describe_speeds, draw_runs, render_runs
from temper.terminal import SafeConsole

SPEEDS = Speeds(decode_step=0.02, decode_row=3e-5, train_token=2e-9)


def run(staleness: int, gpus: int, seconds: float) -> SimulatedRun:
    return SimulatedRun(
        max_staleness=staleness, gpus=gpus, samplers=max(1, gpus - 1), trainers=1, is_shared=gpus == 1, parts=gpus == 8,
        seconds_per_step=seconds, tokens_per_second=1234.0, sampler_idle=0.25, trainer_idle=0.5,
        stale_mean=float(staleness), stale_max=staleness, groups_dropped=0.0,
        drawn_per_trained=1.25, length_ratio=0.9, shortest_step=0.5, longest_step=2.0,
    )  # fmt: skip


RUNS = [run(0, 1, 8.0), run(2, 1, 4.0), run(0, 8, 2.0), run(2, 8, 0.5)]


def test_the_table_compares_with_the_synchronous_run_on_as_many_gpus() -> None:
    console = SafeConsole(width=80)
    with console.capture() as shown:
        console.print(render_runs(RUNS, "a stage"))
    lines = shown.get().splitlines()
    rows = [line.replace("│", " ").split() for line in lines if line.startswith("│")]
    assert [row[-1] for row in rows] == ["1.00x", "2.00x", "1.00x", "4.00x"]
    assert rows[3][:6] == ["2", "8", "7+1", "p", "0.5", "1,234"], "p: each trainer holds a part"
    assert rows[3][-3:-1] == ["1.25", "0.90"]
    assert all(len(line) <= 80 for line in lines)
    assert "…" not in shown.get()


def test_the_picture_has_a_line_for_every_bound_by_gpus_or_one_by_bounds() -> None:
    by_gpus, by_bounds = draw_runs(RUNS), draw_runs(RUNS[:2])
    assert "async, S = 2" in by_gpus
    assert ">GPUs<" in by_gpus
    assert ">S<" in by_bounds
    for picture in (by_gpus, by_bounds):
        assert picture.startswith("<svg")
        assert all(name in picture for name in ("seconds a step", "sampler idle", "trainer idle", "staleness"))


def test_machines_read_the_same_numbers() -> None:
    first = json.loads(as_json(RUNS, [SPEEDS] * 4))[0]
    assert (first["seconds_per_step"], first["gpus"], first["speeds"]["decode_step"]) == (8.0, 1, 0.02)


def test_speeds_are_told_in_units_that_read_well() -> None:
    assert describe_speeds(SPEEDS) == "decode_step 20 ms, decode_row 30 us, train_token 2 ns"
