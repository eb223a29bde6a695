"""What a dry run finds before a run begins."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from temper.build import build_stage, first_model, make_plan
from temper.commands.preflight import dry_run
from temper.config import load_recipe, resolve, to_toml
from temper.data import open_data
from temper.errors import UserError

LEAK = "natalia sold clips to forty eight of her friends in april and then half as many in may how many in all"
OTHER = "a bakery made ninety loaves of bread and sold sixty of them before noon how many loaves are left to sell"


@pytest.fixture
def leaky(tiny_recipe: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """One held-out prompt is in the training file with other words around it, another one word by word."""

    def write(name: str, *prompts: str) -> str:
        rows = [json.dumps({"prompt": prompt, "answer": "a"}) for prompt in prompts]
        (tmp_path / name).write_text("\n".join(rows))
        return str(tmp_path / name)

    tiny_recipe["model"]["new"] |= {"context": 256, "alphabet": "abcdefghijklmnopqrstuvwxyz "}
    tiny_recipe["train"] = [{"path": write("train.jsonl", "nothing like it at all", OTHER, f"please answer {LEAK}")}]
    tiny_recipe["heldout"] = {"path": write("heldout.jsonl", LEAK, OTHER)}
    return tiny_recipe


def write_recipe(recipe: dict[str, Any], folder: Path) -> Path:
    path = folder / "recipe.toml"
    path.write_text(to_toml(resolve(recipe, [], where="tiny")))
    return path


def test_a_dry_run_tells_of_held_out_prompts_in_the_training_data(leaky: dict[str, Any], tmp_path: Path) -> None:
    text = dry_run(write_recipe(leaky, tmp_path))
    assert "contamination: 1 of 2 held-out prompts" in text
    assert "train.jsonl:3 and heldout.jsonl:1" in text
    assert "train.jsonl:2" not in text, "equal prompts are removed, not reported"
    leaky["heldout"] = {"path": leaky["train"][0]["path"], "size": 1}
    assert "contamination" not in dry_run(write_recipe(leaky, tmp_path))


def test_a_dry_run_and_a_run_tell_of_stale_samples_that_nothing_corrects(
    tiny_recipe: dict[str, Any], tmp_path: Path
) -> None:
    tiny_recipe["stage"][1]["rollout"]["max_staleness"] = 2
    said = "warning: rollout.max_staleness=2 trains on samples of older weights"
    assert said in dry_run(write_recipe(tiny_recipe, tmp_path))
    warnings: list[str] = []

    async def start() -> None:
        config = resolve(tiny_recipe, [], where="tiny")[1]
        stage = build_stage(config, 0, first_model(config, tmp_path))
        stage.warn = warnings.append
        await make_plan(stage, first_step=1, recorders=(), checkpoint=lambda step: None).gate()
        await stage.close()

    asyncio.run(start())
    assert any(f"warning: {doubt}".startswith(said) for doubt in warnings)
    tiny_recipe["stage"][1]["objective"] = {"corrections": ["token_tis"]}
    assert said not in dry_run(write_recipe(tiny_recipe, tmp_path))


def test_a_run_tells_of_them_before_its_first_step(leaky: dict[str, Any], tmp_path: Path) -> None:
    warnings: list[str] = []

    async def start() -> None:
        config = resolve(leaky, [], where="tiny")[0]
        stage = build_stage(config, 0, first_model(config, tmp_path))
        stage.warn = warnings.append
        await make_plan(stage, first_step=1, recorders=(), checkpoint=lambda step: None).gate()
        await stage.close()

    asyncio.run(start())
    assert len(warnings) == 1
    assert "train.jsonl:3 and heldout.jsonl:1" in warnings[0]


def test_a_dry_run_tries_the_held_out_verifier_too(tiny_recipe: dict[str, Any], tmp_path: Path) -> None:
    tiny_recipe["evaluation"] = {"reward": [{"kind": "exact"}]}
    path = write_recipe(tiny_recipe, tmp_path)
    assert load_recipe(path)[0].evaluation.reward[0].kind == "exact", "the verifier survives being stored"
    assert "held-out verifier of gold answers   mean 1 of 16" in dry_run(path)


def test_verifiers_have_names_that_tell_them_apart(tiny_recipe: dict[str, Any], tmp_path: Path) -> None:
    names = []
    for judges in ([], [{"kind": "exact"}], [{"kind": "exact", "weight": 2.0}], [{"kind": "edit"}]):
        config = resolve({**tiny_recipe, "evaluation": {"reward": judges}}, [], where="tiny")[1]
        data = open_data(config, first_model(config, tmp_path))
        assert (data.verifier is data.rubric) == (not judges)
        names.append(data.verifier_name)
    assert len(set(names)) == 3
    assert names[0] == names[3], "the same reward, named or not"


def test_a_verifier_without_held_out_tasks_and_answers_longer_than_the_context_are_refused(
    tiny_recipe: dict[str, Any], tmp_path: Path
) -> None:
    alone = {key: value for key, value in tiny_recipe.items() if key != "heldout"}
    with pytest.raises(UserError, match=r"evaluation\.reward judges held-out tasks, and there are none"):
        resolve({**alone, "evaluation": {"reward": [{"kind": "exact"}]}}, [], where="tiny")
    tiny_recipe["evaluation"] = {"max_new_tokens": 31}
    with pytest.raises(UserError, match="with max_new_tokens=31 that is more than the model's context of 32"):
        dry_run(write_recipe(tiny_recipe, tmp_path))
