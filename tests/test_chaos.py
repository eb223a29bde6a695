"""Environments that break, hang and lie down, verifiers that die: the run goes on, counts them, and trains on none."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from temper.commands.training.train import RunRecords, run_stages
from temper.config import resolve
from temper.errors import BackendError
from temper.runs.display import Display
from temper.runs.reader import RunReader
from temper.runs.store.run_store import open_run

MODULE = """
import asyncio, os, zlib
from collections import Counter
from temper.protocols import EnvOpening, EnvReply

DONE = Counter()

class Chaotic:
    'Every hundredth episode hangs, two of a hundred break.'
    def __init__(self, often: int = 1):
        self.often = often

    async def start(self, task, seed):
        DONE["episodes"] += 1
        number = DONE["episodes"] % 100
        if number in (11, 57) or (self.often > 1 and number % self.often == 1):
            DONE["exceptions"] += 1
            raise RuntimeError("the tool fell over")
        if number == 33:
            DONE["hangs"] += 1
            await asyncio.sleep(3600)
        return EnvOpening(messages=task.messages)

    async def step(self, message):
        return EnvReply(is_done=True)

    async def close(self):
        DONE["closed"] += 1

def reward(prompt, response, answer):
    if zlib.crc32((prompt + response).encode()) % 40 == 7:
        os._exit(3)
    return float(len(set(response) & set(answer))) / 4
"""


@pytest.fixture
def chaos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "chaotic_world.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("chaotic_world", None)
    import chaotic_world  # type: ignore[import-not-found]

    chaotic_world.DONE.clear()
    return chaotic_world


def run(recipe: dict[str, Any], folder: Path, keys: Mapping[str, Any] = {}, **rollout: Any) -> RunReader:
    table = {key: recipe[key] for key in ("model", "train", "sampling")}
    table |= {"steps": 8, "reward": [{"kind": "chaotic_world:reward"}], "env": {"name": "chaotic_world:Chaotic"}}
    table["env"] = {"name": "chaotic_world:Chaotic", "options": rollout.pop("options", {})}
    table["rollout"] = {"groups_per_step": 4, "group_size": 8, "episode_seconds": 1.0, **rollout}
    table |= keys
    store = open_run(folder, config="", resume=False)
    try:
        asyncio.run(run_stages(resolve(table, (), where="test"), folder, RunRecords(store, Display())))
    finally:
        store.close()
    return RunReader(folder)


@pytest.mark.heavy
def test_a_run_survives_broken_environments_and_verifiers(
    chaos: Any, tiny_recipe: dict[str, Any], tmp_path: Path
) -> None:
    with run(tiny_recipe, tmp_path / "run", error_limit=0.4) as reader:
        found = [t for step in reader.steps() for t in reader.trajectories(0, step.step)]
        assert len(reader.steps()) == 8
    statuses = Counter(t.status for t in found)
    died = [t for t in found if t.status == "completed" and t.score_kind == "error"]
    # The gate before step 1 plays a few episodes of its own, which are in no step.
    assert 0 < statuses["tool_error"] <= chaos.DONE["exceptions"] <= statuses["tool_error"] + 1
    assert 0 < statuses["timeout"] <= chaos.DONE["hangs"] <= statuses["timeout"] + 1
    assert died, "no verifier was killed: the test proves nothing"
    assert all("exit code 3" in str(t.reason) for t in died)
    assert statuses.total() == sum(statuses[s] for s in ("completed", "tool_error", "timeout", "truncated_length"))
    assert chaos.DONE["closed"] == chaos.DONE["episodes"], "every environment is closed"
    failed = [t for t in found if t.score_kind == "error"]
    assert all(t.score is None for t in failed)
    for t in failed:  # nothing of a failure is trained
        assert all(row.advantages is None for row in t.rows)


@pytest.mark.heavy
def test_retries_save_what_can_be_saved(chaos: Any, tiny_recipe: dict[str, Any], tmp_path: Path) -> None:
    with run(tiny_recipe, tmp_path / "run", retries=2, error_limit=0.4) as reader:
        found = [t for step in reader.steps() for t in reader.trajectories(0, step.step)]
    assert chaos.DONE["exceptions"] > 0
    assert not [t for t in found if t.status in ("tool_error", "timeout")]


def test_held_out_episodes_that_fail_now_and_then_are_played_anew_and_no_end(
    chaos: Any, tiny_recipe: dict[str, Any], tmp_path: Path
) -> None:
    options, keys = {"often": 2}, {"steps": 1, **{key: tiny_recipe[key] for key in ("heldout", "reward")}}
    with pytest.raises(BackendError, match=r"held-out task .*the tool fell over.* rollout\.retries=0 is how often"):
        run(tiny_recipe, tmp_path / "once", keys, options=options)
    chaos.DONE.clear()
    with run(tiny_recipe, tmp_path / "anew", keys, options=options, retries=9) as reader:
        shares = [dict(one.details)["unscorable"]["score"] for one in reader.evaluations()]
    assert chaos.DONE["exceptions"] > 4
    assert shares == [0.0] * 4, "greedy and sampled, before and after"


def test_too_many_failures_stop_the_run_and_name_one(chaos: Any, tiny_recipe: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(
        BackendError, match=r"episodes failed, more than rollout\.error_limit=0\.1\. .*the tool fell over"
    ):
        run(tiny_recipe, tmp_path / "run", options={"often": 3})
