"""Verbs that only complain answer at once: what takes seconds to import is not imported for a message."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROBE = """
import sys
sys.argv = ["temper", *sys.argv[1:]]
try:
    from temper.cli import main
    main()
finally:
    print("HEAVY", sorted({"torch", "transformers", "huggingface_hub", "matplotlib"} & set(sys.modules)))
"""
BAD_KEY = '[optim]\nlr = 1\n\n[[train]]\npath = "train.jsonl"\n'


def type_in(folder: Path, *arguments: str) -> tuple[int, str]:
    """Exit code and everything that was printed, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *arguments], capture_output=True, text=True, timeout=120, cwd=folder,
        env=environment,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
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
    ],
    ids=" ".join,
)
def test_a_verb_that_only_complains_imports_nothing_heavy(arguments: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text(BAD_KEY)
    (tmp_path / "good.toml").write_text((ROOT / "recipes/smollm2_chain_sum.toml").read_text().partition("[[stage]]")[0])
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "config.json").write_text("{}")
    code, output = type_in(tmp_path, *arguments)
    assert code == 2, output
    assert said in output
    assert "HEAVY []" in output


@pytest.mark.parametrize(
    "arguments", [["--version"], ["--help"], ["train", "--help"], ["recipe"], ["recipe", "optim"], ["guide", "7"]]
)
def test_a_verb_that_only_explains_imports_nothing_heavy(arguments: list[str], tmp_path: Path) -> None:
    code, output = type_in(tmp_path, *arguments)
    assert code == 0, output
    assert "HEAVY []" in output


def test_a_heavy_import_would_be_seen(tmp_path: Path) -> None:
    code, output = type_in(tmp_path, "presets", "grpo")
    assert code == 0
    assert "'torch'" in output
