"""One and two gloo ranks give one gradient, with uneven and with empty shares, for every preset."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("rank_worker.py")


def run(folder: Path, world: int, budget: int, reduction: str = "sum") -> list[dict]:
    """What each rank printed."""
    store = folder / f"store-{world}-{budget}-{reduction}"
    processes = [
        subprocess.Popen(
            [sys.executable, WORKER, str(rank), str(world), str(store), str(budget), reduction],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        outputs = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes), outputs
    return [json.loads(output) for output, _ in outputs]


def same(first: dict, second: dict) -> bool:
    gradient = max(abs(a - b) for a, b in zip(first["gradient"], second["gradient"], strict=True))
    metrics = [abs(first["metrics"][name] - second["metrics"][name]) for name in first["metrics"]]
    return set(first["metrics"]) == set(second["metrics"]) and max(gradient, *metrics) <= 1e-10


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict:
    return run(tmp_path_factory.mktemp("alone"), world=1, budget=10_000)[0]


@pytest.mark.parametrize(("budget", "shares"), [(40, "uneven"), (10_000, "empty")])
def test_two_ranks_equal_one(tmp_path, alone, budget, shares) -> None:
    ranks = run(tmp_path, world=2, budget=budget)
    counts = [rank["grpo"]["share"] for rank in ranks]
    assert counts == [1, 0] if shares == "empty" else min(counts) > 1
    for rank in ranks:
        assert all(same(rank[name], alone[name]) for name in alone)


def test_many_microbatches_on_one_rank_equal_one(tmp_path, alone) -> None:
    (other,) = run(tmp_path, world=1, budget=1)
    assert other["grpo"]["share"] == 12
    assert all(same(other[name], alone[name]) for name in alone)


def test_averaging_gradients_over_ranks_would_be_noticed(tmp_path, alone) -> None:
    ranks = run(tmp_path, world=2, budget=40, reduction="mean")
    assert not any(same(ranks[0][name], alone[name]) for name in alone)
