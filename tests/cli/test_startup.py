"""Verbs that only complain answer at once: what takes seconds to import is not imported for a message."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.heavy  # a process of its own for each of forty lines
ROOT = Path(__file__).parents[2]
PROBE = """
import json, os, sys
from temper.cli import main
for place, arguments in enumerate(json.load(sys.stdin)):
    with open(f"{place}.txt", "wb") as file:
        if (child := os.fork()) == 0:  # what is imported for all is imported once
            os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
            sys.argv = ["temper", *arguments]
            try:
                main()
            finally:
                heavy = {"torch", "transformers", "huggingface_hub", "matplotlib"} & set(sys.modules)
                print("HEAVY", sorted(heavy), flush=True)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        file.write(f"CODE {code}".encode())
"""
BAD_KEY = '[optim]\nlr = 1\n\n[[train]]\npath = "train.jsonl"\n'
COMPLAINTS = [
    (["train", "missing.toml"], "cannot be read"),
    (["train", "bad.toml"], "optim.learning_rate"),
    (["train", "bad.toml", "--dry-run"], "optim.learning_rate"),
    (["train", "good.toml", "--set", "stage.2.steps=1"], "there is 1 stage"),
    (["sweep", "bad.toml", "--set", "steps=1,2"], "optim.learning_rate"),
    (["sweep", "good.toml"], "needs a key with several values"),
    (["guide", "99"], "has no question 99"),
    (["guide", "23", "--run"], "from the root of a clone"),
    (["trian", "good.toml"], "Did you mean 'train'?"),
    (["sample", "nowhere"], "is not a directory"),
    (["serve", "nowhere"], "is not a directory"),
    (["export", "nowhere", "out"], "is not a directory"),
    (["eval", "nowhere"], "is not a directory"),
    (["eval", "plain", "bad.toml"], "optim.learning_rate"),
    (["eval", "plain"], "--suite gsm8k"),
    (["eval", "plain", "--suite", "gms8k"], 'Did you mean "gsm8k"?'),
    (["scale", "nowhere", "--suite", "gsm8k"], "is not a directory"),
    (["scale", "plain", "--suite", "gms8k"], 'Did you mean "gsm8k"?'),
    (["best", "nowhere", "Hello", "--reward", "length"], "is not a directory"),
    (["best", "plain", "--suite", "gms8k"], 'Did you mean "gsm8k"?'),
    (["label-steps", "nowhere", "--out", "x.jsonl", "--suite", "gsm8k"], "is not a directory"),
    (["choose", "nowhere", "--suite", "gsm8k"], "is not a directory"),
    (["compare", "nowhere", "nowhere"], "is not a directory"),
    (["simulate", "bad.toml"], "optim.learning_rate"),
    (["simulate", "good.toml"], "--speed decode_step=..."),
    (["simulate", "good.toml", "--like", "nowhere"], "not a run directory"),
    (["report", "nowhere"], "not a run directory"),
    (["watch", "nowhere"], "nowhere"),
    (["recipe", "optim.learnin_rate"], 'Did you mean "optim.learning_rate"?'),
    (["metrics", "no/such"], "is unknown"),
    (["presets", "drgrpo"], 'Did you mean "dr_grpo"?'),
    (["presets", "--compare", "dapo", "gpso"], 'objective "gpso" is unknown. Did you mean'),
    (["train", "good.toml", "--set", "objective.preset=drgrpo"], 'Did you mean "dr_grpo"?'),
    (["--nonsense"], "No such option"),
]
EXPLANATIONS = [["--version"], ["--help"], ["train", "--help"], ["recipe"], ["recipe", "optim"], ["guide", "7"]]
IMPORTS_TORCH = ["presets", "grpo"]


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each line printed in a process of its own, and its exit code."""
    folder = tmp_path_factory.mktemp("startup")
    (folder / "bad.toml").write_text(BAD_KEY)
    (folder / "good.toml").write_text((ROOT / "recipes/smollm2_chain_sum.toml").read_text().partition("[[stage]]")[0])
    (folder / "plain").mkdir()
    (folder / "plain" / "config.json").write_text("{}")
    lines = [*(arguments for arguments, _ in COMPLAINTS), *EXPLANATIONS, IMPORTS_TORCH]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    subprocess.run(
        [sys.executable, "-c", PROBE], input=json.dumps(lines), text=True, timeout=300, cwd=folder, env=environment,
        check=True,
    )  # fmt: skip
    return {" ".join(line): (folder / f"{place}.txt").read_text() for place, line in enumerate(lines)}


@pytest.mark.parametrize(
    ("arguments", "said"), COMPLAINTS, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_a_verb_that_only_complains_imports_nothing_heavy(
    arguments: list[str], said: str, printed: dict[str, str]
) -> None:
    output = printed[" ".join(arguments)]
    assert said in output
    assert output.endswith("HEAVY []\nCODE 2")


@pytest.mark.parametrize("arguments", EXPLANATIONS, ids=" ".join)
def test_a_verb_that_only_explains_imports_nothing_heavy(arguments: list[str], printed: dict[str, str]) -> None:
    assert printed[" ".join(arguments)].endswith("HEAVY []\nCODE 0")


def test_a_heavy_import_would_be_seen(printed: dict[str, str]) -> None:
    output = printed[" ".join(IMPORTS_TORCH)]
    assert output.endswith("CODE 0")
    assert "'torch'" in output
