"""Benchmarks take a shape by name or from a directory, and say which names there are."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
CONFIG = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
          "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
          "max_position_embeddings": 64}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(FOLDER)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path / "own"


def test_a_directory_with_a_configuration_is_a_shape(folder: Path) -> None:
    import shapes

    assert shapes.shape_of("tiny") == "tiny"
    config = shapes.configuration(shapes.shape_of(str(folder)), context=2048, eos_token_id=7)
    found = (config.hidden_size, config.num_hidden_layers, config.max_position_embeddings, config.eos_token_id)
    assert found == (64, 3, 2048, 7)


def test_what_is_no_shape_is_refused_with_those_there_are(folder: Path, tmp_path: Path) -> None:
    import shapes

    for text, why in (("qwen9-1b", "is neither a shape nor a directory"), (str(tmp_path), "has no config.json")):
        with pytest.raises(argparse.ArgumentTypeError, match=rf"{why}. Use one of tiny, smollm2-135m"):
            shapes.shape_of(text)


@pytest.mark.parametrize("name", ["step", "rows", "plan", "engine"])
def test_every_benchmark_of_a_model_refuses_it_so(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["qwen9-1b"] if name == "engine" else ["--shape", "qwen9-1b"]
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *given])
    with pytest.raises(SystemExit) as end:
        __import__(name).main()
    assert end.value.code == 2
    assert "Use one of tiny, smollm2-135m" in capsys.readouterr().err


def test_a_plan_is_made_for_a_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import plan

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert plan.run_one("135m", str(folder))["planned"] < plan.run_one("135m")["planned"] / 2
