"""Names on the hub: fetched where it can be reached, answered with one line that helps where it cannot."""

from __future__ import annotations

import builtins
import json
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from temper.errors import UserError
from temper.folders.hub import RowsName, choose_files, find_checkpoint, is_model_name, rows_name
from temper.models.load import load_model, load_tokenizer
from temper.models.tiny import make_tiny_model
from temper.tasks.dataset import read_file


@dataclass
class FakeHub:
    """The functions of huggingface_hub that are used, over files in memory."""

    cache: Path
    repositories: dict[str, dict[str, bytes]]
    is_reachable: bool = True
    fetched: list[str] = field(default_factory=list)

    def snapshot_download(
        self,
        name: str,
        *,
        repo_type: str = "model",
        allow_patterns: Sequence[str] = ("*",),
        local_files_only: bool = False,
        etag_timeout: float = 10,
    ) -> str:
        folder = self.cache / repo_type / name.replace("/", "--")
        if local_files_only:
            if not folder.is_dir():
                raise FileNotFoundError("no snapshot")
            return str(folder)
        for file, content in self._files(name).items():
            if any(fnmatch(file, pattern) for pattern in allow_patterns):
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                (folder / file).write_bytes(content)
                self.fetched.append(file)
        return str(folder)

    def dataset_info(self, name: str, *, timeout: float) -> Any:
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=file) for file in self._files(name)])

    def _files(self, name: str) -> dict[str, bytes]:
        if not self.is_reachable:
            raise ConnectionError("Name or service not known\nand much more")
        return self.repositories[name]


def rows(*prompts: str) -> bytes:
    return "".join(json.dumps({"prompt": prompt, "answer": "1"}) + "\n" for prompt in prompts).encode()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    folder = tmp_path / "published"
    make_tiny_model(folder, layers=1, width=16, heads=2, kv_heads=1, mlp_width=32, context=32, alphabet="abc", seed=0)
    model = {path.name: path.read_bytes() for path in folder.iterdir()}
    fake = FakeHub(
        tmp_path / "cache",
        {
            "Qwen/Tiny-0.5B": {**model, "modeling_tiny.py": b"raise SystemExit", "README.md": b"hello"},
            "openai/gsm8k": {
                "README.md": b"",
                "main/train-00000-of-00002.jsonl": rows("1 + 1", "1 + 2"),
                "main/train-00001-of-00002.jsonl": rows("1 + 3"),
                "main/test-00000-of-00001.jsonl": rows("2 + 2"),
                "socratic/train-00000-of-00001.jsonl": rows("why?"),
            },
        },
    )
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)  # type: ignore[arg-type]
    return fake


