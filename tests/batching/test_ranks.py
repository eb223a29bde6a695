"""One, two and four gloo ranks give one gradient, with uneven and with empty shares, for every policy gradient.

The same for losses: tests/trainer.
All ranks of all worlds come from one start of rank_worker.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from temper.objectives import POLICY_GRADIENTS, measures_batch

WORKER = Path(__file__).with_name("rank_worker.py")
ALONE, AVERAGED, MEASURED_ALONE = "1:10000:sum", "2:40:mean", "2:40:local"
SHARES = {"1:1:sum": [12], "2:40:sum": [2, 3], "2:10000:sum": [1, 0], "4:80:sum": [1, 1, 1, 0]}
"""How many microbatches each rank has, by case."""
Results = dict[str, dict]
"""By preset: gradient, metrics and share of one rank."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> dict[str, list[Results]]:
    """By case, what each rank wrote."""
    folder, cases = tmp_path_factory.mktemp("ranks"), [ALONE, AVERAGED, MEASURED_ALONE, *SHARES]
    command = [sys.executable, str(WORKER), str(folder), *cases]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert finished.returncode == 0, finished.stderr
    written = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    worlds = {case: int(case.split(":")[0]) for case in cases}
    return {case: [written[f"{world}-{rank}"][case] for rank in range(world)] for case, world in worlds.items()}


def same(first: dict, second: dict) -> bool:
    gradient = max(abs(a - b) for a, b in zip(first["gradient"], second["gradient"], strict=True))
    metrics = [abs(first["metrics"][name] - second["metrics"][name]) for name in first["metrics"]]
    return set(first["metrics"]) == set(second["metrics"]) and max(gradient, *metrics) <= 1e-10


def different(results: Results, alone: Results) -> list[str]:
    return [name for name in results if not same(results[name], alone[name])]


@pytest.mark.heavy
def test_every_preset_has_a_gradient(ranks) -> None:
    (alone,) = ranks[ALONE]
    assert set(alone) == set(POLICY_GRADIENTS)
    assert all(max(map(abs, result["gradient"])) > 1e-6 for result in alone.values())


@pytest.mark.parametrize("case", SHARES)
def test_every_number_of_ranks_and_microbatches_gives_one_gradient(ranks, case) -> None:
    for rank, share in zip(ranks[case], SHARES[case], strict=True):
        assert set(rank) == set(POLICY_GRADIENTS)
        assert rank["grpo"]["share"] == share
        assert different(rank, ranks[ALONE][0]) == []


def test_averaging_gradients_over_ranks_would_be_noticed(ranks) -> None:
    results = ranks[AVERAGED][0]
    assert different(results, ranks[ALONE][0]) == list(results)


def test_measuring_on_each_rank_alone_would_be_noticed(ranks) -> None:
    results = ranks[MEASURED_ALONE][0]
    assert set(results) >= {name for name, preset in POLICY_GRADIENTS.items() if measures_batch(preset)}
    assert different(results, ranks[ALONE][0]) == list(results)
