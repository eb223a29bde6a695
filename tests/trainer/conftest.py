"""Tiny models and rows that the trainer's tests share."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from temper.types import Sample
from tests.fakes.models import FAMILIES, make_family_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def make_model() -> Callable[..., Any]:
    return make_family_model


@pytest.fixture(scope="session")
def make_rows() -> Callable[..., list[Sample]]:
    def make(num_groups: int = 3, group_size: int = 3, seed: int = 0) -> list[Sample]:
        """Rows of 3 to 17 tokens with observations inside, one trajectory in two rows, weights of a token mean."""
        draw = random.Random(seed)
        rows = []
        for group in range(num_groups):
            for index in range(group_size):
                num_rows = 2 if (group, index) == (1, 1) else 1
                rows += [row(draw, f"g{group}", index) for _ in range(num_rows)]
        total = sum(r.num_actions for r in rows)
        return [with_weight(r, 1 / total) for r in rows]

    return make


def row(draw: random.Random, group_id: str, index: int) -> Sample:
    length = draw.randint(3, 17)
    mask = [0] + [int(draw.random() < 0.7) for _ in range(length - 2)] + [1]
    advantage = draw.uniform(-1, 1)
    return Sample(
        group_id=group_id,
        index=index,
        token_ids=[draw.randrange(40) for _ in range(length)],
        loss_mask=mask,
        behavior_logprobs=[draw.uniform(-5, -2) * m for m in mask],
        versions=[m - 1 for m in mask],
        advantages=[advantage * m for m in mask],
        weights=[0.0] * length,
    )


def with_weight(sample: Sample, weight: float) -> Sample:
    return replace(sample, weights=[weight * m for m in sample.loss_mask])


@pytest.fixture(scope="session")
def run_ranks() -> Callable[..., None]:
    def run(program: Path, folder: Path, ranks: Sequence[tuple[int, int]] = ((0, 2), (1, 2))) -> None:
        """Runs main(rank, world, folder) of the program for all pairs at once; who fails shows its errors."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        starter = Path(__file__).with_name("start_ranks.py")
        places = [f"{rank}of{world}" for rank, world in ranks]
        command = [sys.executable, str(starter), str(program), str(folder), *places]
        process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
        try:
            _, errors = process.communicate(timeout=900)
            assert process.returncode == 0, errors
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    return run
