"""What is said about a mistake: where it stands, what was probably meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from temper.config import RunConfig, known_keys, load_recipe, resolve
from temper.config.complaints import ELSEWHERE
from temper.errors import UserError

LEAST = '[model]\npath = "m"\n[[train]]\npath = "t.jsonl"\n[[reward]]\nkind = "math"\n'


def complain(folder: Path, text: str, *overrides: str) -> str:
    (folder / "r.toml").write_text(text)
    with pytest.raises(UserError) as found:
        load_recipe(folder / "r.toml", overrides)
    return str(found.value).removeprefix(str(folder) + "/")


def test_a_key_of_another_framework_is_answered_with_its_name_here(tmp_path: Path) -> None:
    said = complain(tmp_path, LEAST + "[optim]\nlr = 1e-5\n")
    assert said.startswith('r.toml, line 8: key "optim.lr" is unknown. It is called optim.learning_rate here.')
    assert '"temper recipe optim" explains them' in said
    assert "rollout.group_size here" in complain(tmp_path, "num_generations = 8\n" + LEAST)


def test_every_name_of_another_framework_leads_to_a_key_or_a_section() -> None:
    assert set(ELSEWHERE.values()) <= {*known_keys(), *RunConfig.model_fields, "model.lora"}
    known = {name.rpartition(".")[2] for name in known_keys()}
    assert not ELSEWHERE.keys() & known, "a name that is a key somewhere would be sent away from there"


def test_a_key_in_the_wrong_section_is_answered_with_the_right_one(tmp_path: Path) -> None:
    said = complain(tmp_path, "max_new_tokens = 9\n" + LEAST)
    assert "There is sampling.max_new_tokens, evaluation.max_new_tokens." in said


def test_a_value_that_is_not_allowed_is_answered_with_the_nearest(tmp_path: Path) -> None:
    said = complain(tmp_path, LEAST + '[optim]\nschedule = "cosin"\n')
    assert said.startswith("r.toml, line 8: optim.schedule: ")
    assert said.endswith('Did you mean "cosine"?')


def test_the_line_of_a_key_inside_a_table_in_one_line_is_named(tmp_path: Path) -> None:
    assert complain(tmp_path, "optim = { beta1 = 2.0 }\n" + LEAST).startswith("r.toml, line 1: optim.beta1")


def test_of_two_equal_keys_the_one_with_the_bad_value_is_named(tmp_path: Path) -> None:
    text = LEAST + '[[stage]]\nkind = "sft"\nsteps = 3\n[[stage]]\nkind = "rl"\nsteps = 0\n'
    assert complain(tmp_path, text).startswith("r.toml, line 12: steps")


def test_a_mistake_of_the_command_line_is_not_blamed_on_the_file(tmp_path: Path) -> None:
    assert complain(tmp_path, LEAST, "optim.lr=1").startswith('--set optim.lr=1: key "optim.lr" is unknown')
    assert complain(tmp_path, LEAST, "stage.1.steps=0").startswith("--set stage.1.steps=0: steps: ")


def test_a_misspelt_recipe_is_answered_with_the_nearest_file(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(LEAST)
    with pytest.raises(UserError, match=r'Did you mean ".*/recipe\.toml"\?.*temper init'):
        load_recipe(tmp_path / "recip.toml")


def test_an_override_can_address_one_stage(tiny_recipe: dict[str, Any]) -> None:
    changes = ["steps=7", "stage.2.steps=9", "stage.2.optim.learning_rate=0.5", "stage.1.kind=sft"]
    first, second = resolve(tiny_recipe, changes, where="tiny")
    assert (first.steps, second.steps) == (7, 9)
    assert second.optim.learning_rate == 0.5
    assert first.optim.learning_rate != 0.5
    assert resolve(tiny_recipe, ["stage.2.steps=9", "steps=7"], where="tiny")[1].steps == 7, "the last one counts"


@pytest.mark.parametrize("override", ["stage.0.steps=1", "stage.3.steps=1", "stage.rl.steps=1", "stage.2=1"])
def test_a_stage_that_is_not_there_is_refused_with_an_example(override: str, tiny_recipe: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"there are 2 stages, e\.g\. --set stage\.2\.optim\.learning_rate"):
        resolve(tiny_recipe, [override], where="tiny")
