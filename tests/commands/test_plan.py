"""temper plan: a table for every stage, chosen values, refusals that say what to do, all without weights."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from temper.cli import main
from temper.config import resolve, to_toml
from temper.models.tiny import character_tokenizer
from tests.planning.conftest import KEYS, SIZES


@pytest.fixture
def recipe(tiny_recipe: dict[str, Any], tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(to_toml(resolve(tiny_recipe, [], where="tiny")))
    return path


def plan(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["temper", "plan", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


def test_every_stage_has_its_table_of_bytes_and_seconds(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(monkeypatch, recipe, "--gpu", "4090", "--set", "optim.states=8bit") == 0
    shown = capsys.readouterr().out
    assert "stage 1: sft, on 4090 (23.5 GiB)" in shown
    assert "stage 2: rl, on 4090 (23.5 GiB)" in shown
    for part in ("weights", "KV cache", "optimiser states", "gradients", "activations", "graphs", "together"):
        assert part in shown
    assert "decoding" in shown
    assert "dominates" in shown
    assert "trainer.tokens_per_microbatch = 65536 (chosen)" in shown
    assert 'optim.states = "8bit",' in shown or 'optim.states = "8bit"\n' in shown, "given values are not marked"


def test_bytes_in_the_memory_of_hosts_are_always_told(
    tiny_recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "1.5b").mkdir()
    numbers = dict(zip(KEYS, SIZES["1.5b"], strict=True))
    (tmp_path / "1.5b" / "config.json").write_text(json.dumps({**numbers, "max_position_embeddings": 512}))
    (_, rl) = tiny_recipe["stage"]
    path = tmp_path / "offloaded.toml"
    table = {**tiny_recipe, "model": {"path": str(tmp_path / "1.5b"), "dtype": "bfloat16"}, "stage": [rl]}
    path.write_text(to_toml(resolve(table, [], where="offloaded")))
    assert plan(monkeypatch, path, "--gpu", "h200", "--set", "optim.offload=true") == 0
    assert "CUDA and gaps the rest), 14.4 GiB of the memory of each host" in " ".join(capsys.readouterr().out.split())
    keys = ("optim.states=float32", "trainer.tokens_per_microbatch=1024", "model.gradient_checkpointing=true")
    change = tuple(word for key in keys for word in ("--set", key))
    assert plan(monkeypatch, path, "--gpu", "t4", *change) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "optim.offload = true (with 14.4 GiB of the memory of each host)" in said


def test_what_cannot_fit_is_refused_with_the_change_that_helps(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A cache of a billion tokens on a GPU of 15 GiB."""
    assert plan(monkeypatch, recipe, "--gpu", "t4", "--set", "engine.kv_tokens=1000000000") == 2
    said = capsys.readouterr().err
    assert "stage 2 (rl): this needs" in said
    assert "KV cache" in said
    assert "engine.kv_tokens = " in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--gpu", "h20"), 'Did you mean "h200"?'),
        (("--gpu", "h200", "--gpus", "0"), "--gpus 0: use 1 to 4096"),
        (("--gpu", "h200", "--set", "trainer.tokens_per_microbatch=3"), "a whole number of at least 16"),
    ],
)
def test_mistakes_are_refused(
    arguments: tuple[str, ...], said: str, recipe: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert plan(monkeypatch, recipe, *arguments) == 2
    assert said in capsys.readouterr().err


def test_without_a_gpu_one_must_be_named(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert plan(monkeypatch, recipe) == 2
    assert "Name one with --gpu" in capsys.readouterr().err


def test_several_gpus_get_a_table_that_all_stages_share(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first stage only reads; trainers are started once."""
    assert plan(monkeypatch, recipe, "--gpu", "h200", "--gpus", "4", "--set", "stage.2.rollout.max_staleness=1") == 0
    shown = " ".join(capsys.readouterr().out.split())
    trainers = re.findall(r"cluster = \{trainers = (\d+)[^}]*parts = (\w+)", shown)
    assert len(set(trainers)) == 1
    assert "each trainer's GPU" in shown
    assert "each sampler's GPU" in shown
    assert "publishing" in shown
    assert "GPUs that wait: samplers" in shown
    assert 'engine.place = "process"' in shown


PROCESSES = ("--set", "engine.place=process", "--set", "cluster.trainers=3", "--set", "cluster.samplers=2")


@pytest.mark.parametrize(
    ("gpus", "said"), [("5", "samplers have GPUs of their own"), ("3", "all draw, then all train"), ("4", "")]
)
def test_a_recipe_with_a_table_is_planned_as_it_is_written_or_refused(
    gpus: str, said: str, recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = plan(monkeypatch, recipe, "--gpu", "h200", "--gpus", gpus, *PROCESSES)
    shown = capsys.readouterr()
    if said:
        assert code == 0
        assert "cluster = {trainers = 3, samplers = 2, parts = false}" in " ".join(shown.out.split())
        assert said in " ".join(shown.out.split())
        assert "exchange" in shown.out
    else:
        assert code == 2
        said = "trainers = 3, which need 3 GPUs, and samplers = 2: 5 GPUs, or 3 in turn."
        assert said in " ".join(shown.err.split())


def test_a_table_without_sampler_processes_needs_its_trainers_alone(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    change = ("--set", "cluster.trainers=3")
    assert plan(monkeypatch, recipe, "--gpu", "h200", *change) == 2, "one GPU is not what it asks for"
    assert "trainers = 3, which need 3 GPUs. Plan it" in " ".join(capsys.readouterr().err.split())
    assert plan(monkeypatch, recipe, "--gpu", "h200", "--gpus", "3", *change) == 0
    shown = capsys.readouterr().out
    assert "exchange" in shown
    assert "gathered layers" not in shown, "copies gather nothing"


def test_parts_are_drawn_with_by_processes(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    change = ("--set", "cluster.trainers=3", "--set", "cluster.parts=true")
    assert plan(monkeypatch, recipe, "--gpu", "h200", "--gpus", "3", *change) == 2
    assert 'Set engine.place = "process"' in " ".join(capsys.readouterr().err.split())
    assert plan(monkeypatch, recipe, "--gpu", "h200", "--gpus", "3", *change, "--set", "engine.place=process") == 0
    shown = capsys.readouterr().out
    assert "gathered layers" in shown
    assert "sampler's weights" in shown, "no whole weights are there to draw with"


def test_experts_that_stay_are_counted_where_the_recipe_asks_for_them(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = ("model.new.experts=6", "cluster.parts=true", "cluster.experts=true", "engine.place=process")
    change = tuple(word for key in keys for word in ("--set", key))
    assert plan(monkeypatch, recipe, "--gpu", "h200", "--gpus", "2", *change, "--set", "cluster.trainers=2") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "cluster = {trainers = 2, parts = true, experts = true}" in shown
    assert "exchanged tokens" in shown


def test_an_engine_over_more_gpus_than_there_are_is_refused(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def planned(ranks: int, gpus: int) -> tuple[int, str]:
        change = ("--set", "engine.kind=vllm", "--set", f"engine.tensor_parallel={ranks}", "--gpus", str(gpus))
        code = plan(monkeypatch, recipe, "--gpu", "h200", *change)
        told = capsys.readouterr()
        return code, told.out + told.err

    code, said = planned(4, 2)
    assert code == 2
    assert "--gpus 2: engine.tensor_parallel = 4 shares every matrix out over as many. Plan it for 4 GPUs" in said
    assert planned(4, 4)[0] == 0


def test_rows_that_several_go_over_need_less_on_each(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for key, does in (("context", "go over rows"), ("tensor", "compute layers")):
        keys = ("cluster.parts=true", "cluster.trainers=2", f"cluster.{key}=2", "engine.place=process")
        change = tuple(word for key in keys for word in ("--set", key))
        assert plan(monkeypatch, recipe, "--gpu", "h200", "--gpus", "2", *change) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert f"cluster = {{trainers = 2, parts = true, {key} = 2}}" in shown
        assert f"{does} in groups of 2" in shown


def test_trainers_that_go_together_divide_over_gpus(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    change = ("--set", "cluster.parts=true", "--set", "cluster.context=2", "--set", "engine.place=process")
    assert plan(monkeypatch, recipe, "--gpu", "h200", "--gpus", "8", *change) == 0
    trainers = re.findall(r"cluster = {trainers = (\d+)", capsys.readouterr().out)
    assert trainers
    assert all(int(number) % 2 == 0 for number in trainers)
    assert plan(monkeypatch, recipe, "--gpu", "h200", "--gpus", "1", *change) == 2
    assert "no number of trainers that" in capsys.readouterr().err


def test_what_fits_on_none_of_these_gpus_says_on_how_many_it_would(
    tiny_recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """7B with states in float32 on two GPUs of 40 GiB. A description of the model is enough, there are no weights."""
    folder = tmp_path / "7b"
    character_tokenizer(tiny_recipe["model"]["new"]["alphabet"]).save_pretrained(folder)
    numbers = dict(zip(KEYS, SIZES["7b"], strict=True))
    (folder / "config.json").write_text(json.dumps({**numbers, "max_position_embeddings": 512}))
    (_, rl) = tiny_recipe["stage"]
    table = {**tiny_recipe, "model": {"path": str(folder), "dtype": "bfloat16"}, "stage": [rl]}
    path = tmp_path / "large.toml"
    path.write_text(to_toml(resolve(table, [], where="large")))
    arguments = ("--gpu", "a100-40", "--set", "optim.states=float32")
    assert plan(monkeypatch, path, *arguments, "--gpus", "2") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "on each of 2 GPUs (2 in turn, parts), and 39.4 are free" in said
    assert "model.lora = {rank = 32}; or 8 GPUs" in said
    assert plan(monkeypatch, path, *arguments, "--gpus", "8") == 0
    assert "parts = true" in capsys.readouterr().out


def test_a_model_without_a_tokenizer_is_planned_by_the_length_of_its_prompts(
    tiny_recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """config.json alone. A system message of 4,000 characters is a thousand tokens more in every row."""
    (tmp_path / "7b").mkdir()
    numbers = dict(zip(KEYS, SIZES["7b"], strict=True))
    (tmp_path / "7b" / "config.json").write_text(json.dumps({**numbers, "max_position_embeddings": 4096}))
    (_, rl) = tiny_recipe["stage"]
    table = {**tiny_recipe, "model": {"path": str(tmp_path / "7b")}, "stage": [rl]}
    path = tmp_path / "described.toml"
    path.write_text(to_toml(resolve(table, [], where="described")))
    rows = []
    for system in ("", "x" * 4000):
        assert plan(monkeypatch, path, "--gpu", "b200", "--set", f"prompt.system={system}") == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert "has no tokenizer: 4 characters of a prompt are counted as a token" in shown
        rows.append(int(re.search(r"rows of up to ([\d,]+) tokens", shown)[1].replace(",", "")))  # type: ignore[index]
    assert 1000 <= rows[1] - rows[0] <= 1010


def test_a_table_that_is_proposed_for_a_stage_that_only_reads_is_taken(
    tiny_recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It draws for evaluations, and a part of a model draws nothing."""
    (tmp_path / "1.5b").mkdir()
    numbers = dict(zip(KEYS, SIZES["1.5b"], strict=True))
    (tmp_path / "1.5b" / "config.json").write_text(json.dumps({**numbers, "max_position_embeddings": 512}))
    (sft, _) = tiny_recipe["stage"]
    path = tmp_path / "sft.toml"
    table = {**tiny_recipe, "model": {"path": str(tmp_path / "1.5b"), "dtype": "bfloat16"}, "stage": [sft]}
    path.write_text(to_toml(resolve(table, [], where="sft")))
    assert plan(monkeypatch, path, "--gpu", "4090", "--gpus", "8") == 0
    shown = " ".join(capsys.readouterr().out.split())
    proposed = 'cluster = {trainers = 8, parts = true}, engine.place = "process": '
    assert proposed in shown
    change = [word for key in proposed.removesuffix(": ").split(", engine") for word in ("--set", key)]
    change[-1] = f"engine{change[-1]}"
    assert plan(monkeypatch, path, "--gpu", "4090", "--gpus", "8", *change) == 0
