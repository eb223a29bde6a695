"""As a user types it: results on the screen, mistakes with exit code 2 and one clear message, nothing lost."""

from __future__ import annotations

import copy
import errno
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from temper.cli import main
from temper.config import resolve, to_toml
from temper.errors import install_line
from temper.models.tiny import make_tiny_model
from temper.runs.reader import RunReader
from temper.trainer.local import LocalTrainer
from temper.version import __version__


def temper(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """Runs the command line in this process and returns its exit code."""
    monkeypatch.setattr(sys, "argv", ["temper", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


def write(path: Path, recipe: dict[str, Any]) -> Path:
    path.write_text(to_toml(resolve(recipe, [], where="tiny")))
    return path


@pytest.fixture
def recipe(tiny_recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A short recipe, and a fresh current directory."""
    monkeypatch.chdir(tmp_path)
    for stage in tiny_recipe["stage"]:
        stage["steps"] = 2
    return tiny_recipe


@pytest.fixture
def tiny_folder(tmp_path: Path) -> Path:
    """A checkpoint of a small model."""
    return make_tiny_model(
        tmp_path / "model", layers=1, width=16, heads=2, kv_heads=1, mlp_width=32, context=32, alphabet="abc", seed=0
    )


def test_train_report_eval_sample_and_export_work_on_one_run(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "r.toml", recipe)
    assert temper(monkeypatch, "train", path) == 0
    out = capsys.readouterr().out
    assert "report runs/tiny" in out
    run = tmp_path / "runs" / "tiny"
    assert temper(monkeypatch, "report", run, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert "weights_sha256" in json.dumps(report)
    assert temper(monkeypatch, "eval", run, "--json") == 0
    results = json.loads(capsys.readouterr().out)
    with RunReader(run) as reader:
        last = {e.name: e.score for e in reader.evaluations() if e.stage == 1 and e.step == 2}
    assert {r["name"]: r["score"] for r in results}["greedy"] == last["greedy"], "the checkpoint is the trained model"
    assert temper(monkeypatch, "sample", run, "--prompt", "ab", "--n", 2, "--max-new-tokens", 4) == 0
    capsys.readouterr()
    assert temper(monkeypatch, "export", run, tmp_path / "exported") == 0
    assert "within" in capsys.readouterr().out
    AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert not (tmp_path / "exported" / "trainer").exists()
    assert temper(monkeypatch, "export", run, tmp_path / "exported") == 2
    assert "not empty" in capsys.readouterr().err


def test_a_second_run_gets_its_own_directory_and_resume_takes_the_newest(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "r.toml", recipe)
    assert temper(monkeypatch, "train", path) == 0
    assert temper(monkeypatch, "train", path) == 0
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == ["tiny", "tiny-2"]
    assert temper(monkeypatch, "train", path, "--resume") == 0
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == ["tiny", "tiny-2"]


def test_a_dry_run_shows_the_arithmetic_and_writes_nothing(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert temper(monkeypatch, "train", write(tmp_path / "r.toml", recipe), "--dry-run") == 0
    out = capsys.readouterr().out
    assert "4 tasks x 4 = 16 completions a step" in out
    assert "reward of gold answers" in out
    assert not (tmp_path / "runs").exists()


def test_presets_and_doctor_explain_themselves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert temper(monkeypatch, "presets") == 0
    assert temper(monkeypatch, "presets", "--compare", "gspo", "grpo") == 0
    assert temper(monkeypatch, "doctor") == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("dr_grpo", "sequence_geometric", "torch"))
    titles = ["policy gradients", "given texts", "preferences", "reward models", "distillation"]
    assert sorted(titles, key=out.index) == titles


def test_the_version_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert temper(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"temper {__version__}\n"


def test_doctor_gives_whole_commands_brackets_and_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "math_verify" else found(name))
    monkeypatch.setenv("COLUMNS", "60")
    assert temper(monkeypatch, "doctor") == 0
    assert f"math_verify:  {install_line('math')}" in capsys.readouterr().out.splitlines()


def test_a_failed_start_does_not_use_up_the_name_of_a_run(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "r.toml", recipe)
    assert temper(monkeypatch, "train", path, "--set", 'reward=[{kind="exakt"}]') == 2
    assert temper(monkeypatch, "train", path, "--set", 'train=[{path="nowhere.jsonl"}]') == 2
    assert not (tmp_path / "runs" / "tiny").exists()
    assert temper(monkeypatch, "train", path) == 0
    assert [folder.name for folder in (tmp_path / "runs").iterdir()] == ["tiny"]


def test_the_closing_lines_of_a_training_run_in_a_shell_without_the_environment(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert temper(monkeypatch, "train", write(tmp_path / "r.toml", recipe)) == 0
    said = capsys.readouterr().out
    (line,) = [line.strip() for line in said.splitlines() if "numbers, intervals, time split" in line]
    command = line.partition("   ")[0]
    done = subprocess.run(
        command, shell=True, capture_output=True, text=True, timeout=120,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "runs/tiny: finished" in done.stdout


def test_several_answers_are_told_apart(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ask = ("sample", tiny_folder, "--prompt", "ab", "--max-new-tokens", 4)
    assert temper(monkeypatch, *ask, "--n", 3) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("---")] == [f"--- answer {k} of 3 ---" for k in (1, 2, 3)]
    assert temper(monkeypatch, *ask) == 0
    assert "---" not in capsys.readouterr().out


def data_file(folder: Path, *rows: str) -> list[dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    (folder / "train.jsonl").write_text("\n".join(rows) + "\n")
    return [{"path": str(folder / "train.jsonl")}]


GOOD_ROW = '{"prompt": "ab", "answer": "3"}'


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("unknown preset", 'Did you mean "dr_grpo"?'),
        ("missing data file", "no such file"),
        ("malformed row", "line 3"),
        ("unparsable answer", "train.jsonl:2"),
        ("group size 1", "group_size=1 is too small"),
        ("context too long", "model's context of 32"),
        ("missing model", "is not a directory"),
        ("unknown generator", 'Did you mean "spell_backward"?'),
        ("unknown reward", 'Did you mean "exact"?'),
        ("unknown character", "cannot encode"),
        ("everything held out", "nothing is left to train on"),
    ],
)
@pytest.mark.parametrize("verb", ["--dry-run", "--run"])
def test_bad_input_is_refused_before_training(
    case: str, message: str, verb: str, recipe: dict[str, Any], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    recipe = copy.deepcopy(recipe)
    recipe["stage"] = recipe["stage"][1:]
    changes: dict[str, Any] = {
        "unknown preset": {"objective": {"preset": "dr_grpo"}},  # misspelt below: this could not be written
        "missing data file": {"train": [{"path": "nowhere.jsonl"}]},
        "malformed row": {"train": data_file(tmp_path / "1", GOOD_ROW, GOOD_ROW, "{oops")},
        "unparsable answer": {
            "train": data_file(tmp_path / "2", GOOD_ROW, '{"prompt": "ab", "answer": "\\\\frac{1}{"}'),
            "reward": [{"kind": "math"}], "heldout": None,
        },
        "group size 1": {"rollout": {"group_size": 1}},
        "context too long": {"sampling": {"max_new_tokens": 100}},
        "missing model": {"model": {"path": "nowhere"}},
        "unknown generator": {"train": [{"generator": "spell_backwards"}]},
        "unknown reward": {"reward": [{"kind": "exakt"}]},
        "unknown character": {"train": data_file(tmp_path / "3", '{"prompt": "naïve", "answer": "x"}')},
        "everything held out": {
            "train": data_file(tmp_path / "4", GOOD_ROW), "heldout": data_file(tmp_path / "4", GOOD_ROW)[0],
        },
    }  # fmt: skip
    recipe["stage"][0] |= {key: value for key, value in changes[case].items() if value is not None}
    for key in changes[case].keys() & recipe.keys() - {"sampling"}:
        recipe.pop(key)  # tables merge: what is replaced must not shine through
    path = write(tmp_path / "r.toml", recipe)
    if case == "unknown preset":
        path.write_text(path.read_text().replace("dr_grpo", "drgrpo"))
    arguments = ["--dry-run"] if verb == "--dry-run" else ["--run", tmp_path / "run"]
    assert temper(monkeypatch, "train", path, *arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_an_unknown_key_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "r.toml").write_text("[optim]\nlearnin_rate = 1\n")
    assert temper(monkeypatch, "train", tmp_path / "r.toml") == 2
    assert 'Did you mean "learning_rate"?' in capsys.readouterr().err


def test_a_finished_run_is_not_overwritten(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "r.toml", recipe)
    assert temper(monkeypatch, "train", path, "--run", tmp_path / "run") == 0
    before = sorted(p.name for p in (tmp_path / "run" / "checkpoints").rglob("*"))
    assert temper(monkeypatch, "train", path, "--run", tmp_path / "run") == 2
    assert "--resume" in capsys.readouterr().err
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").rglob("*")) == before


def test_a_checkpoint_of_another_model_is_refused(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    recipe["stage"] = recipe["stage"][1:]
    assert temper(monkeypatch, "train", write(tmp_path / "r.toml", recipe), "--run", run) == 0
    recipe["model"]["new"]["width"] = 16
    recipe["stage"][0]["steps"] = 4
    for part in sorted((run / "model").iterdir()):
        part.unlink()
    (run / "model").rmdir()
    assert temper(monkeypatch, "train", write(tmp_path / "r.toml", recipe), "--run", run, "--resume") == 2
    assert "checkpoint" in capsys.readouterr().err


def test_a_full_disk_loses_nothing_and_the_run_goes_on_after(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe["stage"] = recipe["stage"][1:]
    recipe["stage"][0]["steps"] = 4
    path, run = write(tmp_path / "r.toml", recipe), tmp_path / "run"
    save = LocalTrainer.save

    def full_at_step_4(self: LocalTrainer, folder: Path) -> None:
        save(self, folder)
        if self.version == 4:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(LocalTrainer, "save", full_at_step_4)
    assert temper(monkeypatch, "train", path, "--run", run) == 2
    error = capsys.readouterr().err
    assert "disk full" in error
    assert "step-2 is intact" in error
    assert [p.name for p in (run / "checkpoints" / "0-rl").iterdir()] == ["step-2"]
    monkeypatch.setattr(LocalTrainer, "save", save)
    assert temper(monkeypatch, "train", path, "--run", run, "--resume") == 0
    assert (run / "checkpoints" / "0-rl" / "step-4" / "model.safetensors").is_file()


def test_a_damaged_checkpoint_is_named(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, run = write(tmp_path / "r.toml", recipe), tmp_path / "run"
    assert temper(monkeypatch, "train", path, "--run", run) == 0
    recipe["stage"][1]["steps"] = 4
    path = write(tmp_path / "r.toml", recipe)
    part = run / "checkpoints" / "1-rl" / "step-2" / "trainer" / "optimizer.safetensors"
    content = bytearray(part.read_bytes())
    content[100] ^= 1
    part.write_bytes(bytes(content))
    assert temper(monkeypatch, "train", path, "--run", run, "--resume") == 2
    assert "optimizer.safetensors" in capsys.readouterr().err


def test_a_sampler_that_disagrees_stops_the_run_before_the_first_step(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from temper.engine.local import runner

    recipe["stage"] = recipe["stage"][1:]
    real = runner.draw
    monkeypatch.setattr(runner, "draw", lambda logits, draws: real(logits * 3.0, draws))
    assert temper(monkeypatch, "train", write(tmp_path / "r.toml", recipe), "--run", tmp_path / "run") == 3
    complaint = capsys.readouterr().err
    assert "sampler and trainer disagree" in complaint
    assert "temperature" in complaint
    assert not (tmp_path / "run" / "checkpoints" / "0-rl").exists()


LEAVING = """
import sys
from temper.protocols import EnvOpening, EnvReply

class Leaving:
    async def start(self, task, seed):
        return EnvOpening(messages=task.messages)
    async def step(self, message):
        sys.exit(0)
    async def close(self):
        pass

def pay(prompt, response, answer):
    sys.exit(0)
"""


@pytest.mark.parametrize("culprit", ["env", "reward"])
def test_an_exit_in_users_code_is_no_end_of_a_training_with_code_0(
    culprit: str,
    recipe: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "leaving.py").write_text(LEAVING)
    monkeypatch.syspath_prepend(str(tmp_path))
    recipe["stage"] = recipe["stage"][1:]
    del recipe["heldout"]
    recipe |= {"env": {"name": "leaving:Leaving"}} if culprit == "env" else {"reward": [{"kind": "leaving:pay"}]}
    assert temper(monkeypatch, "train", write(tmp_path / "r.toml", recipe)) not in (0, None)
    said = capsys.readouterr().err
    assert "SystemExit: 0" in said
    assert culprit == "reward" or "Leaving.step()" in said


def test_a_training_that_an_alarm_stopped_does_not_end_with_code_0(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe["stage"] = [{**recipe["stage"][1], "steps": 7, "sampling": {"max_new_tokens": 1}}]
    recipe["alarms"] = {"truncation": "stop"}
    assert temper(monkeypatch, "train", write(tmp_path / "r.toml", recipe)) == 4
    assert "not finished: go on with --resume" in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["eval", "sample", "serve", "best", "scale", "compare", "choose", "export"])
def test_several_processes_of_a_launcher_are_refused(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert temper(monkeypatch, verb, tmp_path / "r.toml", tmp_path / "other") == 2
    assert "2 processes were started" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_verbs_that_only_read_run_under_a_launcher_and_one_process_is_no_launcher(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert temper(monkeypatch, "presets", "grpo") == 0
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert temper(monkeypatch, "train", write(tmp_path / "r.toml", recipe), "--dry-run") == 0


def test_a_failed_dry_run_ends_with_exit_code_2_and_never_says_in_order(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken_reward_of_cli.py").write_text("def f(prompt, response, answer):\n    return 1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    recipe["reward"] = [{"kind": "broken_reward_of_cli:f"}]
    assert temper(monkeypatch, "train", write(tmp_path / "r.toml", recipe), "--dry-run") == 2
    said = capsys.readouterr()
    assert "in order" not in said.out
    assert "ZeroDivisionError: division by zero, in " in said.err
    assert "broken_reward_of_cli.py, line 2" in said.err


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (("--samples", "4"), "--set evaluation.samples=..."),
        (("--temperature", "0"), "--set evaluation.temperature=..."),
        (("--limit", "8"), "--set heldout.size=..."),
        (("--seed", "3"), "Leave it out, or give --suite"),
        (("--fast",), "--set engine.numerics=..."),
        (("--out", "result.json"), "Leave it out, or give --suite"),
    ],
)
def test_options_of_suites_are_not_swallowed_by_held_out_tasks(
    option: tuple[str, ...],
    said: str,
    tiny_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert temper(monkeypatch, "eval", tiny_folder, tiny_folder / "recipe.toml", *option) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert f"{option[0]} is about suites" in shown
    assert said in shown
