"""Faults thrown at one run until it ends: who is hit, in which phase, what becomes of it, and whether anything is lost.

    python benchmarks/chaos.py                 # 40 faults, a quarter of an hour on two cores
    python benchmarks/chaos.py --faults 6 --seed 3
A tiny recipe with two trainers, two samplers, a reward and environments in worker processes, synchronous and exact,
with a checkpoint after every step. Its processes are killed and stopped again and again. It must end with every step
recorded once, what was recorded before a fault still there after it, every answer judged, no process left behind, and
the weights of the same run left alone, to the bit. Exit code 1 when something of this does not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from temper.errors import UserError
from temper.runs.reader import RunReader

RECIPE = """
name = "chaos"
reward = [{ kind = "judged.py:overlap" }]
train = [{ generator = "spell_backward", seed = 1, options = { min_letters = 1, max_letters = 3 } }]
env = { name = "world.py:Asking", place = "process", workers = 2, call_seconds = 8 }
sampling = { max_new_tokens = 4 }
alarms = { readiness = "off" }
checkpoint = { every = 1, keep = 2 }
engine = { place = "process", numerics = "exact", threads = 1 }
cluster = { trainers = 2, samplers = 2, parts = PARTS, max_restarts = 1000, silent_seconds = 8, rank_seconds = 15 }

[model.new]
layers = 2
width = 32
heads = 2
kv_heads = 1
mlp_width = 64
context = 32
alphabet = "abcdefghijklmnopqrstuvwxyz"

[[stage]]
kind = "sft"
steps = 12
optim = { learning_rate = 3e-3 }
trainer = { examples_per_step = 8 }

[[stage]]
kind = "rl"
steps = STEPS
optim = { learning_rate = 1e-3 }
rollout = { groups_per_step = 4, group_size = 4, max_turns = 2, retries = 0 }
"""
REWARD = '''
import time


def overlap(prompt, response, answer):
    """Letters that an answer has in common with the right one; slow enough to be hit while it judges."""
    time.sleep(0.02)
    return sum(a == b for a, b in zip(response, answer)) / max(1, len(answer))
'''
WORLD = """
import asyncio
import random

from temper.protocols import EnvOpening, EnvReply
from temper.types import Message


class Asking:
    '''Asks a second time, behind a letter that the seed draws; slow enough to be hit while it plays.'''

    async def start(self, task, seed):
        self.letters, self.num_steps = random.Random(f"{seed}/{task.id}"), 0
        return EnvOpening(messages=task.messages)

    async def step(self, message):
        self.num_steps += 1
        await asyncio.sleep(0.05)
        letter = self.letters.choice("abcdefghijklmnopqrstuvwxyz")
        return EnvReply(messages=(Message(role="user", content=letter),), is_done=self.num_steps == 2)

    async def close(self):
        pass