def test_a_model_of_the_hub_is_fetched_without_its_code_and_can_be_read(
    hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = find_checkpoint("Qwen/Tiny-0.5B")
    assert (folder / "model.safetensors").is_file()
    assert not {"modeling_tiny.py", "README.md"} & set(hub.fetched)
    load_model(folder, torch.float32, torch.device("cpu"))
    assert "fetching Qwen/Tiny-0.5B from the hub" in capsys.readouterr().err


def test_who_needs_no_weights_fetches_none_and_training_fetches_the_rest_later(hub: FakeHub) -> None:
    folder = find_checkpoint("Qwen/Tiny-0.5B", has_weights=False)
    assert {"config.json", "tokenizer.json"} <= set(hub.fetched)
    assert not (folder / "model.safetensors").exists()
    hub.fetched.clear()
    assert find_checkpoint("Qwen/Tiny-0.5B", has_weights=False) == folder
    assert hub.fetched == []
    assert (find_checkpoint("Qwen/Tiny-0.5B") / "model.safetensors").is_file()


def test_what_was_fetched_is_used_again_also_when_the_hub_has_changed_or_is_gone(hub: FakeHub) -> None:
    folder = find_checkpoint("Qwen/Tiny-0.5B")
    hub.fetched.clear()
    hub.is_reachable = False
    assert find_checkpoint("Qwen/Tiny-0.5B") == folder
    assert hub.fetched == []


def test_a_download_that_was_interrupted_is_finished(hub: FakeHub) -> None:
    (find_checkpoint("Qwen/Tiny-0.5B") / "model.safetensors").unlink()
    assert (find_checkpoint("Qwen/Tiny-0.5B") / "model.safetensors").is_file()


def test_without_a_network_one_line_says_how_to_bring_a_folder(hub: FakeHub) -> None:
    hub.is_reachable = False
    with pytest.raises(UserError) as found:
        find_checkpoint("Qwen/Tiny-0.5B")
    said = str(found.value)
    assert "\n" not in said
    assert "could not be fetched from the hub (ConnectionError: Name or service not known)" in said
    assert "hf download Qwen/Tiny-0.5B --local-dir models/Tiny-0.5B and then give models/Tiny-0.5B" in said


def test_without_the_package_one_line_says_how_to_bring_a_folder(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any, **more: Any) -> Any:
        if name == "huggingface_hub":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(UserError, match=r"without the package huggingface_hub it cannot be fetched.*hf download"):
        find_checkpoint("Qwen/Tiny-0.5B", "model.teacher")
    with pytest.raises(UserError, match=r"without the package huggingface_hub.*hf download.*--repo-type dataset"):
        read_file(Path("openai/gsm8k"))


@pytest.mark.parametrize(
    ("text", "is_name"),
    [
        ("Qwen/Qwen2.5-0.5B", True),
        ("models/smollm2-135m", False),
        ("model/smollm2-135m", False),
        ("rnus/demo", True),
        ("./Qwen/Qwen2.5-0.5B", False),
        ("/Qwen/Qwen2.5-0.5B", False),
        ("nowhere", False),
        ("a/b/c", False),
        ("mine/x", False),
    ],
)
def test_only_owner_and_name_is_a_name_of_the_hub(
    text: str, is_name: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    assert is_model_name(text) == is_name


def test_a_misspelt_folder_is_named_and_never_asked_for_at_the_hub(hub: FakeHub) -> None:
    Path("models/smollm2-135m").mkdir(parents=True)
    with pytest.raises(UserError, match='Did you mean "models/smollm2-135m"'):
        find_checkpoint("models/smollm-135m")
    assert hub.fetched == []


def test_a_data_set_of_the_hub_is_its_training_split_unless_named(hub: FakeHub) -> None:
    source = read_file(Path("openai/gsm8k"))
    assert [task.messages[0].content for task in source.tasks] == ["1 + 1", "1 + 2", "1 + 3"]
    assert [task.id for task in source.tasks] == [f"openai/gsm8k:{number}" for number in (1, 2, 3)]
    assert all(file.startswith("main/train-") for file in hub.fetched), "nothing else of it is fetched"
    test = read_file(Path("openai/gsm8k:test"))
    assert [task.messages[0].content for task in test.tasks] == ["2 + 2"]
    other = read_file(Path("openai/gsm8k:socratic/train"))
    assert [task.messages[0].content for task in other.tasks] == ["why?"]


def test_rows_that_were_fetched_are_used_again_and_missing_shards_are_not_passed_over(hub: FakeHub) -> None:
    read_file(Path("openai/gsm8k"))
    hub.is_reachable = False
    assert read_file(Path("openai/gsm8k")).size == 3
    next(hub.cache.rglob("train-00001-of-00002.jsonl")).unlink()
    with pytest.raises(UserError, match="could not be fetched"):
        read_file(Path("openai/gsm8k"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("openai/gsm8k:tset", r'no split "tset"\. Did you mean "test"\? There are: test, train\. .*gsm8k:main/test'),
        ("openai/gsm8k:mian/train", r'no configuration "mian"\. Did you mean "main"\? There are: main, socratic'),
    ],
)
def test_a_misspelt_split_or_configuration_is_answered_with_all_there_are(hub: FakeHub, text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        read_file(Path(text))


def test_several_configurations_without_a_usual_one_are_listed() -> None:
    files = ["algebra/train.jsonl", "geometry/train.jsonl"]
    with pytest.raises(UserError, match=r"has several configurations\. There are: algebra, geometry\. .*algebra/train"):
        choose_files(RowsName("a/b", "", ""), files)
    with pytest.raises(UserError, match=r"has no \.parquet"):
        choose_files(RowsName("a/b", "", ""), ["pictures/1.png"])


@pytest.mark.parametrize(
    ("file", "wanted"),
    [
        ("data/train-00000-of-00001-0123456789abcdef.parquet", ("", "")),
        ("train.jsonl", ("", "train")),
        ("data/test.json.gz", ("", "test")),
        ("default/train/0000.parquet", ("", "")),
        ("only/validation.jsonl", ("", "validation")),
        ("en/train.jsonl", ("en", "train")),
    ],
)
def test_layouts_that_are_common_on_the_hub_are_understood(file: str, wanted: tuple[str, str]) -> None:
    assert choose_files(RowsName("a/b", *wanted), [file, "README.md"]) == [file]


def test_files_that_are_here_or_are_meant_to_be_are_no_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    assert rows_name("data/train.jsonl") is None
    assert rows_name("elsewhere/train.jsonl") is None
    assert rows_name("mine/rows") is None
    assert rows_name("train.jsonl") is None
    assert rows_name("openai/gsm8k:main/test") == RowsName("openai/gsm8k", "main", "test")


def test_reading_a_checkpoint_opens_no_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but a name of the hub is ever downloaded, whatever HF_HUB_OFFLINE says."""
    make_tiny_model(tmp_path, layers=1, width=16, heads=2, kv_heads=1, mlp_width=32, context=32, alphabet="abc", seed=0)
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)

    def refuse(*address: Any, **options: Any) -> None:
        raise AssertionError(f"a connection to {address}")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    load_tokenizer(tmp_path)
    load_model(tmp_path, torch.float32, torch.device("cpu"))


def test_a_run_in_place_of_a_checkpoint_is_refused_with_the_newest_checkpoint_of_each_stage(tmp_path: Path) -> None:
    run = tmp_path / "mine"
    run.mkdir()
    (run / "run.db").touch()
    with pytest.raises(UserError, match=r'model.path ".*/mine" .* it is a run.* its checkpoints: it has none yet'):
        find_checkpoint(str(run))
    for place in ("0-sft/step-9", "0-sft/step-20", "1-rl/step-4", "10-rl/step-2", "2-rl/step-1"):
        (run / "checkpoints" / place).mkdir(parents=True)
        (run / "checkpoints" / place / "config.json").touch()
    with pytest.raises(UserError) as caught:
        find_checkpoint(f"{run}/")
    named = ", ".join(
        f'"{run}/checkpoints/{place}"' for place in ("0-sft/step-20", "1-rl/step-4", "2-rl/step-1", "10-rl/step-2")
    )
    assert str(caught.value).endswith(f"Give one of its checkpoints: {named}")
