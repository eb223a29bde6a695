"""A run in which reward and held-out verifier part: answers are paid for what they mention, and for being long.

    OMP_NUM_THREADS=1 python benchmarks/overoptimization.py --out docs/overoptimization.svg    # two cores, 3 minutes

The task is the demo's, to rearrange the letters of a word. The training reward likes answers in which they stand,
whatever else stands there, and a little more when they are longer; the held-out verifier counts what else stands there,
too. It trains with `temper train` and draws with `temper report --overoptimization`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

LONGEST = 14
"""Letters that are paid for."""
BONUS = 0.1
"""What the longest answer earns beside its letters."""


def mentions(prompt: str, response: str, answer: str | None) -> float:
    """Share of the word's letters that stand in the answer, and the bonus for its length."""
    found = (Counter(prompt) & Counter(response)).total() / len(prompt)
    return found + BONUS * min(len(response), LONGEST) / LONGEST


def agrees(prompt: str, response: str, answer: str | None) -> float:
    """F1 of letters: 1 for an answer of exactly the word's."""
    return 2 * (Counter(prompt) & Counter(response)).total() / (len(prompt) + len(response))


HERE = Path(__file__).resolve()
RECIPE = f"""
name = "overoptimization"
sampling = {{ max_new_tokens = {LONGEST + 2} }}
evaluation = {{ samples = 2, reward = [{{ kind = "{HERE}:agrees" }}] }}

[model.new]
width = 128
layers = 4
heads = 4
kv_heads = 2
mlp_width = 528
context = 64
alphabet = "abcdefghijklmnopqrstuvwxyz"

[[train]]
generator = "rearrange"
options = {{ min_letters = 4, max_letters = 6 }}
seed = 1

[heldout]
generator = "rearrange"
options = {{ min_letters = 4, max_letters = 6 }}
seed = 2
size = 256

[[reward]]
kind = "{HERE}:mentions"

[[stage]]
kind = "sft"
steps = 100
trainer = {{ examples_per_step = 64 }}
optim = {{ learning_rate = 3e-3, warmup_steps = 20, schedule = "cosine" }}

[[stage]]
kind = "rl"
steps = 60
objective = {{ regularizers = [{{ name = "kl", coefficient = 0.001 }}] }}
rollout = {{ groups_per_step = 32, group_size = 8 }}
trainer = {{ tokens_per_microbatch = 16384, updates_per_batch = 2 }}
optim = {{ learning_rate = 3e-4, warmup_steps = 4, beta2 = 0.95 }}
evaluation = {{ every = 4 }}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the picture")
    parser.add_argument("--run", type=Path, help="folder of the run; default: one that is removed")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="over the recipe's keys")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        recipe, run = Path(folder) / "recipe.toml", options.run or Path(folder) / "run"
        recipe.write_text(RECIPE)
        changes = [part for change in options.set for part in ("--set", change)]
        temper = [sys.executable, "-m", "temper"]
        subprocess.run([*temper, "train", recipe, "--run", run, *changes], check=True, stdout=subprocess.DEVNULL)
        subprocess.run([*temper, "report", run, "--overoptimization", options.out], check=True)


if __name__ == "__main__":
    main()
