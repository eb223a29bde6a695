"""Checkpoints with code, a flipped bit, a part too many or too few: refused by every verb, with exit code 2."""

from __future__ import annotations

import ast
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from temper import cli
from temper.commands.training.train import train
from temper.config import resolve, to_toml
from temper.errors import UserError
from temper.folders import integrity
from temper.folders.integrity import sha256_of, verify, write_manifest

ROOT = Path(__file__).parents[2]
LOADERS = {"from_pretrained", "from_config", "AsyncEngineArgs", "EngineArgs", "LLM"}
"""Calls that can run code of a checkpoint."""


def temper(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["temper", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return int(end.value.code or 0)


def loads_without_refusal(source: str) -> list[int]:
    """Lines that load something of a checkpoint without trust_remote_code=False."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        trusts = [word.value for word in node.keywords if word.arg == "trust_remote_code"]
        is_refused = [isinstance(value, ast.Constant) and value.value is False for value in trusts] == [True]
        if (name in LOADERS and not is_refused) or (trusts and not is_refused):
            found.append(node.lineno)
    return found


def test_every_load_says_that_code_of_a_checkpoint_is_not_run() -> None:
    files = [path for folder in ("temper", "benchmarks", "recipes") for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 100
    careless = {str(path): lines for path in files if (lines := loads_without_refusal(path.read_text()))}
    assert careless == {}
    assert loads_without_refusal("AutoConfig.from_pretrained(x)\nLLM(model=m, trust_remote_code=True)") == [1, 2]


@pytest.fixture(scope="module")
def kept() -> dict[str, Path]:
    return {}


@pytest.fixture
def run(tiny_recipe: dict[str, Any], kept: dict[str, Path], tmp_path: Path, tmp_path_factory: Any) -> Path:
    """A copy of a finished run of two stages, and beside it recipe.toml."""
    if not kept:
        folder = tmp_path_factory.mktemp("trained")
        tiny_recipe["stage"][0]["steps"], tiny_recipe["stage"][1]["steps"] = 2, 2
        (folder / "recipe.toml").write_text(to_toml(resolve(tiny_recipe, [], where="tiny")))
        kept["run"] = train(folder / "recipe.toml", run=folder / "run")
    shutil.copytree(kept["run"].parent, tmp_path, dirs_exist_ok=True)
    return tmp_path / "run"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)


def drop_manifest(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").unlink()


def drop_manifest_and_state(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").unlink()
    (checkpoint / "state.json").unlink()


def change_theta(checkpoint: Path) -> None:
    config = checkpoint / "config.json"
    table = json.loads(config.read_text())
    table["rope_parameters"]["rope_theta"] *= 2
    config.write_text(json.dumps(table, indent=2, sort_keys=True) + "\n")


def add_code(checkpoint: Path) -> None:
    (checkpoint / "modeling_mine.py").write_text("raise SystemExit('code ran')\n")


def add_code_with_manifest(checkpoint: Path) -> None:
    """As somebody would who hands over a checkpoint that verifies."""
    config = json.loads((checkpoint / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "modeling_mine.Mine"}
    (checkpoint / "config.json").write_text(json.dumps(config))
    add_code(checkpoint)
    write_manifest(checkpoint)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "a flipped bit": lambda checkpoint: flip(checkpoint / "model.safetensors"),
    "another rope_theta": change_theta,
    "a manifest that is gone": drop_manifest,
    "a manifest and a state that are gone": drop_manifest_and_state,
    "a file too many": lambda checkpoint: shutil.copy(checkpoint / "config.json", checkpoint / "adapter_config.json"),
    "code": add_code,
    "code and a manifest that fits": add_code_with_manifest,
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("verb", ["sample", "export", "eval", "report", "serve"])
def test_every_verb_refuses_a_damaged_checkpoint(
    damage: str,
    verb: str,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    checkpoint = run / "checkpoints" / "1-rl" / "step-2"
    DAMAGE[damage](checkpoint)
    arguments: dict[str, list[object]] = {
        "sample": ["sample", checkpoint, "--prompt", "ab"],
        "export": ["export", checkpoint, tmp_path / "out"],
        "eval": ["eval", checkpoint, tmp_path / "recipe.toml"],
        "report": ["report", run],
        "serve": ["serve", checkpoint, "--port", 0],
    }
    assert temper(monkeypatch, *arguments[verb]) == 2
    error = capsys.readouterr().err
    assert "step-2" in error
    assert "Traceback" not in error


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("stage", ["0-sft", "1-rl"])
def test_a_resume_verifies_the_checkpoints_of_earlier_stages_too(
    damage: str,
    stage: str,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if stage == "0-sft":
        shutil.rmtree(run / "checkpoints" / "1-rl")  # killed before its first checkpoint
    DAMAGE[damage](run / "checkpoints" / stage / "step-2")
    assert temper(monkeypatch, "train", tmp_path / "recipe.toml", "--run", run, "--resume") == 2
    assert f"{stage}/step-2" in capsys.readouterr().err


def test_a_resume_verifies_the_new_model_that_a_run_began_with(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(run / "checkpoints")
    flip(run / "model" / "model.safetensors")
    assert temper(monkeypatch, "train", tmp_path / "recipe.toml", "--run", run, "--resume") == 2
    assert "model.safetensors is damaged" in capsys.readouterr().err


def test_a_damaged_run_is_reported_with_all_its_numbers(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    flip(run / "checkpoints" / "1-rl" / "step-2" / "model.safetensors")
    assert temper(monkeypatch, "report", run) == 2
    shown = capsys.readouterr()
    assert "finished, 4 steps" in shown.out
    assert "sha256 " not in shown.out


def test_only_a_resume_hashes_what_only_a_resume_reads(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = run / "checkpoints" / "1-rl" / "step-2"
    flip(checkpoint / "trainer" / "optimizer.safetensors")
    verify(checkpoint)
    with pytest.raises(UserError, match=r"optimizer\.safetensors is damaged"):
        verify(checkpoint, to_resume=True)
    (checkpoint / "trainer" / "optimizer.safetensors").write_bytes(b"short")
    with pytest.raises(UserError, match="has 5 bytes"):
        verify(checkpoint)


def test_a_directory_is_hashed_once_and_again_when_a_file_changes(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = run / "checkpoints" / "1-rl" / "step-2"
    hashed: list[Path] = []
    monkeypatch.setattr(integrity, "sha256_of", lambda path: hashed.append(path) or sha256_of(path))
    verify(checkpoint)
    num_hashed = len(hashed)
    assert num_hashed > 4
    verify(checkpoint)
    assert len(hashed) == num_hashed
    flip(checkpoint / "model.safetensors")
    with pytest.raises(UserError, match="damaged"):
        verify(checkpoint)


def test_a_directory_of_others_needs_no_manifest_but_must_hold_no_code(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "manifest.json").write_text('{"of": "another tool"}')
    verify(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["tok.Mine", null]}}')
    with pytest.raises(UserError, match=r"tokenizer_config\.json names code"):
        verify(tmp_path)
