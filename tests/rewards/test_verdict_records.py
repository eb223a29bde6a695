"""A run that is judged keeps every verdict in run.db, nothing in memory, and the same ones after a resume."""

from __future__ import annotations

import asyncio
import copy
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from temper.commands.training.train import RunRecords, run_stages
from temper.config import RunConfig, resolve
from temper.runs.display import Display
from temper.runs.reader import RunReader
from temper.runs.records import VerdictRecord
from temper.runs.store.run_store import open_run

STEPS = 4


@pytest.fixture
def stages(tiny_recipe: dict[str, Any], server: Any) -> list[RunConfig]:
    server.answer = lambda texts: {"score": len(texts["response"]) % 5}
    table = {key: copy.deepcopy(tiny_recipe[key]) for key in ("model", "train", "sampling", "heldout", "checkpoint")}
    table |= {"steps": STEPS, "reward": [{"kind": "judge", "options": server.options()}]}
    table |= {"rollout": {"groups_per_step": 2, "group_size": 4}, "evaluation": {"every": 2}}
    table["evaluation"]["reward"] = [{"kind": "judge", "options": server.options(instructions="Is it short?")}]
    return resolve(table, (), where="test")


def train(stages: Sequence[RunConfig], folder: Path, *, resume: bool = False) -> None:
    store = open_run(folder, config="", resume=resume)
    try:
        asyncio.run(run_stages(stages, folder, RunRecords(store, Display())))
    finally:
        store.close()


def verdicts_of(folder: Path) -> list[VerdictRecord]:
    with RunReader(folder) as reader:
        return [verdict for step in range(STEPS + 1) for verdict in reader.verdicts(0, step)]


def test_every_verdict_is_kept_once_with_its_rollout_and_a_resume_changes_none(
    stages: list[RunConfig], tmp_path: Path
) -> None:
    train(stages, tmp_path / "whole")
    found = verdicts_of(tmp_path / "whole")
    with RunReader(tmp_path / "whole") as reader:
        rollouts = [t for step in range(1, STEPS + 1) for t in reader.trajectories(0, step)]
        whole = reader.fingerprint()
    judged = Counter((v.step, v.group_id, v.member, v.value) for v in found if "#" in v.group_id)
    assert judged == Counter((t.step, t.group_id, t.index, t.score) for t in rollouts)
    assert {v.part for v in found} == {"judge", "heldout/judge"}
    heldout = Counter(v.step for v in found if v.part == "heldout/judge")
    # Eight tasks, greedy and sampled; at the first evaluation also the commonest answer to each of them.
    assert heldout == {0: 3 * 8, 2: 2 * 8, 4: 2 * 8}
    assert len({(v.part, v.fingerprint) for v in found}) == 2, "each part has its question"

    resumed = tmp_path / "resumed"
    shutil.copytree(tmp_path / "whole", resumed)
    (checkpoint,) = resumed.glob(f"checkpoints/*/step-{STEPS}")
    shutil.rmtree(checkpoint)  # as if it had been killed before
    train(stages, resumed, resume=True)
    with RunReader(resumed) as reader:
        assert reader.fingerprint() == whole
    again = verdicts_of(resumed)
    assert [v for v in again if "#" in v.group_id] == [v for v in found if "#" in v.group_id]
    # A process measures its reward anew: at the gate, and on the commonest answer before its first evaluation.
    assert Counter(v.step for v in again if v.part == "heldout/judge") == heldout + Counter({4: 8})
