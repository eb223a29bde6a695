"""Messages that can be acted on: the nearest name, a command that works as typed."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from temper import errors
from temper.errors import command_line, install_line, nearest_file

ROOT = Path(__file__).parent.parent


def test_the_nearest_file_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").touch()
    (tmp_path / "zebra.py").touch()
    assert nearest_file(tmp_path / "trian.jsonl") == f' Did you mean "{tmp_path / "train.jsonl"}"?'
    assert nearest_file(tmp_path / "unlike") == ""
    assert nearest_file(tmp_path / "train.jsonl") == "", "it is there: something else is wrong with it"


def test_a_folder_that_is_not_there_is_named_with_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    said = nearest_file(tmp_path / "recipe" / "demo.toml")
    assert said == f' There is no folder "{tmp_path / "recipe"}". Did you mean "{tmp_path / "recipes"}"?'


def test_a_command_is_given_by_its_path_where_the_environment_is_not_active(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.chdir("/")
    line = command_line("python", "-c", "print('it runs')")
    assert Path(shlex.split(line)[0]).samefile(sys.executable)
    assert subprocess.run(line, shell=True, capture_output=True, text=True, timeout=60).stdout == "it runs\n"


def test_a_command_is_short_where_the_environment_is_active(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).absolute().parent}{os.pathsep}/usr/bin")
    assert command_line("python", "a b") == "python 'a b'"


def test_below_the_current_folder_a_command_is_relative(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(sys.executable).absolute().parent
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.chdir(folder.parent.parent)
    assert command_line("python") == f"{folder.parent.name}/{folder.name}/python"


def test_a_program_that_was_not_installed_is_run_as_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).absolute().parent))
    assert command_line("no_such_program", "x") == f"{Path(sys.executable).name} -m no_such_program x"


def test_from_a_clone_an_extra_is_installed_from_the_clone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert install_line("math").endswith('python -m pip install -c constraints.txt -e ".[math]"')
    monkeypatch.chdir("/")
    assert install_line("math").endswith(f'-c {ROOT / "constraints.txt"} -e "{ROOT}[math]"')


def test_from_an_index_an_extra_is_installed_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "__file__", str(tmp_path / "temper" / "errors.py"))
    assert install_line("math").endswith('python -m pip install "temper-rl[math]"')


def test_every_extra_that_a_message_names_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    code = [path.read_text() for path in (ROOT / "temper").rglob("*.py")]
    named = {extra for text in code for extra in re.findall(r"""install_line\(["'](\w+)["']\)""", text)}
    assert {"math", "parquet", "watch", "serve"} <= named
    assert named <= extras.keys()


def test_no_message_names_an_index_that_the_package_is_not_on() -> None:
    files = [path for path in (ROOT / "temper").rglob("*.py") if "temper-rl[" in path.read_text()]
    assert [path.name for path in files] == ["errors.py"], "messages say errors.install_line(extra)"
