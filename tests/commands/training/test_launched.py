"""Ranks that a launcher started: how a run ends when somebody ends it, or one of its ranks, and what it says then."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from temper.runs.reader import RunReader
from tests.commands.training.test_ranks import ROOT, end_of, is_alive, make_table, ranks_of, start, wait_for

pytestmark = pytest.mark.heavy


def torchrun(num: int) -> tuple[str, ...]:
    return ("-m", "torch.distributed.run", f"--nproc_per_node={num}", "-m", "--", "temper")


def launch(table: dict[str, Any], folder: Path, num: int, planted: str = "") -> tuple[subprocess.Popen[str], list[int]]:
    """A run under torchrun that has written a checkpoint, and its ranks. planted: run first by each of them."""
    (folder.parent / "sitecustomize.py").write_text(planted)
    process = start(table, folder, torchrun(num), PYTHONPATH=f"{folder.parent}{os.pathsep}{ROOT}")
    wait_for(lambda: (folder / "checkpoints/0-sft/step-3").is_dir(), "a checkpoint")
    ranks = sorted(ranks_of(process, b"temper"), key=rank_of)
    assert len(ranks) == num
    return process, ranks


def rank_of(pid: int) -> int:
    found = re.search(rb"\0RANK=(\d+)\0", b"\0" + Path(f"/proc/{pid}/environ").read_bytes())
    assert found is not None
    return int(found[1])


def end_in(folder: Path) -> tuple[str, str]:
    """How the store says that the run ended, and everything that it was told."""
    with RunReader(folder) as reader:
        return f"{reader.state.name}: {reader.state.text}", "\n".join(event.text for event in reader.events())


FAILS = """
import os, time
if os.environ.get("RANK") in ("0", "1"):
    import temper.trainer.policy_step as step
    whole, done = step.PolicyStep.gradient, []
    def gradient(*values, **named):
        done.append(1)
        if len(done) > 12:
            if os.environ["RANK"] == "1":
                raise ValueError("planted in rank 1")
            time.sleep(12)
        return whole(*values, **named)
    step.PolicyStep.gradient = gradient
"""


def test_a_rank_that_fails_while_rank_0_computes_is_told_with_its_traceback(
    tiny_recipe: dict[str, Any], tmp_path: Path
) -> None:
    """torchrun stops rank 0, which then finds nobody else there."""
    process, ranks = launch(make_table(tiny_recipe, steps=(200, 3)), tmp_path / "run", 2, FAILS)
    code, said = end_of(process)
    assert code != 0
    end, _ = end_in(tmp_path / "run")
    assert re.search(r"(?s)^failed: trainer rank 1 of 2 failed in .*planted in rank 1", end), said
    wait_for(lambda: not any(map(is_alive, ranks)), "the end of all ranks")


def test_the_rank_that_was_killed_is_named_of_several(tiny_recipe: dict[str, Any], tmp_path: Path) -> None:
    """torchrun stops all others at once, and those whose exchange with it broke have something to say, too."""
    process, ranks = launch(make_table(tiny_recipe, steps=(200, 3)), tmp_path / "run", 3)
    os.kill(ranks[2], signal.SIGKILL)
    code, said = end_of(process)
    assert code != 0
    end, _ = end_in(tmp_path / "run")
    assert re.search(r"^failed: trainer rank 2 of 3 was lost in .* of it ", end), f"{end}\n{said}"
    wait_for(lambda: not any(map(is_alive, ranks)), "the end of all ranks")


def test_a_launcher_that_is_told_to_end_stops_the_run_and_nobody_was_lost(
    tiny_recipe: dict[str, Any], tmp_path: Path
) -> None:
    process, ranks = launch(make_table(tiny_recipe, steps=(200, 3)), tmp_path / "run", 3)
    process.terminate()
    _, said = end_of(process)
    end, events = end_in(tmp_path / "run")
    assert end == "stopped: stopped by SIGTERM", f"{end}\n{said}"
    assert "was lost" not in events
    assert "Go on with" in said
    wait_for(lambda: not any(map(is_alive, ranks)), "the end of all ranks")


def test_a_launcher_that_is_killed_takes_the_store_along_and_the_run_says_so(
    tiny_recipe: dict[str, Any], tmp_path: Path
) -> None:
    process, ranks = launch(make_table(tiny_recipe, steps=(200, 3)), tmp_path / "run", 2)
    process.kill()
    said, _ = process.communicate(timeout=120)  # until the last rank has let go of it
    assert "the store in which trainer ranks meet is gone" in re.sub(r"\s+", " ", said)
    assert "Traceback" not in said, said
    wait_for(lambda: not any(map(is_alive, ranks)), "the end of all ranks")


SLOW_AT_THE_END = """
import os, time
if os.environ.get("SLURM_PROCID") == "1":
    from temper.trainer.ranks import channel, ranked
    hear = channel.Channel.hear
    def slow(self):
        verb, payload = hear(self)
        if verb == ranked.END:
            time.sleep(4)
        return verb, payload
    channel.Channel.hear = slow
"""


KEYS = ("a secret of this job " * 8,) * 2


def srun(
    table: dict[str, Any], folder: Path, planted: str = "", keys: tuple[str, str] = KEYS
) -> list[subprocess.Popen[str]]:
    """Two tasks of a job step, of which the first keeps the store in which they meet."""
    (folder.parent / "sitecustomize.py").write_text(planted)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "SLURM_NTASKS": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "PYTHONPATH": f"{folder.parent}{os.pathsep}{ROOT}",
    }  # fmt: skip
    tasks = [
        {"SLURM_PROCID": f"{rank}", "SLURM_LOCALID": f"{rank}", "TEMPER_RANK_KEY": keys[rank]} for rank in range(2)
    ]
    return [start(table, folder, **shared, **task) for task in tasks]  # type: ignore[arg-type]


def test_rank_0_of_a_job_step_waits_until_all_have_heard_that_the_run_is_over(
    tiny_recipe: dict[str, Any], tmp_path: Path
) -> None:
    ends = [end_of(task) for task in srun(make_table(tiny_recipe), tmp_path / "run", SLOW_AT_THE_END)]
    assert [code for code, _ in ends] == [0, 0], ends
    assert not [said for _, said in ends if "Traceback" in said]


def test_a_job_step_that_is_cancelled_ends_in_order(tiny_recipe: dict[str, Any], tmp_path: Path) -> None:
    tasks = srun(make_table(tiny_recipe, steps=(200, 3)), tmp_path / "run")
    wait_for(lambda: (tmp_path / "run/checkpoints/0-sft/step-3").is_dir(), "a checkpoint")
    for task in reversed(tasks):  # scancel tells all of them
        task.terminate()
    ends = [end_of(task) for task in tasks]
    assert [code for code, _ in ends] == [143, 0], ends
    assert end_in(tmp_path / "run")[0] == "stopped: stopped by SIGTERM"


def test_tasks_with_other_keys_end_at_once_and_say_so(tiny_recipe: dict[str, Any], tmp_path: Path) -> None:
    ends = [end_of(task) for task in srun(make_table(tiny_recipe), tmp_path / "run", keys=("one", "another"))]
    assert [code for code, _ in ends] == [3, 3], ends
    for _, said in ends:
        assert "TEMPER_RANK_KEY must be the same for all" in re.sub(r"\s+", " ", said)
        assert "Traceback" not in said
