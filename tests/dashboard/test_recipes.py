"""What differs between recipes, and from the defaults."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from temper.config import resolve, to_toml
from temper.dashboard import recipes

Stage = dict[str, Any]


def sft(**keys: Any) -> Stage:
    return {"kind": "sft", "name": "a", "steps": 5, "seed": 0, "optim": {"learning_rate": 1.0, "beta1": 0.9}, **keys}


def rl(**keys: Any) -> Stage:
    return {**sft(), "kind": "rl", **keys}


def test_only_keys_that_differ_are_named_and_by_kind_of_stage() -> None:
    changed = {"learning_rate": 2.0, "beta1": 0.9}
    keys, values = recipes.differing({"one": [sft(), rl()], "two": [sft(), rl(optim=changed)]})
    assert keys == ["rl.optim.learning_rate"]
    assert values == {"one": {"rl.optim.learning_rate": 1.0}, "two": {"rl.optim.learning_rate": 2.0}}


def test_a_run_without_a_stage_is_compared_in_those_it_has() -> None:
    """By its place, the RL stage of the second would be held against the first's imitation."""
    keys, values = recipes.differing({"both": [sft(steps=9), rl()], "alone": [rl(steps=7)]})
    assert keys == ["stages", "rl.steps"]
    assert values["both"] == {"stages": "sft → rl", "rl.steps": 5}
    assert values["alone"] == {"stages": "rl", "rl.steps": 7}


def test_a_key_that_all_stages_share_is_named_once() -> None:
    keys, values = recipes.differing({"one": [sft(), rl()], "two": [sft(seed=3), rl(seed=3)]})
    assert (keys, values["two"]) == (["seed"], {"seed": 3})
    keys, _ = recipes.differing({"one": [sft(), rl()], "two": [sft(seed=3), rl()]})
    assert keys == ["sft.seed"]


def test_a_table_that_only_some_have_is_one_difference() -> None:
    new = {"layers": 2, "width": 64}
    keys, values = recipes.differing({"new": [rl(model={"path": "", "new": new})], "old": [rl(model={"path": "x"})]})
    assert keys == ["model.path", "model.new"]
    assert (values["new"]["model.new"], values["old"]["model.new"]) == (new, None)


def test_second_stages_of_a_kind_are_numbered() -> None:
    assert recipes.kinds_of([sft(), rl(), sft()]) == ["sft", "rl", "sft 2"]


def test_seeds_of_one_recipe_are_one_group_and_anything_else_is_not() -> None:
    first = recipes.seed_group([sft(), rl()])
    assert recipes.seed_group([sft(seed=1, name="b"), rl(seed=1, name="b")]) == first
    assert recipes.seed_group([sft(seed=1, steps=6), rl(seed=1)]) != first
    assert recipes.seed_group([sft(), rl(train=[{"seed": 1}])]) != first, "other data is another experiment"
    assert recipes.seed_group([]) == ""


def test_what_a_recipe_changes_is_what_was_written_in_it(tiny_recipe: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(to_toml(resolve(tiny_recipe, [], where="tiny")))
    rows = recipes.changed(recipes.recipe_stages(tmp_path))
    found = {(row["stage"], row["key"]): (row["value"], row["default"]) for row in rows}
    (rates,) = ({key: pair for key, pair in found.items() if key[1] == "optim.learning_rate"},)
    assert all(default == 1e-6 for _, default in rates.values())
    assert found["", "train.0.generator"] == ("spell_backward", ""), "the same in both stages: said once"
    assert not [key for _, key in found if key.startswith("checkpoint.keep")], "a default is left out"
    recipe = {**tiny_recipe, "checkpoint": {"keep": 7}}
    (tmp_path / "config.toml").write_text(to_toml(resolve(recipe, [], where="tiny")))
    rows = recipes.changed(recipes.recipe_stages(tmp_path))
    assert [row for row in rows if row["key"] == "checkpoint.keep"] == [
        {"stage": "", "key": "checkpoint.keep", "value": 7, "default": 2}
    ]


def test_a_recipe_that_cannot_be_read_is_no_recipe(tmp_path: Path) -> None:
    assert recipes.recipe_stages(tmp_path) == []
    for content in (b"no toml [", b"\xff\xfe", b"stage = 3", b"[[stage]\n"):
        (tmp_path / "config.toml").write_bytes(content)
        assert recipes.recipe_stages(tmp_path) == [], content


def test_a_recipe_is_read_without_torch() -> None:
    """A missing recipe, and the page of another's, must not wait for it."""
    code = "import sys, temper.config; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