"""
PATIENCE = 300.0
"""For the run to go on after a fault, in seconds; more is a run that hangs."""
LEAVING_SECONDS = 15.0
STOPPED_SECONDS = 20.0
"""Of a driver, which goes on where it was when it is let: longer than anybody else may be silent."""
ROLES = {
    "trainer": b"temper.commands.training.ranks",
    "sampler": b"temper.cluster.sampler_main",
    "reward worker": b"temper.rewards.workers.program",
    "environment worker": b"temper.envs.processes.program",
}
"""What the command line of each has in it. The driver is the process that was started."""
FAULTS = (
    ("sampler", signal.SIGKILL),
    ("trainer", signal.SIGKILL),
    ("driver", signal.SIGKILL),
    ("reward worker", signal.SIGKILL),
    ("environment worker", signal.SIGKILL),
    ("sampler", signal.SIGSTOP),
    ("trainer", signal.SIGSTOP),
    ("driver", signal.SIGTERM),
    ("reward worker", signal.SIGSTOP),
    ("environment worker", signal.SIGSTOP),
    ("driver", signal.SIGSTOP),
)
PHASES = ("opening", "a step", "a checkpoint")


@dataclass
class Hit:
    """One fault and what became of it."""

    role: str
    fault: str
    phase: str
    step: int
    outcome: str = ""
    seconds: float = 0.0
    lost: int = 0
    """Steps and groups that had been recorded before it and are not any more, once the run has gone further."""
    left: int = 0
    """Processes that outlived their driver."""


def _given_paths() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


class Driven:
    """The run, in a folder of its own, started again whenever its driver is gone."""

    def __init__(self, home: Path, recipe: str) -> None:
        home.mkdir()
        (home / "recipe.toml").write_text(recipe)
        (home / "judged.py").write_text(REWARD)
        (home / "world.py").write_text(WORLD)
        self._home, self.folder, self.log = home, home / "run", home / "log.txt"
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        resume = ["--resume"] if (self.folder / "config.toml").is_file() else []
        command = [sys.executable, "-m", "temper", "train", "recipe.toml", "--run", str(self.folder), *resume]
        path = os.pathsep.join([str(Path(__file__).resolve().parents[1]), str(self._home), *_given_paths()])
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        with self.log.open("ab") as log:
            return subprocess.Popen(command, cwd=self._home, env=environment, stdout=log, stderr=log)

    def restart(self) -> None:
        self.process.wait(timeout=PATIENCE)
        self.process = self._start()

    @property
    def is_over(self) -> bool:
        return self.process.poll() is not None

    def steps(self) -> int:
        """Recorded so far, of all stages."""
        if not (self.folder / "run.db").is_file():
            return 0
        try:
            with RunReader(self.folder) as reader:
                return len(reader.query("SELECT 1 FROM steps"))
        except UserError:  # hit while it made its tables
            return 0

    def rows(self) -> set[tuple[int, int, str]]:
        """What is recorded: steps, and groups of prompts by step. Which they are, not how many: after a fault there are
        soon as many again."""
        if self.steps() == 0:
            return set()
        with RunReader(self.folder) as reader:
            steps = reader.query("SELECT stage, step, '' AS name FROM steps")
            groups = reader.query("SELECT stage, step, group_id AS name FROM groups")
        return {(row["stage"], row["step"], row["name"]) for row in (*steps, *groups)}

    def failed(self) -> int:
        """Answers that could not be judged."""
        if not (self.folder / "run.db").is_file():
            return 0
        with RunReader(self.folder) as reader:
            return len(reader.query("SELECT 1 FROM trajectories WHERE score_kind = 'error'"))

    def find(self, role: str) -> int | None:
        """A process of this role."""
        if role == "driver":
            return self.process.pid
        return next((pid for pid in below(self.process.pid) if ROLES[role] in command_of(pid)), None)

    def left(self) -> list[int]:
        """Processes of this run, by the folder that they work in."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.readlink(entry / "cwd") == str(self._home):
                    found.append(int(entry.name))
        return found

    def is_alone(self) -> bool:
        """Whether none of them outlives the driver for more than a moment."""
        return wait_until(lambda: not self.left(), LEAVING_SECONDS)

    def is_saving(self) -> bool:
        return any(self.folder.glob("checkpoints/*/.tmp-*"))


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def below(parent: int) -> Iterator[int]:
    """Processes that a process started, and those that they started."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            after = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if after[0] != "Z":
            children.setdefault(int(after[1]), []).append(int(entry.name))
    waiting = [parent]
    while waiting:
        own = children.get(waiting.pop(), [])
        yield from own
        waiting += own


def wait_until(found: Callable[[], bool], seconds: float, pause: float = 0.02) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found():
            return True
        time.sleep(pause)
    return False


def hit(run: Driven, role: str, number: signal.Signals, phase: str, draw: random.Random) -> Hit | None:
    """Throws one fault and waits until the run has got further. None: there was nobody to hit any more."""
    before = run.steps()
    if phase == "opening":
        wait_until(lambda: run.is_over or run.find(role) is not None, PATIENCE)
    else:
        wait_until(lambda: run.is_over or run.steps() > before, PATIENCE)
        time.sleep(draw.uniform(0.0, 0.3))
        if phase == "a checkpoint":
            wait_until(lambda: run.is_over or run.is_saving(), PATIENCE, pause=0.0005)
    pid = None if run.is_over else run.find(role)
    if pid is None:
        return None
    seen, recorded = Hit(role, number.name, phase, run.steps()), run.rows()
    start = time.monotonic()
    os.kill(pid, number)
    if role == "driver" and number is signal.SIGSTOP:
        time.sleep(STOPPED_SECONDS)
        os.kill(pid, signal.SIGCONT)
    elif role == "driver":
        run.process.wait(timeout=PATIENCE)
        seen.left = 0 if run.is_alone() else len(run.left())
        run.restart()
    # The step that was under way may have been past the fault; the one after it is not.
    went_on = wait_until(lambda: run.is_over or run.steps() > seen.step + 1, PATIENCE)
    seen.seconds = time.monotonic() - start
    is_resumed = role == "driver" and number is not signal.SIGSTOP
    seen.outcome = ("resumed" if is_resumed else "went on") if went_on else "HANGS"
    if run.is_over and run.process.returncode != 0:
        seen.outcome = f"ENDED with {run.process.returncode}"
    seen.lost = len(recorded - run.rows())
    return seen


def in_all_phases(faults: Sequence[tuple[str, signal.Signals]]) -> list[tuple[tuple[str, signal.Signals], str]]:
    """Every fault in every phase, and neighbours in different ones."""
    turns = range(len(PHASES))
    return [(fault, PHASES[(place + turn) % len(PHASES)]) for turn in turns for place, fault in enumerate(faults)]


def digest(folder: Path) -> str:
    last = max(folder.glob("checkpoints/1-rl/step-*"), key=lambda path: int(path.name.removeprefix("step-")))
    return hashlib.sha256((last / "model.safetensors").read_bytes()).hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--roles", nargs="+", choices=["driver", *ROLES], default=["driver", *ROLES])
    parser.add_argument("--parts", action="store_true", help="trainers hold parts of the model instead of copies")
    options = parser.parse_args()
    draw, console = random.Random(options.seed), Console(width=110)
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary).resolve()
        text = RECIPE.replace("PARTS", str(options.parts).lower()).replace("STEPS", str(4 * options.faults))
        # Side by side: the one that is hit waits most of the time.
        alone, run = Driven(work / "alone", text), Driven(work / "hit", text)
        hits = []
        for (role, number), phase in itertools.cycle(in_all_phases([f for f in FAULTS if f[0] in options.roles])):
            if len(hits) == options.faults or run.is_over:
                break
            if (seen := hit(run, role, number, phase, draw)) is not None:
                hits.append(seen)
                told = f"{seen.role} {seen.fault} in {seen.phase}: {seen.outcome}, {seen.seconds:.1f} s"
                console.print(f"{len(hits)}: {told}")
        code = run.process.wait(timeout=1800)
        assert alone.process.wait(timeout=1800) == 0, alone.log.read_text()[-3000:]
        same = code == 0 and digest(work / "hit" / "run") == digest(work / "alone" / "run")
        expected, found, failed = alone.steps(), run.steps(), run.failed()
        missing = len(alone.rows() - run.rows())
        left = 0 if run.is_alone() else len(run.left())
        show(console, hits)
        console.print(
            f"{len(hits)} faults; weights {'the same to the bit' if same else 'others'}; {found} of {expected} steps "
            f"recorded, {missing} steps and groups missing; {failed} answers without a judge; exit code {code}; {left} "
            f"processes left"
        )
        bad = [seen for seen in hits if seen.outcome not in ("went on", "resumed") or seen.left or seen.lost]
        is_good = same and expected == found and not (bad or failed or left or missing)
        if not is_good:
            print(run.log.read_text()[-3000:])
        return int(not is_good)


def show(console: Console, hits: list[Hit]) -> None:
    table = Table(
        "role", "fault", "phase", "times", "outcome", "seconds: median", "longest", "rows lost", "processes left"
    )
    kinds = {(seen.role, seen.fault, seen.phase, seen.outcome) for seen in hits}
    for kind in sorted(kinds):
        these = [s for s in hits if (s.role, s.fault, s.phase, s.outcome) == kind]
        own = sorted(seen.seconds for seen in these)
        lost, left = sum(seen.lost for seen in these), sum(seen.left for seen in these)
        table.add_row(
            *kind[:3], str(len(own)), kind[3], f"{own[len(own) // 2]:.1f}", f"{own[-1]:.1f}", str(lost), str(left)
        )
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
