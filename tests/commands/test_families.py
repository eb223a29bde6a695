"""Every verb refuses a model whose text would be silently wrong, before a token is drawn."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DiffLlamaConfig, Phi3Config

from temper.cli import main
from temper.config import resolve, to_toml
from temper.engine.local.step import Stepper
from temper.models import families
from temper.models.save import save_model
from temper.models.tiny import character_tokenizer, make_tiny_model

ALPHABET = "abcdefghijklmnopqrstuvwxyz"
VERBS: dict[str, Callable[[Path, str, Path], list[object]]] = {
    "sample": lambda model, suite, recipe: ["sample", model, "--prompt", "ab"],
    "serve": lambda model, suite, recipe: ["serve", model],
    "eval": lambda model, suite, recipe: ["eval", model, "--suite", suite],
    "eval of a recipe": lambda model, suite, recipe: ["eval", model, recipe],
    "compare": lambda model, suite, recipe: ["compare", model, model, "--suite", suite],
    "best": lambda model, suite, recipe: ["best", model, "--suite", suite],
    "scale": lambda model, suite, recipe: ["scale", model, "--suite", suite, "--modes", "best_of"],
    "choose": lambda model, suite, recipe: ["choose", model, "--suite", suite],
    "train": lambda model, suite, recipe: ["train", recipe],
}


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose layers subtract one attention from another."""
    tokenizer, folder = character_tokenizer(ALPHABET), tmp_path_factory.mktemp("diffllama")
    config = DiffLlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=None, initializer_range=0.2,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        save_model(AutoModelForCausalLM.from_config(config), tokenizer, folder)
    return folder


@pytest.fixture
def recipe(tiny_recipe: dict[str, Any], wrong: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Stepper, "begin", _never)
    return _write(tmp_path / "wrong.toml", {**tiny_recipe, "model": {"path": str(wrong)}})


def _never(*_: object) -> None:
    raise AssertionError("a token was drawn")


def _write(path: Path, recipe: dict[str, Any]) -> Path:
    path.write_text(to_toml(resolve(recipe, [], where="tiny")))
    return path


def temper(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """Exit code and everything that was printed, in one line."""
    monkeypatch.setattr(sys, "argv", ["temper", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    said = capsys.readouterr()
    return int(end.value.code or 0), " ".join((said.out + said.err).split())


@pytest.mark.parametrize("verb", [*VERBS, "train --dry-run"])
def test_a_known_wrong_family_is_refused_by_name(
    verb: str, wrong: Path, suite: str, recipe: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    command = ["train", recipe, "--dry-run"] if verb not in VERBS else VERBS[verb](wrong, suite, recipe)
    code, said = temper(monkeypatch, capsys, *command)
    assert (code, "is a diffllama, a family that Temper does not compute rightly" in said) == (2, True), said


@pytest.mark.parametrize("verb", VERBS)
def test_a_family_that_nobody_tried_is_compared_with_itself(
    verb: str, wrong: Path, suite: str, recipe: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(families, "_table", lambda: {"tried": [], "refused": {}})
    code, said = temper(monkeypatch, capsys, *VERBS[verb](wrong, suite, recipe))
    differs = "is a diffllama, a family that was not tried, and Temper's pass through it differs from its own"
    assert (code, differs in said) == (2, True), said


@pytest.mark.parametrize("is_dry", [True, False], ids=["dry run", "run"])
def test_a_teacher_and_a_reward_model_of_a_wrong_family_are_refused(
    is_dry: bool, wrong: Path, recipe: Path, tiny_recipe: dict[str, Any], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    shape = {"layers": 1, "width": 32, "heads": 2, "kv_heads": 1, "mlp_width": 64, "context": 32}
    student = make_tiny_model(tmp_path / "student", alphabet=ALPHABET, seed=0, **shape)  # type: ignore[arg-type]
    distill = {**tiny_recipe, "model": {"path": str(student), "teacher": str(wrong)}}
    distill["stage"] = [{"kind": "distill", "steps": 1}]
    rows = tmp_path / "pairs.jsonl"
    rows.write_text('{"prompt": "ab", "chosen": "ba", "rejected": "ab"}\n' * 8)
    scorer = {**tiny_recipe, "model": {"path": str(wrong)}, "train": [{"path": str(rows)}]}
    del scorer["heldout"]
    scorer["stage"] = [{"kind": "reward_model", "steps": 1, "trainer": {"examples_per_step": 4}}]
    for name, made in (("distill", distill), ("scorer", scorer)):
        path = _write(tmp_path / f"{name}.toml", made)
        code, said = temper(monkeypatch, capsys, "train", path, *(["--dry-run"] if is_dry else []))
        assert (code, "is a diffllama" in said) == (2, True), f"{name}: {said}"


@pytest.mark.parametrize("is_dry", [True, False], ids=["dry run", "run"])
def test_a_row_beyond_the_rotations_of_a_model_is_refused(
    is_dry: bool, tiny_recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The context is 64, but rotations switch at 16: a longer row would be computed by others than its neighbours."""
    monkeypatch.chdir(tmp_path)
    tokenizer = character_tokenizer(ALPHABET)
    rotation = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [8.0] * 4, "rope_theta": 10000.0}
    config = Phi3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, original_max_position_embeddings=16,
        rope_parameters=rotation, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )  # fmt: skip
    save_model(AutoModelForCausalLM.from_config(config), tokenizer, tmp_path / "phi")
    rows = [{"prompt": "ab", "answer": "ba"}] * 7 + [{"prompt": "abcdefghij", "answer": "jihgfedcba"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = {**tiny_recipe, "model": {"path": str(tmp_path / "phi")}, "train": [{"path": str(tmp_path / "rows.jsonl")}]}
    del made["heldout"]
    made["stage"] = [{"kind": "sft", "steps": 1, "trainer": {"examples_per_step": 4}}]
    path = _write(tmp_path / "long.toml", made)
    code, said = temper(monkeypatch, capsys, "train", path, *(["--dry-run"] if is_dry else []))
    assert (code, "rows.jsonl:8" in said, "the limit of 16" in said) == (2, True, True), said


@pytest.mark.parametrize(("family", "staleness"), [("glm4_moe", 0), ("glm4_moe", 1), ("deepseek_v3", 0)])
def test_a_model_with_buffers_in_its_checkpoint_is_trained(
    family: str, staleness: int, tiny_recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The bias of its routers is a buffer: no parameter, and part of every publication."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import families as trials

    tokenizer = character_tokenizer(ALPHABET)
    monkeypatch.setattr(trials, "SMALL", trials.SMALL | {"vocab_size": len(tokenizer)})
    model = trials.tiny_model(family)
    assert any(name.endswith("e_score_correction_bias") for name, _ in model.named_buffers())
    model.config.eos_token_id, model.config.bos_token_id = tokenizer.eos_token_id, None
    save_model(model, tokenizer, tmp_path / "model")
    tiny_recipe["model"] = {"path": str(tmp_path / "model")}
    tiny_recipe["stage"] = [{**stage, "steps": 2, "evaluation": {"every": 0}} for stage in tiny_recipe["stage"]]
    tiny_recipe["stage"][1]["rollout"] |= {"max_staleness": staleness}
    code, said = temper(monkeypatch, capsys, "train", _write(tmp_path / "buffers.toml", tiny_recipe))
    assert code == 0, said
