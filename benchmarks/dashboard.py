"""How quick the dashboard is on a large run, what memory it takes, and whether training notices it. Three tables.

    python benchmarks/dashboard.py                       # 2,000 steps of 100 rollouts; a tiny recipe trained beside it
    python benchmarks/dashboard.py --steps 200 --train-steps 0
Training is measured in one run: the dashboard and its clients are stopped and let go on again every few seconds
(SIGSTOP, SIGCONT), and the time of steps under one is divided by that of steps under the other.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import numpy as np
from rich.console import Console
from rich.table import Table

from temper.runs.store.arrays import PLANES, pack_array
from temper.runs.store.schema import prepare

GROUPS, MEMBERS, TOKENS = 10, 10, 16
METRICS = (
    "reward/mean", "reward/std", "policy/entropy", "policy/kl_ref_k3", "policy/kl_old_k3", "policy/grad_norm",
    "policy/clip_frac_high", "policy/clip_frac_low", "gen/len_mean", "gen/len_max", "gen/truncation_rate",
    "mismatch/kl_k3", "mismatch/logp_abs_mean", "stale/mean", "stale/max", "data/degenerate", "data/all_pass",
    "data/all_fail", "sys/rollout_tok_s", "sys/train_tok_s", "sys/kv_use", "sys/preemptions", "sys/peak_memory_bytes",
    *(f"mismatch/more_{k}" for k in range(37)),
)  # fmt: skip
PHASES = ("rollout", "credit", "pack", "proximal", "forward_backward", "optimizer", "publish")
WORDS = [
    "we",
    "add",
    "the",
    "tens",
    "first",
    "then",
    "units",
    "so",
    "carry",
    "one",
    "and",
    "check",
    "it",
    "again",
    "12",
    "7",
    "45",
    "<b>bold</b>",
    "therefore",
]
RECIPE = """
name = "watched"
[model.new]
layers = 2
width = 64
heads = 2
kv_heads = 1
mlp_width = 128
context = 32
alphabet = "abcdefghijklmnopqrstuvwxyz"
[[train]]
generator = "spell_backward"
seed = 1
[train.options]
min_letters = 2
max_letters = 4
[[reward]]
kind = "edit"
[sampling]
max_new_tokens = 6
[checkpoint]
every = 100000
[[stage]]
kind = "rl"
steps = {steps}
[stage.rollout]
groups_per_step = 8
group_size = 8
"""


def make_store(folder: Path, steps: int, seed: int = 0) -> Path:
    """A made-up run of steps x GROUPS x MEMBERS rollouts, written by plain inserts."""
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text('[[stage]]\nkind = "rl"\nname = "large"\n')
    rng = np.random.default_rng(seed)
    with closing(sqlite3.connect(folder / "run.db", isolation_level=None)) as connection:
        prepare(connection)
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("BEGIN")
        connection.execute("INSERT INTO stages VALUES (0, 'rl', ?, ?)", (steps, time.time()))
        for step in range(1, steps + 1):
            insert_step(connection, step, rng)
        connection.execute("INSERT INTO meta VALUES ('finished', ?)", (repr(time.time()),))
        connection.execute("COMMIT")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return folder


def insert_step(connection: sqlite3.Connection, step: int, rng: np.random.Generator) -> None:
    values = rng.normal(size=len(METRICS)).tolist()
    connection.execute("INSERT INTO steps VALUES (0, ?, ?, 0.1, ?, 0, 0, 1600, 1600)", (step, step, GROUPS))
    connection.executemany(
        "INSERT INTO metrics VALUES (0, ?, ?, ?)", [(step, *pair) for pair in zip(METRICS, values, strict=True)]
    )
    connection.executemany("INSERT INTO seconds VALUES (0, ?, ?, ?)", [(step, name, 0.5) for name in PHASES])
    if step % 20 == 0:
        connection.execute(
            "INSERT INTO evaluations (stage, step, name, score, low, high, num_prompts, samples_per_prompt, "
            "constant_score, budget) VALUES (0, ?, 'greedy', ?, 0.3, 0.6, 100, 1, 0.1, '{}')",
            (step, 0.3 + 0.3 * step / 2000),
        )
    for group in range(GROUPS):
        insert_group(connection, step, (step - 1) * GROUPS + group, rng)


def insert_group(connection: sqlite3.Connection, step: int, draw: int, rng: np.random.Generator) -> None:
    task = f"{('sums', 'riddles', 'poems')[draw % 3]}:1:{draw % 5000}"
    group_id = f"{task}#{draw}"
    prompt = json.dumps([{"role": "user", "content": f"What is {draw % 5000} + {draw % 7}?"}])
    connection.execute(
        "INSERT INTO groups VALUES (0, ?, ?, ?, ?, ?, ?, 'trained')", (step, group_id, draw, task, prompt, str(draw))
    )
    connection.execute("INSERT INTO ledger VALUES (0, ?, ?, ?, ?, ?, 'trained')", (step, draw, draw, task, group_id))
    scores = (rng.random(MEMBERS) < 0.2 + 0.6 * step / 2000).astype(float)
    connection.execute(
        "INSERT INTO prompts VALUES (0, ?, ?, ?, ?, ?, ?, ?)",
        (task, step, task.partition(":")[0], 1 + draw // 15000, MEMBERS, scores.sum(), scores.mean()),
    )
    picked = rng.integers(len(WORDS), size=(MEMBERS, 80))
    statuses = np.where(rng.random(MEMBERS) < 0.05, "truncated_length", "completed")
    rows = [
        (step, group_id, member, str(statuses[member]), scores[member], " ".join(WORDS[k] for k in picked[member]))
        for member in range(MEMBERS)
    ]
    connection.executemany(
        "INSERT INTO trajectories (stage, step, group_id, member, status, score_kind, score, parts, weighted, text, "
        "finish, num_tokens, seconds) VALUES (0, ?, ?, ?, ?, 'value', ?, '{}', '{}', ?, 'stop', 16, 0.1)",
        rows,
    )
    ids = pack_array(rng.integers(200, size=TOKENS), "token_ids")
    mask = pack_array(np.arange(TOKENS) > 3, "loss_mask")
    numbers = pack_array(rng.normal(size=TOKENS), "weights")
    versions = pack_array(np.where(np.arange(TOKENS) > 3, step - 1 - draw % 3, -1), "versions")
    connection.executemany(
        "INSERT INTO token_rows (stage, step, group_id, member, row, token_ids, loss_mask, behavior_logprobs, "
        "versions, policy_logprobs, advantages, weights, codec) VALUES (0, ?, ?, ?, 0, ?, ?, ?, ?, ?, ?, ?, ?)",
        [(step, group_id, member, ids, mask, numbers, versions, *[numbers] * 3, PLANES) for member in range(MEMBERS)],
    )


class Dashboard:
    """`temper watch` in a process of its own."""

    def __init__(self, folder: Path) -> None:
        code = "import sys; from pathlib import Path; from temper.commands.watch import watch\n"
        code += "watch([Path(sys.argv[1])], port=0, say=lambda line: print(line, flush=True))"
        self.process = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = next(word for word in self.process.stdout.readline().split() if word.startswith("http")).rstrip("/")

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return json.loads(answer.read())

    def memory(self) -> tuple[float, float]:
        """(resident now, most so far) in MiB; not a number where there is no /proc."""
        try:
            lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        except OSError:
            return float("nan"), float("nan")
        found = {line.split(":")[0]: float(line.split()[1]) / 1024 for line in lines if line.endswith("kB")}
        return found["VmRSS"], found["VmHWM"]

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=20)


def questions(dashboard: Dashboard) -> dict[str, str]:
    """What each page asks, by page."""
    run = f"/api/runs/{dashboard.get('/api/runs')[0]['id']}"
    row = dashboard.get(f"{run}/rollouts?limit=1")["rows"][0]
    key = urlencode({name: row[name] for name in ("stage", "step", "group_id")})
    last = row["step"]
    return {
        "list of runs": "/api/runs",
        "table of runs": "/api/table",
        "overview": f"{run}/overview",
        "axes": f"{run}/axes",
        "metrics": f"{run}/metrics",
        "10 series": f"{run}/series?names={quote(','.join(METRICS[:10]))}",
        "rollouts, newest": f"{run}/rollouts",
        "rollouts, one step": f"{run}/rollouts?stage=0&step={last // 2}",
        "rollouts, reward and status": f"{run}/rollouts?min_reward=1&status=truncated_length",
        "rollouts, task": f"{run}/rollouts?task=poems",
        "rollouts, common text": f"{run}/rollouts?q=therefore",
        "rollouts, text that is nowhere": f"{run}/rollouts?q=zebra",
        "rollouts, offset 100,000": f"{run}/rollouts?offset=100000",
        "group": f"{run}/group?{key}",
        "tokens": f"{run}/trajectory?{key}&member={row['member']}",
        "data": f"{run}/data",
        "prompts, by draws": f"{run}/prompts?sort=-draws",
        "prompts, a search": f"{run}/prompts?q=4999",
        "systems": f"{run}/systems",
        "evaluations": f"{run}/evaluations",
        "config": f"{run}/config",
    }


def measure_pages(folder: Path, repeats: int) -> tuple[list[tuple[str, float, float, int]], tuple[float, float]]:
    """(page, first and median milliseconds, bytes), and memory of the server after all of them."""
    dashboard = Dashboard(folder)
    try:
        found = []
        for name, path in questions(dashboard).items():
            times = []
            for _ in range(repeats):
                started = time.perf_counter()
                with urllib.request.urlopen(dashboard.url + path, timeout=60) as answer:
                    size = len(answer.read())
                times.append(1000 * (time.perf_counter() - started))
            found.append((name, times[0], statistics.median(times), size))
        return found, dashboard.memory()
    finally:
        dashboard.close()


def poll(url: str) -> None:
    """A browser that never rests: the event stream in one thread, the overview and the rollouts every second."""
    import threading

    run = json.loads(urllib.request.urlopen(f"{url}/api/runs", timeout=60).read())[0]["id"]

    def listen() -> None:
        with urllib.request.urlopen(f"{url}/api/stream?run={run}", timeout=600) as answer:
            for _ in answer:
                continue

    threading.Thread(target=listen, daemon=True).start()
    while True:
        for page in ("overview", "rollouts", "systems", "data"):
            urllib.request.urlopen(f"{url}/api/runs/{run}/{page}", timeout=60).read()
        time.sleep(1.0)


def step_seconds(folder: Path) -> dict[int, float]:
    with closing(sqlite3.connect(f"{(folder / 'run.db').absolute().as_uri()}?mode=ro", uri=True)) as connection:
        return dict(connection.execute("SELECT step, SUM(seconds) FROM seconds GROUP BY step"))


@contextmanager
def watched(folder: Path, clients: int) -> Iterator[list[int]]:
    """Process ids of a dashboard and its clients."""
    dashboard = Dashboard(folder)
    command = [sys.executable, __file__, "--poll", dashboard.url]
    others = [subprocess.Popen(command, stderr=subprocess.DEVNULL) for _ in range(clients)]
    ids = [dashboard.process.pid, *(other.pid for other in others)]
    try:
        yield ids
    finally:
        for one in ids:
            os.kill(one, signal.SIGCONT)
        for other in others:
            other.terminate()
            other.wait(timeout=20)
        dashboard.close()


def measure_training(folder: Path, steps: int, clients: int, block_seconds: float) -> tuple[list[float], list[float]]:
    """Seconds of steps with and without the dashboard, taken in turns within one run."""
    folder.mkdir(parents=True)
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE.format(steps=steps))
    run = folder / "run"
    code = "import sys; from pathlib import Path; from temper.commands.training.train import train\n"
    code += "train(Path(sys.argv[1]), run=Path(sys.argv[2]))"
    training = subprocess.Popen([sys.executable, "-c", code, str(recipe), str(run)], stdout=subprocess.DEVNULL)
    while not (run / "run.db").is_file() or not step_seconds(run):
        assert training.poll() is None, "training ended before its first step"
        time.sleep(0.5)
    with_it: set[int] = set()
    without: set[int] = set()
    with watched(run, clients) as ids:
        time.sleep(3.0)  # both have started
        is_on = True
        while training.poll() is None:
            for one in ids:
                os.kill(one, signal.SIGCONT if is_on else signal.SIGSTOP)
            first = max(step_seconds(run))
            time.sleep(block_seconds)
            # The step in which the change fell, and the one in flight at the end, belong to neither.
            (with_it if is_on else without).update(range(first + 2, max(step_seconds(run))))
            is_on = not is_on
    training.wait(timeout=60)
    times = step_seconds(run)
    return [times[step] for step in sorted(with_it)], [times[step] for step in sorted(without)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--train-steps", type=int, default=400, help="0: leave training out")
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--block-seconds", type=float, default=4.0)
    parser.add_argument("--poll", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.poll:
        poll(options.poll)
    out = Console()
    with tempfile.TemporaryDirectory() as place:
        started = time.perf_counter()
        folder = make_store(Path(place) / "large", options.steps)
        size = (folder / "run.db").stat().st_size / 2**20
        rollouts = options.steps * GROUPS * MEMBERS
        out.print(f"{rollouts:,} rollouts, {size:.0f} MiB, made in {time.perf_counter() - started:.0f} s")
        rows, (memory, most) = measure_pages(folder, options.repeats)
        table = Table("question", "first, ms", "median, ms", "KiB")
        for name, first, median, received in rows:
            table.add_row(name, f"{first:.0f}", f"{median:.0f}", f"{received / 1024:.0f}")
        out.print(table)
        out.print(f"server memory: {memory:.0f} MiB now, {most:.0f} MiB at most")
        if options.train_steps:
            on, off = measure_training(
                Path(place) / "training", options.train_steps, options.clients, options.block_seconds
            )
            ratio = statistics.median(on) / statistics.median(off)
            out.print(
                f"training: {1000 * statistics.median(on):.1f} ms a step with the dashboard and {options.clients} "
                f"clients ({len(on)} steps), {1000 * statistics.median(off):.1f} ms without ({len(off)} steps): "
                f"ratio {ratio:.3f}"
            )


if __name__ == "__main__":
    main()
